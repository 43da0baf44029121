"""Optimizers that go around others, built again from the options that they gave."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from burnish.optim.accumulate import accumulate
from burnish.optim.average import ema, swa
from burnish.optim.base import Optimizer
from burnish.optim.diloco import diloco
from burnish.optim.groups import FROZEN, LR_SCALE, Groups, Overrides
from burnish.optim.transforms import chain
from burnish.optim.transforms.chain import TRANSFORMS


def wrapper_makers(get: Callable[[Any], Any]) -> dict[str, Callable[..., Optimizer]]:
    """Return what builds each optimizer that goes around others from its options, by name.

    Args:
        get: ``burnish.optim.get``, for the optimizers inside.
    """

    def plain(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
        @functools.wraps(make)
        def built(optimizer: Any, **settings: Any) -> Optimizer:
            return make(get(optimizer), **settings)

        return built

    def chained(transforms: Sequence[Any], optimizer: Any) -> Optimizer:
        return chain(*map(TRANSFORMS.resolve, transforms), get(optimizer))

    def grouped(
        optimizer: Any,
        patterns: Sequence[tuple[str, Any]],
        decay: str,
        layer_decay: float | None,
        layers: Sequence[str] | None = None,
    ) -> Optimizer:
        built = get(optimizer)
        overrides = tuple((pattern, _overrides_of(value, built, get)) for pattern, value in patterns)
        return Groups(built, overrides, decay, layer_decay, None if layers is None else tuple(layers))

    wrappers: dict[str, Callable[..., Optimizer]] = {"accumulate": accumulate, "diloco": diloco, "ema": ema, "swa": swa}
    return {"chain": chained, "groups": grouped, **{name: plain(make) for name, make in wrappers.items()}}


def _overrides_of(value: Any, optimizer: Optimizer, get: Callable[[Any], Any]) -> Overrides:
    """Return what a group of an optimizer sets, from the options that it gave."""
    if value == FROZEN:
        return FROZEN
    if "name" in value:
        own: Overrides = get(value)
        return own
    # Settings that are objects, such as schedules, are built by the optimizer that has them.
    settings = {key: part for key, part in value.items() if key != LR_SCALE}
    built = get({**optimizer.options(), **settings})
    return {key: getattr(built, key, part) for key, part in value.items()}
