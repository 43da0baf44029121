"""Optimizers that go around others, built again from the options that they gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from burnish.errors import ConfigurationError
from burnish.optim.accumulate import accumulate
from burnish.optim.average import ema, swa
from burnish.optim.base import Optimizer
from burnish.optim.diloco import diloco
from burnish.optim.groups import FROZEN, LR_SCALE, Groups, Overrides
from burnish.optim.transforms import chain
from burnish.optim.transforms.chain import transform_of

Get = Callable[[Any], Any]
"""``burnish.optim.get``."""


def _chain(settings: Mapping[str, Any], get: Get) -> Optimizer:
    return chain(*(transform_of(options) for options in settings["transforms"]), get(settings["optimizer"]))


def _groups(settings: Mapping[str, Any], get: Get) -> Optimizer:
    optimizer = get(settings["optimizer"])

    def overrides_of(value: Any) -> Overrides:
        if value == FROZEN:
            return FROZEN
        if "name" in value:
            own: Overrides = get(value)
            return own
        # Settings that are objects, such as schedules, are built by the optimizer that has them.
        own_settings = {key: part for key, part in value.items() if key != LR_SCALE}
        built = get({**optimizer.options(), **own_settings})
        return {key: getattr(built, key, part) for key, part in value.items()}

    layers = settings.get("layers")
    return Groups(
        optimizer,
        tuple((pattern, overrides_of(value)) for pattern, value in settings["patterns"]),
        settings["decay"],
        settings["layer_decay"],
        None if layers is None else tuple(layers),
    )


def _plain(make: Callable[..., Optimizer]) -> Callable[[Mapping[str, Any], Get], Optimizer]:
    return lambda settings, get: make(**{**settings, "optimizer": get(settings["optimizer"])})


WRAPPERS: dict[str, Callable[[Mapping[str, Any], Get], Optimizer]] = {
    "accumulate": _plain(accumulate),
    "chain": _chain,
    "diloco": _plain(diloco),
    "ema": _plain(ema),
    "groups": _groups,
    "swa": _plain(swa),
}


def wrapper_of(name: str, settings: Mapping[str, Any], get: Get) -> Optimizer:
    """Return the optimizer of the options that it gave.

    Args:
        name: one of ``WRAPPERS``.
        settings: the options but the name.
        get: ``burnish.optim.get``, for the optimizers inside.

    Raises:
        ConfigurationError: an option is missing or unknown.
    """
    try:
        return WRAPPERS[name](settings, get)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"optimizer '{name}' cannot be built from the options {dict(settings)} ({error!r}): give what its options() "
            f"returned, or call burnish.optim.{name}(...)"
        ) from error
