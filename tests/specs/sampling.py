"""Reading images where a grid says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from torch.nn import functional

from burnish.errors import UnsupportedOperatorError
from specs.operator_spec import ErrorInput, OperatorSpec, Sample, normal

SHAPES = ("static", "batch", "symbolic")
PADDINGS = ("zeros", "border", "reflection")


def grid_of(rng: np.random.Generator, sizes: tuple[int, ...], aligned: int, *shape: int, reach: int = 1) -> np.ndarray:
    """Points in images of these sizes and up to ``reach`` beyond, that keep away from elements and the middles between them."""
    columns = []
    for size in reversed(sizes):
        whole = rng.integers(-reach, size + reach, shape)
        position = whole + rng.choice([0.15, 0.35, 0.65, 0.85], shape)
        columns.append(2 * position / (size - 1) - 1 if aligned else (2 * position + 1) / size - 1)
    return np.stack(columns, axis=-1)


def grid_sample_samples(rng: np.random.Generator) -> Iterator[Sample]:
    batched = (0, 1)
    for mode, padding, aligned in product(("linear", "nearest", "cubic"), PADDINGS, (0, 1)):
        attributes = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
        reach = 1 if padding == "zeros" else 8
        inputs = [normal(rng, 2, 3, 4, 5), grid_of(rng, (4, 5), aligned, 2, 3, 4, reach=reach)]
        label, repeated = f"{mode}_{padding}_{aligned}", aligned == (padding == "border")
        yield Sample(inputs, attributes, name=label, opset=20, batched=batched, repeated=repeated)
    for mode, padding, aligned in product(("linear", "nearest"), PADDINGS, (0, 1)):
        attributes = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
        inputs = [normal(rng, 2, 2, 3, 4, 2), grid_of(rng, (3, 4, 2), aligned, 2, 2, 2, 3)]
        label = f"volume_{mode}_{padding}_{aligned}"
        yield Sample(inputs, attributes, name=label, opset=20, batched=batched, repeated=padding != "reflection")
    x = normal(rng, 2, 3, 4, 5)
    yield Sample([x, grid_of(rng, (4, 5), 0, 2, 3, 2)], name="defaults", opset=20, batched=batched)
    one = [normal(rng, 2, 3, 1, 4), grid_of(rng, (3, 4), 1, 2, 3, 2)]
    attributes = {"padding_mode": "reflection", "align_corners": 1}
    yield Sample(one, attributes, name="a_single_row", opset=20, batched=batched)
    no_points = [x, np.zeros((2, 0, 3, 2))]
    yield Sample(no_points, name="no_points", opset=20, batched=batched)


def grid_sample_before_opset_20(rng: np.random.Generator) -> Iterator[Sample]:
    """ONNX Runtime has these in float32, and ``onnx.reference`` only under the later names of modes."""
    for mode, padding in (("bilinear", "zeros"), ("bicubic", "border"), ("nearest", "reflection")):
        attributes = {"mode": mode, "padding_mode": padding}
        inputs = [normal(rng, 2, 3, 4, 5), grid_of(rng, (4, 5), 0, 2, 3, 2)]
        yield Sample(inputs, attributes, name=f"{mode}_opset_16", batched=(0, 1), newest_opset=False)


def torch_grid_sample(
    x: torch.Tensor, grid: torch.Tensor, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> torch.Tensor:
    name = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return functional.grid_sample(x, grid, name, padding_mode, bool(align_corners))


def affine_grid_samples(rng: np.random.Generator) -> Iterator[Sample]:
    image, volume = np.array([2, 3, 4, 5]), np.array([2, 1, 2, 3, 4])
    for aligned in (0, 1):
        attributes = {"align_corners": aligned}
        yield Sample([normal(rng, 2, 2, 3), image], attributes, name=f"image_{aligned}", opset=20)
        yield Sample([normal(rng, 2, 3, 4), volume], attributes, name=f"volume_{aligned}", opset=20)
    yield Sample([normal(rng, 1, 2, 3), np.array([1, 1, 1, 1])], name="one_place", opset=20)


def affine_grid_of_size_at_run_time(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([normal(rng, 2, 2, 3), np.array([2, 3, 4, 5])], name="size_at_run_time", opset=20, constants=())


def torch_affine_grid(theta: torch.Tensor, size: torch.Tensor, *, align_corners: int = 0) -> torch.Tensor:
    return functional.affine_grid(theta, size.tolist(), bool(align_corners))


UNKNOWN_SIZE = Sample([np.zeros((1, 2, 3)), np.array([1, 1, 2, 2])], name="unknown_size", constants=(), opset=20)
UNRANKED = Sample([np.zeros((1, 1, 2, 2)), np.zeros((1, 1, 1, 2))], name="unranked", opset=20)
SPECS = [
    OperatorSpec("AffineGrid", affine_grid_samples, torch=torch_affine_grid, shapes=SHAPES),
    OperatorSpec(
        "AffineGrid",
        affine_grid_of_size_at_run_time,
        torch=torch_affine_grid,
        shapes=("static", "batch"),
        error_inputs=[ErrorInput(UNKNOWN_SIZE, "AffineGrid .*do not tell how many spatial axes", shapes="unranked")],
    ),
    OperatorSpec(
        "GridSample",
        grid_sample_samples,
        torch=torch_grid_sample,
        shapes=SHAPES,
        error_inputs=[ErrorInput(UNRANKED, "GridSample .*the rank of its input", UnsupportedOperatorError, "unranked")],
    ),
    OperatorSpec("GridSample", grid_sample_before_opset_20, torch=torch_grid_sample, shapes=SHAPES, dtypes=("float32",)),
]
