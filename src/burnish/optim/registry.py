"""The registry of optimizers, and ``get``, which accepts a name, options or an object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from burnish.errors import ConfigurationError
from burnish.graph.names import Aliases
from burnish.optim import schedules
from burnish.optim.accumulate import accumulate
from burnish.optim.average import ema, swa
from burnish.optim.base import Optimizer
from burnish.optim.chain import TRANSFORMS, chain
from burnish.optim.diloco import diloco
from burnish.optim.groups import FROZEN, LR_SCALE, Groups, Overrides
from burnish.optim.proximal import proximal
from burnish.optim.slots import Slot, slots_of
from burnish.registry import Registry


def get(optimizer: str | Mapping[str, Any] | Optimizer) -> Optimizer:
    """Return the optimizer of a name, of options (``Optimizer.options``), or the object itself.

    Args:
        optimizer: a name, optionally with settings after a colon (``rmsprop:momentum=0.9,centered=true``); options; or an
            optimizer.

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
    """Return the state slots of a program's optimizer, from its options; empty for an optimizer given as a graph."""
    is_known = options.get("name") in OPTIMIZERS or options.get("name") in OPTIMIZERS.unlisted
    return slots_of(get(options)) if is_known else ()


def _around(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    @functools.wraps(make)
    def built(optimizer: Any, **settings: Any) -> Optimizer:
        return make(get(optimizer), **settings)

    return built


def _chain(transforms: Sequence[Any], optimizer: Any) -> Optimizer:
    return chain(*map(TRANSFORMS.resolve, transforms), get(optimizer))


def _groups(
    optimizer: Any,
    patterns: Sequence[tuple[str, Any]],
    decay: str,
    layer_decay: float | None,
    layers: Sequence[str] | None = None,
    aliases: Aliases | None = None,
) -> Optimizer:
    inside: Any = get(optimizer)
    overrides = tuple((pattern, _overrides_of(value, inside)) for pattern, value in patterns)
    listed = None if layers is None else tuple(layers)
    return Groups(inside, overrides, decay, layer_decay, listed, aliases={} if aliases is None else aliases)


def _overrides_of(value: Any, optimizer: Optimizer) -> Overrides:
    if value == FROZEN:
        return FROZEN
    if "name" in value:
        return get(value)  # type: ignore[return-value]  # a plain one
    # The optimizer itself builds settings that are objects, such as schedules.
    settings = {key: part for key, part in value.items() if key != LR_SCALE}
    built = get({**optimizer.options(), **settings})
    return {key: getattr(built, key, part) for key, part in value.items()}


OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer",
    {},
    home="burnish.optim",
    is_made=lambda given: isinstance(given, Optimizer),
    unlisted={
        "accumulate": _around(accumulate),
        "chain": _chain,
        "diloco": _around(diloco),
        "ema": _around(ema),
        "groups": _groups,
        "proximal": _around(proximal),
        "swa": _around(swa),
    },
)
"""Factories of optimizers by name. ``burnish.optim`` fills it in, because some optimizers look others up here."""
