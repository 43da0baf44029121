"""Operators that change a tensor's shape or the order of its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from burnish.graph import Builder, Tensor
from specs.operator_spec import OperatorSpec, Sample, normal

EVERY_SHAPE = ("static", "batch", "symbolic", "unranked")
INT64_MAX, INT64_MIN = int(np.iinfo(np.int64).max), int(np.iinfo(np.int64).min)


def integers(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def torch_reshape(x: torch.Tensor, shape: torch.Tensor, *, allowzero: int = 0) -> torch.Tensor:
    target = [x.shape[axis] if size == 0 and not allowzero else size for axis, size in enumerate(shape.tolist())]
    return x.reshape(target)


def reshape_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 4)
    yield Sample([x, integers(6, 4)], name="constant", most_nodes=1, batched=())
    yield Sample([x, integers(0, -1)], name="copied_and_inferred", most_nodes=1)
    yield Sample([x, integers(-1)], name="flat", most_nodes=1)
    yield Sample([x, integers(-1, 6)], {"allowzero": 1}, name="allowzero")
    yield Sample([normal(rng), integers(1, 1)], name="from_scalar")


def flatten_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 4)
    for axis in (0, 1, 2, -1, 3):
        yield Sample([x], {"axis": axis}, name=f"axis{axis}", most_nodes=1)
    yield Sample([x], name="default_axis")


def torch_flatten(x: torch.Tensor, *, axis: int = 1) -> torch.Tensor:
    rows = int(np.prod(x.shape[: axis if axis >= 0 else x.ndim + axis]))
    return x.reshape(rows, -1)


def transpose_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 4, 5)
    yield Sample([x], {"perm": [2, 0, 3, 1]}, name="cycle", most_nodes=1)
    yield Sample([x], {"perm": [0, 1, 3, 2]}, name="exchange", most_nodes=1)
    yield Sample([x], name="reversed", most_nodes=1)


def torch_transpose(x: torch.Tensor, *, perm: Sequence[int] | None = None) -> torch.Tensor:
    return x.permute(tuple(perm) if perm is not None else tuple(reversed(range(x.ndim))))


def squeeze_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 1, 3, 1)
    yield Sample([x, integers(1)], name="one_axis", most_nodes=1)
    yield Sample([x, integers(-1, 1)], name="two_axes", most_nodes=1)


def torch_squeeze(x: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


def unsqueeze_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3)
    yield Sample([x, integers(1)], name="one_axis", most_nodes=1)
    yield Sample([x, integers(0, -1)], name="two_axes", most_nodes=1)


def torch_unsqueeze(x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def concat_samples(rng: np.random.Generator) -> Iterator[Sample]:
    parts = [normal(rng, 2, size, 3) for size in (1, 4, 2)]
    yield Sample(parts, {"axis": 1}, name="middle", batched=(0, 1, 2), most_nodes=1)
    yield Sample(parts, {"axis": -2}, name="negative_axis", batched=(0, 1, 2), most_nodes=1)
    yield Sample(parts, {"axis": 1}, name="first_alone", wrt=(0,), batched=(0, 1, 2), most_nodes=1)
    yield Sample(parts, {"axis": 1}, name="middle_and_last", wrt=(1, 2), batched=(0, 1, 2), most_nodes=2)
    yield Sample([normal(rng, 2, 3), normal(rng, 4, 3)], {"axis": 0}, name="batch_axis")
    yield Sample([normal(rng, 2, 3), normal(rng, 4, 3)], {"axis": 0}, name="behind_a_batch", wrt=(1,))
    yield Sample([normal(rng, 2, 3)], {"axis": 0}, name="single", most_nodes=0)


def torch_concat(*parts: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.cat(parts, dim=axis)


def split_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 7, 3)
    yield Sample([x, integers(1, 4, 2)], {"axis": 1}, outputs=3, name="sizes", most_nodes=1)
    yield Sample([x, integers(1, 4, 2)], {"axis": -2}, outputs=3, name="middle_part", cotangents=(1,))
    yield Sample([normal(rng, 4, 3), integers(2, 2)], outputs=2, name="default_axis")
    yield Sample([x], {"axis": 1, "num_outputs": 3}, outputs=3, name="uneven_num_outputs", most_nodes=1)


def torch_split(
    x: torch.Tensor, sizes: torch.Tensor | None = None, *, axis: int = 0, num_outputs: int = 0
) -> tuple[torch.Tensor, ...]:
    if sizes is None:
        return torch.split(x, -(-x.shape[axis] // num_outputs), dim=axis)
    return torch.split(x, sizes.tolist(), dim=axis)


def slice_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 5, 7, 6)
    one, two = integers(1), integers(1, 2)
    yield Sample([x, integers(2), integers(5), one], name="inner", most_nodes=1)
    yield Sample([x, integers(-3), integers(INT64_MAX), one], name="from_the_end", most_nodes=1)
    yield Sample([x, integers(0), integers(-2), integers(-1)], name="without_the_end", most_nodes=1)
    yield Sample([x, integers(0, 1, 2), integers(2, 3, 100)], name="axes_left_out", batched=())
    yield Sample([x, integers(1, 2), integers(INT64_MAX, INT64_MAX), two, integers(2, 3)], name="steps")
    yield Sample([x, integers(0), integers(7), one, integers(3)], name="step_that_fits")
    yield Sample([x, integers(-1), integers(INT64_MIN), one, integers(-1)], name="reversed", most_nodes=1)
    yield Sample([x, integers(5, -2), integers(0, INT64_MIN), two, integers(-2, -3)], name="negative_steps")
    yield Sample([x, integers(100), integers(-100), one, integers(-3)], name="clamped_negative_step")
    yield Sample([x, integers(4, 1), integers(0, 6), two, integers(-1, 2)], name="mixed_steps")
    yield Sample([x, integers(-100), integers(100), one], name="everything", most_nodes=0)
    yield Sample([x, integers(1), integers(INT64_MAX), integers(0)], name="batch_axis")
    yield Sample([x, integers(-2), integers(INT64_MAX), integers(0)], name="end_of_the_batch")
    yield Sample([x, integers(-1), integers(INT64_MIN), integers(0), integers(-2)], name="batch_backward")
    yield Sample([x, integers(1, -4), integers(4, 6), two], name="bounds_at_run_time", constants=(3,))
    yield Sample([x, integers(6, -4), integers(0, 6), two, integers(-2, 2)], name="steps_at_run_time", constants=())
    yield Sample([x, *(array.astype(np.int32) for array in (integers(1), integers(4), one))], name="int32")
    yield Sample(
        [x, *(array.astype(np.int32) for array in (integers(-6), integers(4), one))], name="int32_at_run_time", constants=(3,)
    )


def torch_slice(
    x: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    axes: torch.Tensor | None = None,
    steps: torch.Tensor | None = None,
) -> torch.Tensor:
    numbers = [range(len(starts)) if axes is None else axes.tolist(), [1] * len(starts) if steps is None else steps.tolist()]
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), *numbers, strict=True):
        size = x.shape[axis]
        if step < 0 and end < -size:
            places = range(size)[start::step] if start < size else range(size)[::step]
        else:
            places = range(size)[start:end:step]
        x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64))
    return x


def pad_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 5, 4)
    yield Sample([x, integers(0, 0, 1, 2, 0, 0, 3, 0)], name="zeros", most_nodes=1)
    yield Sample([x, integers(0, 0, 1, -2, 0, 0, -3, 0), np.array(0.5)], name="negative", wrt=(0,), most_nodes=2)
    yield Sample([x, integers(1, 2, 0, 1), None, integers(-1, 1)], name="axes")
    yield Sample([x, integers(0, 1, -1, 2, 0, 0, 1, -1), np.array(0.5)], name="value", torch=torch_pad_by_axes)
    yield Sample([x, integers(1, 0, 1, -2, 0, 0, -3, 0)], name="pads_at_run_time", constants=())
    yield Sample([x, integers(1, -1), np.array(0.5), integers(2)], name="value_at_run_time", constants=(3,))
    for mode in ("reflect", "edge"):
        yield Sample([x, integers(0, 0, 2, 3, 0, 0, 4, 1)], {"mode": mode}, name=mode)
        yield Sample([x, integers(0, 0, 2, -1, 0, 0, -2, 1)], {"mode": mode}, name=f"{mode}_negative")
        yield Sample([x, integers(2, 3), None, integers(3)], {"mode": mode}, name=f"{mode}_axes")
    one = normal(rng, 2, 1, 5)
    yield Sample([one, integers(0, 0, 2, 0, 0, 1)], {"mode": "reflect"}, name="reflect_beside_an_extent_of_one")
    yield Sample([x, integers(0, 0, 2, 3, 0, 0, 4, 1)], {"mode": "wrap"}, name="wrap", opset=19)


def torch_pad_by_axes(
    x: torch.Tensor,
    pads: torch.Tensor,
    value: torch.Tensor | None = None,
    axes: torch.Tensor | None = None,
    *,
    mode: str = "constant",
) -> torch.Tensor:
    """Every mode by the index that each padded element is copied from, along one axis after the other."""
    along = list(range(x.ndim)) if axes is None else axes.tolist()
    fill = torch.zeros((), dtype=x.dtype) if value is None else value
    for place, axis in enumerate(along):
        begin, end = pads.tolist()[place], pads.tolist()[place + len(along)]
        cropped = x.narrow(axis, max(-begin, 0), x.shape[axis] - max(-begin, 0) - max(-end, 0))
        size = cropped.shape[axis]
        source = torch.arange(-max(begin, 0), size + max(end, 0))
        if mode == "constant":
            shape = [-1 if other == axis % x.ndim else 1 for other in range(x.ndim)]
            inside = ((source >= 0) & (source < size)).reshape(shape)
            x = torch.where(inside, cropped.index_select(axis, source.clamp(0, size - 1)), fill)
            continue
        if mode == "edge":
            source = source.clamp(0, size - 1)
        elif mode == "wrap":
            source = source % size
        else:
            period = max(2 * size - 2, 1)
            source = (source % period).apply_(lambda index, size=size: min(index, 2 * size - 2 - index))
        x = cropped.index_select(axis, source)
    return x


def expand_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([normal(rng, 2, 1, 3), integers(2, 4, 3)], name="one_axis", most_nodes=1)
    yield Sample([normal(rng, 3, 1), integers(2, 1, 4)], name="leading_axis_and_ones", batched=())
    yield Sample([normal(rng), integers(2, 2)], name="scalar", most_nodes=1)


def torch_expand(x: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape.tolist())))


def tile_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 4)
    yield Sample([x, integers(1, 3, 2)], name="two_axes", most_nodes=2)
    yield Sample([x, integers(3, 1, 1)], name="batch_axis")
    yield Sample([x, integers(1, 1, 1)], name="once", most_nodes=0)
    yield Sample([x, integers(2, 1, 3)], name="repeats_at_run_time", constants=())


def torch_tile(x: torch.Tensor, repeats: torch.Tensor) -> torch.Tensor:
    return x.repeat(tuple(repeats.tolist()))


def depth_to_space_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([normal(rng, 2, 8, 3, 2)], {"blocksize": 2}, name="default_mode", most_nodes=1)
    yield Sample([normal(rng, 2, 12, 3, 2)], {"blocksize": 2, "mode": "CRD"}, name="channel_first")


def torch_depth_to_space(x: torch.Tensor, *, blocksize: int, mode: str = "DCR") -> torch.Tensor:
    if mode == "CRD":
        return torch.nn.functional.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    blocks = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


def torch_space_to_depth(x: torch.Tensor, *, blocksize: int) -> torch.Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


def trilu_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 4, 5)
    yield Sample([x], name="upper", most_nodes=1)
    yield Sample([x, np.array(1)], {"upper": 0}, name="lower", most_nodes=1)
    yield Sample([x, np.array(-2)], name="diagonal_at_run_time", constants=())


def torch_trilu(x: torch.Tensor, k: torch.Tensor | None = None, *, upper: int = 1) -> torch.Tensor:
    return (torch.triu if upper else torch.tril)(x, 0 if k is None else int(k))


def reverse_sequence_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([normal(rng, 4, 3), integers(4, 2, 1)], name="time_major", most_nodes=1)
    yield Sample([normal(rng, 3, 4), integers(1, 3, 4)], {"batch_axis": 0, "time_axis": 1}, name="batch_major")


def torch_reverse_sequence(x: torch.Tensor, lengths: torch.Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> torch.Tensor:
    rows = x.movedim((batch_axis, time_axis), (0, 1))
    reversed_rows = [torch.cat([row[:length].flip(0), row[length:]]) for row, length in zip(rows, lengths.tolist(), strict=True)]
    return torch.stack(reversed_rows).movedim((0, 1), (batch_axis, time_axis))


def shape_subgraph(builder: Builder, inputs: list[Tensor | None]) -> Tensor:
    """Flatten as exporters write it: the batch size read by Shape and Gather, through integers that carry no gradient."""
    x = inputs[0]
    assert x is not None
    batch = builder.op("Gather", builder.op("Shape", x), builder.integers([0]), axis=0)
    return builder.op("Reshape", x * x, builder.op("Concat", batch, builder.integers([-1]), axis=0))


def run_time(op_type: str, torch_function: Callable[..., object], *inputs: np.ndarray, **options: object) -> OperatorSpec:
    """A case whose integer inputs are read at run time, so that not even the rank of the output may be known."""
    sample = Sample(inputs, name="at_run_time", constants=(), newest_opset=False, **options)
    return OperatorSpec(op_type, lambda rng: [sample], torch=torch_function, shapes=("unranked",))


RNG = np.random.default_rng(3)


def center_crop_pad_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """PyTorch has no such operator; odd differences leave one element more at the end."""
    x = normal(rng, 3, 4, 5)
    yield Sample([x, integers(3, 7, 2)], name="pad_and_crop")
    yield Sample([x, integers(2, 8)], {"axes": [1, -1]}, name="axes")
    yield Sample([x, integers(3, 5)], {"axes": [-1, 1]}, name="axes_in_another_order")
    yield Sample([x, integers(1, 4, 10)], name="batch_too", batched=())
    yield Sample([x, integers(9)], {"axes": [1]}, name="shape_at_run_time", constants=())


SPECS = [
    OperatorSpec("CenterCropPad", center_crop_pad_samples, shapes=EVERY_SHAPE),
    run_time("Reshape", torch_reshape, normal(RNG, 2, 3, 4), integers(4, 6)),
    run_time("Expand", torch_expand, normal(RNG, 1, 3), integers(4, 1)),
    run_time("Tile", torch_tile, normal(RNG, 2, 3), integers(3, 2)),
    run_time("Split", torch_split, normal(RNG, 2, 7), integers(3, 4), attributes={"axis": 1}, outputs=2),
    OperatorSpec("Reshape", reshape_samples, torch=torch_reshape, shapes=EVERY_SHAPE),
    OperatorSpec(
        "Reshape",
        lambda rng: [
            Sample([normal(rng, 3, 2, 2)], build=shape_subgraph, name="shape_subgraph", torch=lambda x: (x * x).flatten(1))
        ],
    ),
    OperatorSpec("Flatten", flatten_samples, torch=torch_flatten, shapes=EVERY_SHAPE),
    OperatorSpec("Transpose", transpose_samples, torch=torch_transpose, shapes=EVERY_SHAPE),
    OperatorSpec("Squeeze", squeeze_samples, torch=torch_squeeze, shapes=EVERY_SHAPE),
    OperatorSpec(
        "Squeeze", lambda rng: [Sample([normal(rng, 2, 1, 3)], name="axes_left_out")], torch=torch_squeeze, shapes=("static",)
    ),
    OperatorSpec("Unsqueeze", unsqueeze_samples, torch=torch_unsqueeze, shapes=EVERY_SHAPE),
    OperatorSpec("Concat", concat_samples, torch=torch_concat, shapes=EVERY_SHAPE),
    OperatorSpec("Split", split_samples, torch=torch_split, shapes=EVERY_SHAPE),
    OperatorSpec("Slice", slice_samples, torch=torch_slice, shapes=EVERY_SHAPE),
    OperatorSpec("Pad", pad_samples, torch=torch_pad_by_axes, shapes=EVERY_SHAPE),
    OperatorSpec("Expand", expand_samples, torch=torch_expand, shapes=EVERY_SHAPE),
    OperatorSpec("Tile", tile_samples, torch=torch_tile, shapes=EVERY_SHAPE),
    OperatorSpec("DepthToSpace", depth_to_space_samples, torch=torch_depth_to_space),
    OperatorSpec(
        "SpaceToDepth",
        lambda rng: [Sample([normal(rng, 2, 3, 4, 6)], {"blocksize": 2}, most_nodes=1)],
        torch=torch_space_to_depth,
    ),
    OperatorSpec("Trilu", trilu_samples, torch=torch_trilu, shapes=EVERY_SHAPE),
    OperatorSpec("ReverseSequence", reverse_sequence_samples, torch=torch_reverse_sequence, shapes=EVERY_SHAPE),
]
