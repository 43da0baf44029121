"""The optimizers by name, and whatever a user gives for an optimizer turned into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.errors import ConfigurationError
from burnish.optim import schedules
from burnish.optim.base import Optimizer
from burnish.optim.slots import Slot, slots_of
from burnish.registry import Registry

OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer", {}, home="burnish.optim", is_made=lambda given: isinstance(given, Optimizer)
)
"""What makes each optimizer, by name; ``burnish.optim`` enters them: some hold another, and ask for it here."""


def get(optimizer: str | Mapping[str, Any] | Optimizer) -> Optimizer:
    """Return the optimizer of a name, of the options that an optimizer gave (``Optimizer.options``), or the object itself.

    Args:
        optimizer: a name, with settings after a colon (``rmsprop:momentum=0.9,centered=true``); options; or an optimizer.

    Raises:
        ConfigurationError: there is no optimizer of that name, or no such option.
    """
    name = optimizer.partition(":")[0].strip() if isinstance(optimizer, str) else ""
    if name in OPTIMIZERS.unlisted:
        raise ConfigurationError(f"optimizer '{name}' goes around another one: give the object, burnish.optim.{name}(...)")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("lr"), Mapping):
        optimizer = {**optimizer, "lr": schedules.get(optimizer["lr"])}
    return OPTIMIZERS.resolve(optimizer)


def slots_by_options(options: Mapping[str, Any]) -> tuple[Slot, ...]:
    """Return what the optimizer of a program keeps, by the options that it gave; nothing of one that is a graph of its own."""
    is_known = options.get("name") in OPTIMIZERS or options.get("name") in OPTIMIZERS.unlisted
    return slots_of(get(options)) if is_known else ()
