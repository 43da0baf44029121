"""Reading images where a grid says, and grids of affine maps."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.translate.rules import Call, translates
from burnish.operators.sampling import GRID_SAMPLE_GRAD

MODES = {"bilinear": 0, "linear": 0, "nearest": 1, "bicubic": 2, "cubic": 2}
PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}
IMAGE, VOLUME = 4, 5


def _sampling(op: Call, rank: int) -> tuple[int, int, bool]:
    """Mode, padding and whether corners are aligned, as ATen takes them."""
    mode = MODES[op.attribute("mode", "linear")]
    if rank not in (IMAGE, VOLUME) or (rank == VOLUME and mode == MODES["cubic"]):
        raise op.unsupported("it samples data of another rank, or volumes by cubic interpolation")
    return mode, PADDINGS[op.attribute("padding_mode", "zeros")], bool(op.attribute("align_corners", 0))


@translates("GridSample")
def grid_sample(op: Call) -> Any:
    rank = op.rank()
    sampler: Any = torch.ops.aten.grid_sampler_2d if rank == IMAGE else torch.ops.aten.grid_sampler_3d
    return sampler.default(op.tensor(0), op.tensor(1).to(op.torch_dtype(0)), *_sampling(op, rank))


@translates(GRID_SAMPLE_GRAD)
def grid_sample_gradient(op: Call) -> Any:
    """(dy, x, grid) -> dx, dgrid."""
    rank, dtype = op.rank(1), op.torch_dtype(1)
    backward: Any = torch.ops.aten.grid_sampler_2d_backward if rank == IMAGE else torch.ops.aten.grid_sampler_3d_backward
    tensors = op.tensor(0), op.tensor(1), op.tensor(2).to(dtype)
    asked_for = [op.is_read(0), op.is_read(1)]
    dx, dgrid = backward.default(*tensors, *_sampling(op, rank), asked_for)[:2]
    return (dx if asked_for[0] else None), (dgrid.to(op.torch_dtype(2)) if asked_for[1] else None)


@translates("AffineGrid")
def affine_grid(op: Call) -> Any:
    return torch.ops.aten.affine_grid_generator.default(op.tensor(0), op.integers(1), bool(op.attribute("align_corners", 0)))
