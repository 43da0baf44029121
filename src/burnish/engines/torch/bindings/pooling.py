"""Max pooling with indices for its own gradient."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.bindings.calls import SIGNAL, VOLUME, as_image, from_image
from burnish.engines.torch.translate.rules import Call, translates
from burnish.kernels.pooling import FUSED_MAX_POOL, FUSED_MAX_POOL_GRAD


def _window(op: Call) -> list[Any]:
    """Return extents, strides, pads and dilations of windows over images or volumes, and True if sizes are rounded up."""
    windows = [list(op.attribute(name)) for name in ("kernel_shape", "strides", "pads", "dilations")]
    if op.rank(0) == SIGNAL:
        windows = [[neutral, *window] for neutral, window in zip((1, 1, 0, 1), windows, strict=True)]
    return [*windows, bool(op.attribute("ceil_mode"))]


def _signal_as_image(op: Call, index: int) -> Any:
    return as_image(op.tensor(index), SIGNAL) if op.rank(0) == SIGNAL else op.tensor(index)


def _like_first(op: Call, pooled: Any) -> Any:
    return from_image(pooled, op.extents(0)) if op.rank(0) == SIGNAL else pooled


@translates(FUSED_MAX_POOL)
def max_pool(op: Call) -> Any:
    over = torch.ops.aten.max_pool3d_with_indices if op.rank(0) == VOLUME else torch.ops.aten.max_pool2d_with_indices
    results = over.default(_signal_as_image(op, 0), *_window(op))
    return _like_first(op, results[0]), _like_first(op, results[1])


@translates(FUSED_MAX_POOL_GRAD)
def max_pool_gradient(op: Call) -> Any:
    """Translate (dy, places, x) -> dx."""
    dy, places, x = (_signal_as_image(op, index) for index in range(3))
    windows = _window(op)
    if op.rank(0) == VOLUME:
        return torch.ops.aten.max_pool3d_with_indices_backward.default(dy, x, *windows, places)
    return _like_first(op, torch.ops.aten.max_pool2d_with_indices_backward.default(dy, x, *windows, places))
