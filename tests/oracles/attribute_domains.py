"""Uses of an operator drawn from all that its attributes and shapes may be, in the ranges of values that the tables give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from burnish.operators.registry import Elementwise, records
from oracles.operator_cases import specs
from specs.operator_spec import OperatorSpec, Sample, distinct

SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)
FILLED = st.lists(st.integers(1, 3), max_size=4).map(tuple)
Drawing = Callable[[st.DrawFn, OperatorSpec, np.random.Generator], Sample]
SPECS = {spec.op_type: spec for spec in reversed(specs()) if spec.torch is not None and "static" in spec.shapes}


def like_the_table(rng: np.random.Generator, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a sample of the tables, in any shape."""
    return np.asarray(rng.choice(array.reshape(-1), shape))


def axis_of(draw: st.DrawFn, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))


def axes_of(draw: st.DrawFn, rank: int, most: int | None = None) -> list[int]:
    chosen = draw(st.lists(st.integers(0, rank - 1), unique=True, max_size=rank if most is None else most)) if rank else []
    return [axis - rank * draw(st.integers(0, 1)) for axis in chosen]


def integers(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def elementwise(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    """Attributes and values of one of the table's samples."""
    sampled = [use for use in spec.samples(rng) if len(use.inputs) == 1 and use.build is None and use.smooth]
    use = draw(st.sampled_from(sampled))
    values = like_the_table(rng, np.asarray(use.inputs[0]), draw(SHAPES))
    return Sample([values], use.attributes, torch_attributes=use.torch_attributes, opset=use.opset)


def broadcast(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    """Two operands that broadcast in any way."""
    use = next(iter(spec.samples(rng)))
    if use.name == "one":
        use = next(use for use in spec.samples(rng) if use.name == "two")
    left, right = draw(arrays.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=3)).input_shapes
    values = [like_the_table(rng, np.asarray(array), shape) for array, shape in zip(use.inputs, (left, right), strict=True)]
    return Sample(values, use.attributes, torch_attributes=use.torch_attributes, batched=leading(left, right))


def leading(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The operands whose first axis is that of the result."""
    rank = max(map(len, shapes))
    extents = [shape[0] for shape in shapes if shape and len(shape) == rank]
    whole = next((extent for extent in extents if extent != 1), 1)
    return tuple(index for index, shape in enumerate(shapes) if shape and len(shape) == rank and shape[0] == whole)


def choice(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shapes = draw(arrays.mutually_broadcastable_shapes(num_shapes=3, max_dims=4, max_side=3)).input_shapes
    condition = np.asarray(rng.random(shapes[0]) < 0.5)
    others = [np.asarray(rng.standard_normal(shape)) for shape in shapes[1:]]
    return Sample([condition, *others], batched=leading(*shapes), constants=())


def reduction(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    """Any axes, in any order and of either sign; of what has no value for nothing, no empty extents."""
    shape = draw(SHAPES if spec.op_type in ("ReduceSum", "ReduceSumSquare", "ReduceL1") else FILLED)
    if spec.op_type in ("ReduceMax", "ReduceMin"):
        values = distinct(rng, *shape)
    else:
        values = like_the_table(rng, np.asarray(next(iter(spec.samples(rng))).inputs[0]), shape)
    attributes = {"keepdims": draw(st.integers(0, 1)), "noop_with_empty_axes": draw(st.integers(0, 1))}
    inputs = [values]
    if draw(st.booleans()):
        inputs.append(integers(*axes_of(draw, len(shape))))
    return Sample(inputs, attributes)


def along_an_axis(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(FILLED.filter(len))
    return Sample([rng.standard_normal(shape)], {"axis": axis_of(draw, len(shape))})


def transposition(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(SHAPES)
    return Sample([rng.standard_normal(shape)], {"perm": draw(st.permutations(range(len(shape))))} if shape else {})


def joined(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(SHAPES.filter(len))
    axis = axis_of(draw, len(shape))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        part = list(shape)
        part[axis] = draw(st.integers(0, 3))
        parts.append(rng.standard_normal(part))
    return Sample(parts, {"axis": axis}, batched=range(len(parts)) if axis % len(shape) else ())


def split(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = list(draw(SHAPES.filter(len)))
    axis, sizes = axis_of(draw, len(shape)), draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    shape[axis] = sum(sizes)
    batched = (0,) if axis % len(shape) else ()
    return Sample([rng.standard_normal(shape), integers(*sizes)], {"axis": axis}, outputs=len(sizes), batched=batched)


def gather(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(FILLED.filter(len))
    axis = axis_of(draw, len(shape))
    indices = rng.integers(-shape[axis], shape[axis], draw(st.lists(st.integers(0, 3), max_size=2)))
    batched = (0,) if axis % len(shape) else ()
    return Sample([rng.standard_normal(shape), np.asarray(indices)], {"axis": axis}, batched=batched)


def unsqueeze(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    axes = draw(st.lists(st.integers(0, len(shape)), unique=True, min_size=1, max_size=1))
    return Sample([rng.standard_normal(shape), integers(*axes)], batched=() if 0 in axes else (0,))


def flatten(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(SHAPES.filter(len))
    return Sample([rng.standard_normal(shape)], {"axis": draw(st.integers(-len(shape), len(shape)))}, torch=torch_flatten)


def torch_flatten(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Of no elements too, where PyTorch cannot infer an extent."""
    return x.reshape(int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis:])))


def expand(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape, target = draw(arrays.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=3)).input_shapes
    return Sample([rng.standard_normal(shape), integers(*target)], batched=())


def tile(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(SHAPES)
    return Sample([rng.standard_normal(shape), integers(*(draw(st.integers(0, 2)) for _ in shape))])


def triangle(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(SHAPES.filter(lambda shape: len(shape) > 1))
    inputs = [rng.standard_normal(shape), np.array(draw(st.integers(-3, 3)))]
    return Sample(inputs, {"upper": draw(st.integers(0, 1))}, batched=(0,) if len(shape) > 2 else ())


def matmul(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    """Vectors, matrices and batches of matrices that broadcast."""
    drawn = draw(arrays.mutually_broadcastable_shapes(signature="(m?,n),(n,p?)->(m?,p?)", max_dims=2, max_side=3))
    shapes = drawn.input_shapes
    whole = len(drawn.result_shape) if all(len(shape) > 1 for shape in shapes) else 0
    batched = leading(*shapes) if whole > 2 else ()
    return Sample([rng.standard_normal(shape) for shape in shapes], batched=batched)


def gemm(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    m, n, k = (draw(st.integers(1, 3)) for _ in range(3))
    left, right = draw(st.booleans()), draw(st.booleans())
    inputs = [rng.standard_normal((k, m) if left else (m, k)), rng.standard_normal((n, k) if right else (k, n))]
    if draw(st.booleans()):
        inputs.append(np.asarray(rng.standard_normal(draw(st.sampled_from([(), (n,), (1, n), (m, 1), (m, n), (1,), (1, 1)])))))
    numbers = st.sampled_from([0.0, 1.0, -1.5, 0.5])
    attributes = {"transA": int(left), "transB": int(right), "alpha": draw(numbers), "beta": draw(numbers)}
    return Sample(inputs, attributes, batched=())


def slices(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    """Starts and ends beyond the data too, steps of either sign."""
    shape = draw(SHAPES.filter(len))
    axes = axes_of(draw, len(shape))
    starts, ends = ([draw(st.integers(-4, 4)) for _ in axes] for _ in range(2))
    steps = [draw(st.sampled_from([1, 2, -1, -2])) for _ in axes]
    inputs = [rng.standard_normal(shape), *(integers(*numbers) for numbers in (starts, ends, axes, steps))]
    batched = () if 0 in [axis % len(shape) for axis in axes] else (0,)
    return Sample(inputs, batched=batched, constants=(3, 4) if draw(st.booleans()) else None)


def padding(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    """In every mode, of some axes; amounts below zero crop."""
    shape = draw(st.lists(st.integers(2, 3), min_size=1, max_size=4).map(tuple))
    mode = draw(st.sampled_from(["constant", "reflect", "edge"]))
    axes = axes_of(draw, len(shape)) or [0]
    least, most = (-1, 2) if mode == "constant" else (0, 1)
    amounts = [draw(st.integers(least, most)) for _ in range(2 * len(axes))]
    inputs = [rng.standard_normal(shape), integers(*amounts), None, integers(*axes)]
    return Sample(inputs, {"mode": mode}, batched=() if 0 in [axis % len(shape) for axis in axes] else (0,))


def squeeze(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = list(draw(SHAPES.filter(len)))
    axes = axes_of(draw, len(shape)) or [-1]
    for axis in axes:
        shape[axis] = 1
    return Sample([rng.standard_normal(shape), integers(*axes)], batched=() if shape[0] == 1 else (0,))


def reshape(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    """To the extents in another order; 0 copies one, -1 stands for one."""
    shape = draw(FILLED.filter(len))
    target = draw(st.permutations(shape))
    copied = [0 if extent == old and draw(st.booleans()) else extent for extent, old in zip(target, shape, strict=True)]
    if draw(st.booleans()):
        copied[draw(st.integers(0, len(copied) - 1))] = -1
    return Sample([rng.standard_normal(shape), integers(*copied)], batched=())


def gather_elements(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(FILLED.filter(len))
    axis = axis_of(draw, len(shape))
    extents = [draw(st.integers(0, extent)) for extent in shape]
    extents[axis] = draw(st.integers(0, 3))
    indices = rng.integers(-shape[axis], shape[axis], extents)
    return Sample([rng.standard_normal(shape), indices], {"axis": axis}, batched=())


def cumulative(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    shape = draw(FILLED.filter(len))
    inputs = [rng.standard_normal(shape), np.array(axis_of(draw, len(shape)))]
    attributes = {"exclusive": draw(st.integers(0, 1)), "reverse": draw(st.integers(0, 1))}
    return Sample(inputs, attributes, opset=26 if spec.op_type == "CumProd" else 18)


def slopes(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    """A slope that broadcasts to the data and not the other way round."""
    shape = draw(SHAPES)
    slope = [extent if draw(st.booleans()) else 1 for extent in shape[draw(st.integers(0, len(shape))) :]]
    return Sample([rng.standard_normal(shape), np.asarray(rng.standard_normal(slope))], batched=leading(shape, tuple(slope)))


def clip(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    low = np.array(-0.7) if draw(st.booleans()) else None
    high = np.array(0.9) if draw(st.booleans()) else None
    return Sample([rng.standard_normal(draw(SHAPES)), low, high], wrt=(0,), constants=(1, 2) if draw(st.booleans()) else ())


def blocks(draw: st.DrawFn, spec: OperatorSpec, rng: np.random.Generator) -> Sample:
    n, c, h, w = (draw(st.integers(1, 3)) for _ in range(4))
    size = draw(st.integers(1, 3))
    if spec.op_type == "SpaceToDepth":
        return Sample([rng.standard_normal((n, c, h * size, w * size))], {"blocksize": size})
    mode = draw(st.sampled_from(["DCR", "CRD"]))
    return Sample([rng.standard_normal((n, c * size**2, h, w))], {"blocksize": size, "mode": mode})


ELEMENTWISE = [
    name
    for (_, name), versions in records().items()
    if versions[0].elementwise is Elementwise.UNARY and versions[0].gradient is not None
]
REDUCTIONS = "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare"

DRAWN: dict[str, Drawing] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys("Add Sub Mul Div Max Min Pow Sum Mean".split(), broadcast),
    **dict.fromkeys(REDUCTIONS.split(), reduction),
    **dict.fromkeys(("Softmax", "LogSoftmax"), along_an_axis),
    "Where": choice,
    "Transpose": transposition,
    "Concat": joined,
    "Split": split,
    "Gather": gather,
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "Reshape": reshape,
    "Slice": slices,
    "Pad": padding,
    "GatherElements": gather_elements,
    "CumProd": cumulative,
    "PRelu": slopes,
    "Clip": clip,
    "DepthToSpace": blocks,
    "SpaceToDepth": blocks,
    "Flatten": flatten,
    "Expand": expand,
    "Tile": tile,
    "Trilu": triangle,
    "MatMul": matmul,
    "Gemm": gemm,
}
"""How the uses of an operator are drawn; PyTorch's function for it stands in the tables."""


WITHOUT_EVALUATOR = {("Mean", "float64")}
"""ONNX Runtime has no kernel, and the standard's evaluator adds up in the shape of the first operand."""


@st.composite
def uses(draw: st.DrawFn, op_type: str) -> tuple[OperatorSpec, Sample, dict[str, Any]]:
    """A record of the tables, a use that is drawn, and the dtype and what is known of shapes."""
    spec = SPECS[op_type]
    sample = DRAWN[op_type](draw, spec, np.random.default_rng(draw(st.integers(0, 2**16))))
    chosen = {
        "dtype": draw(st.sampled_from([dtype for dtype in spec.dtypes if (op_type, dtype) not in WITHOUT_EVALUATOR])),
        "shapes": draw(st.sampled_from([known for known in spec.shapes if known != "unranked"])),
    }
    return spec, sample, chosen
