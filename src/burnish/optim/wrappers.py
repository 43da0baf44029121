"""Optimizers that go around others, built again from the options that they gave."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from burnish.graph.layer_names import Aliases
from burnish.optim.accumulate import accumulate
from burnish.optim.average import ema, swa
from burnish.optim.base import Optimizer
from burnish.optim.diloco import diloco
from burnish.optim.groups import FROZEN, LR_SCALE, Groups, Overrides
from burnish.optim.proximal import proximal
from burnish.optim.registry import get
from burnish.optim.transforms import chain
from burnish.optim.transforms.chain import TRANSFORMS


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
    """Return what a group of an optimizer sets, from the options that it gave."""
    if value == FROZEN:
        return FROZEN
    if "name" in value:
        return get(value)  # type: ignore[return-value]  # a plain one
    # Settings that are objects, such as schedules, are built by the optimizer that has them.
    settings = {key: part for key, part in value.items() if key != LR_SCALE}
    built = get({**optimizer.options(), **settings})
    return {key: getattr(built, key, part) for key, part in value.items()}


WRAPPERS: dict[str, Callable[..., Optimizer]] = {
    "accumulate": _around(accumulate),
    "chain": _chain,
    "diloco": _around(diloco),
    "ema": _around(ema),
    "groups": _groups,
    "proximal": _around(proximal),
    "swa": _around(swa),
}
"""What builds each from its options."""
