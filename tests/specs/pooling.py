"""Pooling in one to three dimensions, and local response normalization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from burnish.graph import Builder, Tensor
from specs.operator_spec import ErrorInput, OperatorSpec, Sample, distinct, normal, uniform

Attributes = dict[str, Any]

RUNTIME_ALONE = ("float32",)
"""For what ONNX Runtime has in float32 only, and the standard's reference evaluator refuses or gets wrong."""


def window_places(x: torch.Tensor, attributes: Attributes) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each spatial axis, the position of every window element [windows, kernel], and whether an average that includes
    padding counts it; straight from the definition of the standard."""
    kernel = attributes["kernel_shape"]
    rank = len(kernel)
    strides, dilations = (attributes.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * rank)
    auto_pad = attributes.get("auto_pad", "NOTSET")
    places, countable = [], []
    for axis in range(rank):
        size, span = x.shape[axis + 2], (kernel[axis] - 1) * dilations[axis] + 1
        begin, end = pads[axis], pads[axis + rank]
        if auto_pad.startswith("SAME"):
            total = max((-(-size // strides[axis]) - 1) * strides[axis] + span - size, 0)
            begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            end = total - begin
        reach = size + begin + end - span
        windows = reach // strides[axis] + 1
        if attributes.get("ceil_mode"):
            windows = -(-reach // strides[axis]) + 1
            windows -= (windows - 1) * strides[axis] >= size + begin
        starts = torch.arange(windows) * strides[axis] - begin
        places.append(starts[:, None] + torch.arange(kernel[axis]) * dilations[axis])
        countable.append(places[-1] < size + end)
    return places, countable


def gathered_windows(x: torch.Tensor, attributes: Attributes, outside: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every window's elements in the last axis [N, C, windows..., elements], and how many elements an average divides by."""
    places, countable = window_places(x, attributes)
    rank = len(places)
    inside = torch.ones((), dtype=torch.bool)
    counted = torch.ones((), dtype=torch.bool)
    for axis, (place, count) in enumerate(zip(places, countable, strict=True)):
        size = x.shape[2 + 2 * axis]
        x = x.index_select(2 + 2 * axis, place.clamp(0, size - 1).reshape(-1)).unflatten(2 + 2 * axis, place.shape)
        valid = (place >= 0) & (place < size)
        shape = [1] * (2 * axis) + list(place.shape) + [1] * (2 * (rank - 1 - axis))
        inside = inside & valid.reshape(shape)
        counted = counted & (count if attributes.get("count_include_pad") else valid).reshape(shape)
    x = torch.where(inside, x, outside)
    order = [2 + 2 * axis for axis in range(rank)] + [3 + 2 * axis for axis in range(rank)]
    numbers = counted.permute([dimension - 2 for dimension in order]).flatten(rank).sum(-1)
    return x.permute([0, 1, *order]).flatten(2 + rank), numbers


def torch_max_pool(x: torch.Tensor, **attributes: Any) -> torch.Tensor:
    windows, _ = gathered_windows(x, attributes, -torch.inf)
    return windows.gather(-1, windows.detach().argmax(-1, keepdim=True)).squeeze(-1)


def torch_average_pool(x: torch.Tensor, **attributes: Any) -> torch.Tensor:
    windows, numbers = gathered_windows(x, attributes, 0.0)
    return windows.sum(-1) / numbers


def torch_lp_pool(x: torch.Tensor, *, p: int = 2, **attributes: Any) -> torch.Tensor:
    windows, _ = gathered_windows(x, attributes, 0.0)
    return windows.abs().pow(p).sum(-1).pow(1 / p)


def window_attributes() -> Iterator[tuple[str, tuple[int, ...], Attributes]]:
    """Windows that every pooling operator must manage."""
    yield "overlapping", (2, 2, 7, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    yield "apart", (2, 2, 6, 8), {"kernel_shape": [2, 2], "strides": [2, 2]}
    yield "leftover", (2, 2, 7, 9), {"kernel_shape": [2, 2], "strides": [2, 3]}
    yield "stride_one", (2, 2, 4, 5), {"kernel_shape": [2, 3]}
    yield "uneven_pads", (2, 2, 5, 6), {"kernel_shape": [3, 2], "strides": [1, 2], "pads": [0, 1, 2, 0]}
    yield "valid", (2, 2, 6, 7), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "VALID"}
    yield "line", (2, 3, 9), {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}
    yield "volume", (2, 1, 4, 5, 4), {"kernel_shape": [2, 3, 2], "strides": [2, 2, 1], "pads": [0, 1, 0, 1, 1, 1]}


def ceil_attributes() -> Iterator[tuple[str, tuple[int, ...], Attributes]]:
    """Output sizes rounded up, so that the last window reaches past the input, and past its padding."""
    yield "ceil_mode", (2, 2, 6, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}
    yield "ceil_mode_pads", (2, 2, 6, 9), {"kernel_shape": [3, 3], "strides": [2, 3], "pads": [1, 1, 0, 1], "ceil_mode": 1}


def same_attributes() -> Iterator[tuple[str, tuple[int, ...], Attributes]]:
    """auto_pad SAME, whose pads follow from the spatial size where the stride is not 1."""
    yield "same_upper", (2, 2, 6, 7), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}
    yield "same_lower", (2, 2, 6, 7), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}


def max_pool_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape, attributes in (*window_attributes(), *ceil_attributes()):
        yield Sample([distinct(rng, *shape)], attributes, name=name, most_nodes=1)
    dilated = {"kernel_shape": [2, 3], "strides": [1, 2], "dilations": [2, 1], "pads": [1, 1, 0, 1]}
    yield Sample([distinct(rng, 2, 2, 5, 6)], dilated, name="dilated")
    yield Sample([distinct(rng, 2, 1, 3)], {"kernel_shape": [2], "pads": [1, 1]}, name="more_windows_than_elements")
    yield Sample(
        [rng.integers(0, 2, (2, 3, 7, 7)).astype(float)], {"kernel_shape": [3, 3], "strides": [2, 2]}, name="ties", smooth=False
    )
    yield Sample([distinct(rng, 2, 2, 4, 4)], {"kernel_shape": [2, 2], "storage_order": 1}, name="storage_order")
    yield Sample([distinct(rng, 1, 2, 4, 5)], build=read_column_major_indices, name="column_major_indices", torch=column_major)
    same_size = {"kernel_shape": [3, 2], "auto_pad": "SAME_UPPER"}
    yield Sample([distinct(rng, 2, 2, 4, 5)], same_size, name="same_upper_stride_one")


def counting(cases: Iterable[tuple[str, tuple[int, ...], Attributes]], rng: np.random.Generator) -> Iterator[Sample]:
    """Each case twice: averages that count padding, and averages that do not."""
    for name, shape, attributes in cases:
        yield Sample([normal(rng, *shape)], attributes, name=name)
        yield Sample([normal(rng, *shape)], {**attributes, "count_include_pad": 1}, name=f"{name}_counting_pads")


def average_pool_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from counting(window_attributes(), rng)
    dilated = {"kernel_shape": [2, 3], "strides": [1, 2], "dilations": [2, 1], "pads": [1, 1, 0, 1]}
    for sample in counting([("dilated", (2, 2, 5, 6), dilated)], rng):
        yield replace(sample, opset=19)


def lp_pool_ceil_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape, attributes in ceil_attributes():
        yield Sample([normal(rng, *shape)], attributes, name=name)


def lp_pool_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape, attributes in window_attributes():
        yield Sample([normal(rng, *shape)], attributes, name=name)
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    x = np.abs(normal(rng, 2, 2, 6, 6)) + 0.1
    x *= np.where(rng.random(x.shape) < 0.5, -1, 1)
    yield Sample([x], {**window, "p": 1}, name="p1")
    yield Sample([x], {**window, "p": 3}, name="p3")


def same_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape, attributes in same_attributes():
        yield Sample([distinct(rng, *shape)], attributes, name=name)


def symbolic_same(op_type: str) -> ErrorInput:
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}
    sample = Sample([np.zeros((1, 1, 6, 6))], attributes, name="same_upper_of_symbolic_size")
    return ErrorInput(
        sample, rf"{op_type} .*auto_pad=SAME_UPPER and stride 2 along spatial axis 0, whose size is symbolic", shapes="symbolic"
    )


def read_column_major_indices(builder: Builder, inputs: list[Tensor | None]) -> Tensor:
    y, indices = builder.op("MaxPool", inputs[0], outputs=2, kernel_shape=[2, 3], strides=[2, 1], storage_order=1)
    return y * builder.cast(indices, y.dtype)


def column_major(x: torch.Tensor) -> torch.Tensor:
    y, indices = functional.max_pool2d(x, (2, 3), (2, 1), return_indices=True)
    rows, columns = x.shape[2:]
    planes = torch.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1, 1) * rows * columns
    return y * (planes + indices % columns * rows + indices // columns)


def global_samples(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Iterator[Sample]:
    for shape in shapes:
        yield Sample([distinct(rng, *shape)], name=f"rank{len(shape)}")


def torch_global_max_pool(x: torch.Tensor) -> torch.Tensor:
    rank = x.ndim - 2
    function = {1: functional.adaptive_max_pool1d, 2: functional.adaptive_max_pool2d, 3: functional.adaptive_max_pool3d}[rank]
    return function(x, (1,) * rank)


def global_max_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from global_samples(rng, (2, 3, 3, 5))
    yield Sample([rng.integers(0, 2, (2, 3, 3, 3)).astype(float)], name="ties", smooth=False)


def torch_global_average_pool(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).mean(-1).reshape(*x.shape[:2], *[1] * (x.ndim - 2))


def global_lp_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """ONNX Runtime has no kernel for the newest version."""
    for p in (1, 2, 3):
        yield Sample([distinct(rng, 2, 3, 3, 2)], {"p": p}, name=f"p{p}", newest_opset=False)
    yield Sample([distinct(rng, 2, 3, 4)], name="default_p", newest_opset=False)


def torch_global_lp_pool(x: torch.Tensor, *, p: int = 2) -> torch.Tensor:
    return x.flatten(2).abs().pow(p).sum(-1).pow(1 / p).reshape(*x.shape[:2], *[1] * (x.ndim - 2))


def max_unpool_samples(rng: np.random.Generator) -> Iterator[Sample]:
    indices = np.array([[[[5, 7], [13, 15]]]], dtype=np.int64)
    yield Sample([normal(rng, 1, 1, 2, 2), indices], {"kernel_shape": [2, 2], "strides": [2, 2]}, name="apart", batched=())


def torch_max_unpool(
    x: torch.Tensor, indices: torch.Tensor, *, kernel_shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    return functional.max_unpool2d(x, indices, tuple(kernel_shape), tuple(strides))


def local_response_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for size in (1, 3, 5):
        yield Sample([normal(rng, 2, 6, 3, 2)], {"size": size, "alpha": 0.75, "beta": 0.625, "bias": 1.5}, name=f"size{size}")
    yield Sample([30 * normal(rng, 2, 5, 3, 1)], {"size": 3}, name="defaults")
    yield Sample([uniform(rng, -2, 2, 2, 3, 2, 2)], {"size": 7, "alpha": 0.5}, name="wider_than_the_channels")


def local_response_float64_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """The reference evaluator is right where there are as many samples as channels."""
    for size in (2, 3, 4):
        attributes = {"size": size, "alpha": 0.75, "beta": 0.625, "bias": 1.5}
        yield Sample([normal(rng, 5, 5, 2, 2)], attributes, name=f"size{size}_float64", newest_opset=False)


def torch_local_response(
    x: torch.Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> torch.Tensor:
    """By the standard's definition: for an even size the window reaches one channel further up."""
    below, above = (size - 1) // 2, -(-(size - 1) // 2)
    channels = x.shape[1]
    sums = [x[:, max(0, c - below) : min(channels, c + above + 1)].square().sum(1) for c in range(channels)]
    return x / (bias + alpha / size * torch.stack(sums, 1)) ** beta


SPECS = [
    OperatorSpec(
        "MaxPool",
        max_pool_samples,
        torch=torch_max_pool,
        shapes=("static", "batch", "symbolic", "unranked"),
        error_inputs=[symbolic_same("MaxPool")],
    ),
    OperatorSpec("MaxPool", same_samples, torch=torch_max_pool, shapes=("static", "batch")),
    OperatorSpec("AveragePool", average_pool_samples, torch=torch_average_pool, error_inputs=[symbolic_same("AveragePool")]),
    OperatorSpec(
        "AveragePool", lambda rng: counting(same_attributes(), rng), torch=torch_average_pool, shapes=("static", "batch")
    ),
    OperatorSpec("AveragePool", lambda rng: counting(ceil_attributes(), rng), torch=torch_average_pool, dtypes=RUNTIME_ALONE),
    OperatorSpec("LpPool", lp_pool_samples, torch=torch_lp_pool, error_inputs=[symbolic_same("LpPool")]),
    OperatorSpec("LpPool", lp_pool_ceil_samples, torch=torch_lp_pool, dtypes=RUNTIME_ALONE),
    OperatorSpec(
        "GlobalAveragePool",
        lambda rng: global_samples(rng, (2, 3, 4), (2, 3, 3, 5), (2, 2, 2, 3, 2)),
        torch=torch_global_average_pool,
    ),
    OperatorSpec("GlobalMaxPool", global_max_samples, torch=torch_global_max_pool),
    OperatorSpec(
        "GlobalMaxPool",
        lambda rng: global_samples(rng, (2, 3, 4), (2, 2, 2, 3, 2)),
        torch=torch_global_max_pool,
        dtypes=RUNTIME_ALONE,
    ),
    OperatorSpec("GlobalLpPool", global_lp_samples, torch=torch_global_lp_pool, dtypes=RUNTIME_ALONE),
    OperatorSpec("MaxUnpool", max_unpool_samples, torch=torch_max_unpool),
    OperatorSpec("LRN", local_response_samples, torch=torch_local_response, dtypes=RUNTIME_ALONE),
    OperatorSpec("LRN", local_response_float64_samples, torch=torch_local_response, dtypes=("float64",)),
]
