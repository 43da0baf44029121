"""Random graphs of the operator tables: shared values, broadcasts, branches and loops, drawn by Hypothesis.

Every value has a bound on its magnitude that holds wherever it is computed, in each iteration of a loop too: that keeps operators
in the range where they are well conditioned, whatever is drawn around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st

from burnish.graph import FLOATING, Builder, Tensor
from oracles.drawn_values import MOST_ELEMENTS, Bounded, Draw, Emit, Scope, beside, elements, known, pick
from oracles.gradient_harness import NEWEST_OPSET, as_stored, cast_inputs, differentiated, feeds_of, forward_evaluator
from oracles.operator_cases import CASES, Case
from specs.control import boolean, if_, integer, loop, row_like, scan, total

OPSETS = (18, 21, NEWEST_OPSET)
LARGEST_BOUND = 8.0
"""Beyond this a value is scaled down before others are made of it."""
CLOSE = 0.02
"""How far a sample's operand may move: less than the distance that the tables keep from kinks."""
SINGULAR = {("LpNormalization", "p_2_zero_row"), ("GridSample", "no_points"), ("Det", "singular")}
"""Samples at a point around which nothing is smooth, or that stand for sizes alone."""


@dataclass
class RandomGraph:
    """A drawn model and what it is run on.

    Attributes:
        model: with the weights as initializers.
        wrt: floating-point inputs and initializers.
        of: the output that is differentiated.
        batches: the values of its inputs, for one or two sizes of the batch.
        weights: the values of its initializers.
    """

    model: ir.Model
    wrt: list[str]
    of: str
    batches: list[dict[str, np.ndarray]]
    weights: dict[str, np.ndarray]

    @property
    def with_weights_as_inputs(self) -> ir.Model:
        model = self.model.clone()
        for name in self.weights:
            value = model.graph.initializers.pop(name)
            value.const_value = None
            model.graph.inputs.append(value)
        return model

    def __repr__(self) -> str:
        return f"of={self.of} wrt={self.wrt}\n{self.model.graph}"


UNARY: dict[str, Callable[[float], float]] = {
    **{name: lambda bound: 1.0 for name in ("Tanh", "Sigmoid", "Sin", "Cos", "Erf", "Softsign", "HardSigmoid", "Sign")},
    **{name: lambda bound: bound for name in ("Relu", "Abs", "Neg", "LeakyRelu", "Identity", "HardSwish", "Mish")},
    **{name: lambda bound: bound + 1 for name in ("Elu", "Softplus", "Floor", "Round")},
    "Atan": lambda bound: 1.6,
    "Selu": lambda bound: 1.8 * bound + 1,
}


def unary(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    x = pick(draw, scope)
    name = draw.one_of(list(UNARY))
    return [(scope.builder.op(name, scope.tensor(x)), UNARY[name](x.bound))]


def in_its_domain(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    """Functions of part of the numbers, of an operand that is brought there."""
    chosen = pick(draw, scope)
    x, op = scope.tensor(chosen), scope.builder.op
    forms: dict[str, Callable[[], tuple[Tensor, float]]] = {
        "Exp": lambda: (op("Exp", op("Tanh", x)), 3.0),
        "Log": lambda: (op("Log", op("Add", op("Mul", x, x), 0.5)), 2 * float(np.log(chosen.bound + 1)) + 1),
        "Sqrt": lambda: (op("Sqrt", op("Add", op("Mul", x, x), 0.3)), chosen.bound + 1),
        "Reciprocal": lambda: (op("Reciprocal", op("Add", op("Mul", x, x), 1.0)), 1.0),
        "Pow": lambda: (op("Pow", op("Add", op("Abs", x), 0.5), 1.5), (chosen.bound + 0.5) ** 1.5),
        "Square": lambda: (op("Pow", x, 2.0), chosen.bound**2),
        "Clip": lambda: (op("Clip", x, -0.7, 1.1), 1.1),
        "Cast": lambda: (op("Mul", x, scope.builder.cast(scope.builder.cast(x, ir.DataType.INT64), x.dtype)), chosen.bound**2),
    }
    return [draw.one_of(list(forms.values()))()]


def binary(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    first = pick(draw, scope)
    second = beside(draw, scope, first)
    if draw.chance():
        first, second = second, first
    x, y, op, one, two = scope.tensor(first), scope.tensor(second), scope.builder.op, first.bound, second.bound
    forms: dict[str, Callable[[], tuple[Tensor, float]]] = {
        "Add": lambda: (op("Add", x, y), one + two),
        "Sub": lambda: (op("Sub", x, y), one + two),
        "Mul": lambda: (op("Mul", x, y), one * two),
        "Div": lambda: (op("Div", x, op("Add", op("Abs", y), 0.5)), 2 * one),
        "Max": lambda: (op("Max", x, y), max(one, two)),
        "Min": lambda: (op("Min", x, y), max(one, two)),
        "Sum": lambda: (op("Sum", x, y, x), 2 * one + two),
        "Mean": lambda: (op("Mean", x, y, y), one + two),
        "Where": lambda: (op("Where", op("Less", x, y), x, op("Mul", y, y)), max(one, two**2)),
        "Pow": lambda: (op("Pow", op("Add", op("Sigmoid", x), 0.5), y), 2.0**two),
    }
    return [draw.one_of(list(forms.values()))()]


def matmul(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    x = known(draw, scope, 1)
    inner = x.extents[-1]
    if isinstance(inner, str):
        y = x
        while y.rank > 1:  # the sum of squares along the batch
            y = Bounded(scope.builder.op("ReduceMean", scope.tensor(y), scope.builder.integers([0]), keepdims=0).value, y.bound)
        return [(scope.builder.op("MatMul", scope.tensor(x), scope.tensor(y)), x.bound * y.bound * max(draw.sizes))]
    shapes = [[inner, draw.extent()], [inner], [2, inner, 2] if x.rank <= 2 else [inner, 1]]
    weight = draw.variable(draw.one_of(shapes), is_weight=draw.chance())
    return [(scope.builder.op("MatMul", scope.tensor(x), scope.tensor(weight)), x.bound * weight.bound * inner)]


def reduction(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    x = known(draw, scope)
    name = draw.one_of(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceLogSumExp", "ReduceL1"])
    axes = sorted({draw.number(-x.rank, x.rank - 1) % x.rank for _ in range(draw.number(0, x.rank))}) if x.rank else []
    axes = [axis - x.rank if draw.chance() else axis for axis in axes]
    count = elements(draw, x.extents)
    bounds = {"ReduceSum": x.bound * count, "ReduceL1": x.bound * count, "ReduceSumSquare": x.bound**2 * count}
    operands = [scope.builder.integers(axes)] if axes or draw.chance() else []
    result = scope.builder.op(name, scope.tensor(x), *operands, keepdims=draw.number(0, 1))
    return [(result, bounds.get(name, x.bound + float(np.log(count))))]


def rearrangement(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    """Operators that move elements, copy them or leave some out."""
    chosen = known(draw, scope, 1)
    x, op, rank, integers = scope.tensor(chosen), scope.builder.op, chosen.rank, scope.builder.integers
    axis = draw.number(0, rank - 1)
    signed, extent = axis - rank * draw.number(0, 1), chosen.extents[axis]
    forms: dict[str, Callable[[], Any]] = {
        "Transpose": lambda: op("Transpose", x, perm=draw.draw(st.permutations(range(rank)))),
        "Unsqueeze": lambda: op("Unsqueeze", x, integers([signed])),
        "Concat": lambda: op("Concat", x, op("Neg", x), axis=signed),
        "Flip": lambda: op("Slice", x, integers([-1]), integers([-(2**31)]), integers([signed]), integers([-1])),
        "Slice": lambda: op("Slice", x, integers([0]), integers([1]), integers([signed])),
        "Gather": lambda: op("Gather", x, integers([0, -1, 0]), axis=signed),
        "Take": lambda: op("Gather", x, scope.builder.constant(np.asarray(0)), axis=signed),
        "CumSum": lambda: op("CumSum", x, scope.builder.constant(np.asarray(signed)), reverse=draw.number(0, 1)),
        "Pad": lambda: op("Pad", x, integers([1, 1]), None, integers([signed]), mode=draw.one_of(["constant", "edge"])),
        "Flatten": lambda: op("Flatten", x, axis=draw.number(0, rank)),
        "Tile": lambda: op("Tile", x, integers([2 if other == axis else 1 for other in range(rank)])),
        "Softmax": lambda: op("Softmax", x, axis=signed),
        "LogSoftmax": lambda: op("LogSoftmax", x, axis=signed),
        "Largest": lambda: op("TopK", x, integers([1]), outputs=2, axis=signed)[0],
    }
    if isinstance(extent, int):
        parts = [1] * extent
        forms["Split"] = lambda: op("Split", x, integers(parts), outputs=extent, axis=signed)
        forms["Expand"] = lambda: op("Expand", op("Unsqueeze", x, integers([0])), integers([2, *[1] * rank]))
    result = draw.one_of(list(forms.values()))()
    return [(part, chosen.bound * (max(draw.sizes) * 3)) for part in (result if isinstance(result, tuple) else (result,))]


def spread(draw: Draw, scope: Scope, shape: Sequence[int]) -> tuple[Tensor, float]:
    """A value as a tensor of any shape: its elements in turn; of a batch those of the first sample, or of the mean."""
    source = pick(draw, scope)
    x, bound, builder = scope.tensor(source), source.bound, scope.builder
    if not source.is_known:
        x, source = builder.op("Tanh", total(builder, x)), Bounded(x.value, 1.0)
        flat, count, bound = builder.op("Reshape", x, builder.integers([1])), 1, 1.0
    else:
        if "n" in source.extents and draw.chance():
            axes = [axis for axis, extent in enumerate(source.extents) if extent == "n"]
            x = builder.op("ReduceMean", x, builder.integers(axes), keepdims=draw.number(0, 1))
        flat = builder.op("Reshape", x, builder.integers([-1]))
        count = int(np.prod([extent for extent in source.extents if isinstance(extent, int)]))
    index = np.arange(int(np.prod(shape))).reshape(tuple(shape)) % count
    return builder.op("Gather", flat, builder.constant(index), axis=0, shape=list(shape)), bound


def like(draw: Draw, scope: Scope, pattern: Bounded, limit: float | None = None) -> Tensor:
    """A value of the shape of another, and below a limit: one of that shape, or one that is spread over it."""
    same = [value for value in reversed(scope.values) if value.extents == pattern.extents and value.is_known]
    if same and draw.number(0, 3):
        chosen = draw.one_of(same)
        result, bound = scope.tensor(chosen), chosen.bound
    elif pattern.is_static:
        result, bound = spread(draw, scope, pattern.extents)  # type: ignore[arg-type]
    else:
        added, bound = spread(draw, scope, [])
        result, bound = scope.builder.op("Add", scope.tensor(pattern), added), pattern.bound + bound
    if limit is not None and bound > limit:
        result = scope.builder.op("Mul", scope.builder.op("Tanh", result), limit)
    return result


def is_drawn(case: Case) -> bool:
    """Whether a sample of the tables is a node of random graphs: smooth in float64 around its point, and small."""
    sample = case.sample
    sizes = [np.size(array) for array in sample.inputs if array is not None]
    return (
        sample.smooth
        and case.takes_float64
        and case.widest == "float64"
        and "float32" in case.spec.dtypes
        and max(sizes, default=0) <= MOST_ELEMENTS
        and (case.spec.op_type, sample.name) not in SINGULAR
    )


@cache
def samples(opset: int) -> list[str]:
    """The samples that mean in this opset what they say."""
    drawn = {name: case.sample for name, case in CASES.items() if is_drawn(case)}
    return [name for name, use in drawn.items() if use.opset == opset or (use.newest_opset and use.opset < opset)]


@cache
def bound_of(name: str) -> float:
    """The greatest magnitude that a sample returns; infinite where it is not to be used."""
    case = CASES[name]
    evaluate, names = forward_evaluator(case.spec, case.sample, "float64")
    results = evaluate(feeds_of(case.sample, cast_inputs(case.sample, "float64"), {}))
    floats = [results[name] for name in names if results[name].dtype.kind == "f"]
    if any(array.size > 4 * MOST_ELEMENTS or not np.isfinite(array).all() for array in floats):
        return np.inf
    return max((float(np.abs(array).max(initial=0.0)) for array in floats), default=np.inf)


def from_the_tables(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    """A sample of the tables, with operands that move around its own with values of the graph."""
    name = draw.one_of(samples(scope.builder.opset))
    case, bound = CASES[name], bound_of(name)
    if not np.isfinite(bound):
        return unary(draw, scope)
    operands: list[Tensor | None] = []
    for index, array in enumerate(case.sample.inputs):
        if array is None:
            operands.append(None)
            continue
        is_float = array.dtype.kind == "f"
        array = np.asarray(array, draw.dtype.numpy() if is_float else None)
        constant = not is_float if case.sample.constants is None else index in case.sample.constants
        if is_float and index in differentiated(case.sample):
            around = scope.builder.constant(array)
            moved, _ = spread(draw, scope, array.shape)
            operands.append(around + scope.builder.op("Tanh", moved) * CLOSE)
        else:
            operands.append(scope.builder.constant(array) if constant else scope.builder.tensor(draw.given(array)))
    if case.sample.build is not None:
        result: Any = case.sample.build(scope.builder, operands)
    else:
        attributes = as_stored(case.sample.attributes)
        result = scope.builder.op(case.spec.op_type, *operands, outputs=case.sample.outputs, **attributes)
    outputs = result if isinstance(result, tuple) else (result,)
    carrying = range(len(outputs)) if case.sample.cotangents is None else case.sample.cotangents
    return [(outputs[index], 2 * bound + 1) for index in carrying if outputs[index].value.dtype in FLOATING]


def inside(draw: Draw, scope: Scope, builder: Builder, own: Sequence[Bounded], most: int = 3) -> Scope:
    """A body with nodes of its own values and of those around it."""
    body = Scope(builder, [*scope.values, *own], scope.depth + 1)
    for _ in range(draw.number(1, most)):
        add_node(draw, body)
    return body


def branches(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    """An If on the data, or on an input; both branches drawn."""
    patterns = [known(draw, scope) for _ in range(draw.number(1, 2))]
    if draw.chance():
        condition = scope.builder.op("Greater", total(scope.builder, scope.tensor(pick(draw, scope))), 0.1)
    else:
        condition = scope.builder.tensor(draw.given(np.asarray(draw.chance())))

    def branch(builder: Builder) -> list[Tensor]:
        body = inside(draw, scope, builder, [])
        return [like(draw, body, pattern, LARGEST_BOUND) for pattern in patterns]

    results = if_(scope.builder, condition, branch, branch, [scope.tensor(pattern) for pattern in patterns])
    return [(result, LARGEST_BOUND) for result in (results if isinstance(results, tuple) else (results,))]


def iterations(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    """A Loop, counted or until the data say so, with one or two states and perhaps rows."""
    states = [known(draw, scope) for _ in range(draw.number(1, 2))]
    patterns = [known(draw, scope) for _ in range(draw.number(0, 1))]
    # Of no iteration nobody knows how large the rows of a batch would be.
    trips, is_while = draw.number(0 if all(pattern.is_static for pattern in patterns) else 1, 3), draw.chance()
    count = integer(scope.builder, trips) if draw.chance() else scope.builder.tensor(draw.given(np.asarray(trips)))
    threshold = draw.number(1, 8)

    def step(builder: Builder, iteration: Tensor, condition: Tensor, *inner: Tensor) -> list[Tensor]:
        own = [Bounded(tensor.value, state.bound) for tensor, state in zip(inner, states, strict=True)]
        number = Bounded(builder.cast(iteration, draw.dtype).value, 3.0)
        body = inside(draw, scope, builder, [number, *own])
        following = [like(draw, body, state, state.bound) for state in own]
        rows = [like(draw, body, pattern, LARGEST_BOUND) for pattern in patterns]
        going = builder.op("Less", total(builder, builder.op("Abs", following[0])), float(threshold)) if is_while else condition
        return [going, *following, *rows]

    shown = [row_like(scope.builder, scope.tensor(pattern)) for pattern in patterns]
    going = boolean(scope.builder, True) if is_while or draw.chance() else None
    results = loop(scope.builder, count, going, [scope.tensor(state) for state in states], step, shown)
    return outcome(draw, scope, states, results, patterns, None)


def recurrence(draw: Draw, scope: Scope) -> list[tuple[Tensor, float]]:
    """A Scan along any axis in either direction, with at most two states and a row."""
    sliced = known(draw, scope, 1)
    states = [known(draw, scope) for _ in range(draw.number(0, 2))]
    patterns = [known(draw, scope) for _ in range(draw.number(0 if states else 1, 1))]
    axis = draw.number(0, sliced.rank - 1)

    def step(builder: Builder, *inner: Tensor) -> list[Tensor]:
        own = [Bounded(tensor.value, state.bound) for tensor, state in zip(inner, states, strict=False)]
        body = inside(draw, scope, builder, [*own, Bounded(inner[-1].value, sliced.bound)])
        following = [like(draw, body, state, state.bound) for state in own]
        return [*following, *(like(draw, body, pattern, LARGEST_BOUND) for pattern in patterns)]

    extent = sliced.extents[axis]
    row_axis = draw.number(0, patterns[0].rank) if patterns else 0
    results = scan(
        scope.builder,
        [scope.tensor(state) for state in states],
        [scope.tensor(sliced)],
        step,
        [row_like(scope.builder, scope.tensor(pattern), extent, row_axis) for pattern in patterns],  # type: ignore[arg-type]
        axes=[axis - sliced.rank * draw.number(0, 1)],
        directions=[draw.number(0, 1)],
        row_axes=[row_axis] * len(patterns),
        row_directions=[draw.number(0, 1)] * len(patterns),
    )
    return outcome(draw, scope, states, results, patterns, extent)


def outcome(
    draw: Draw,
    scope: Scope,
    states: Sequence[Bounded],
    results: Tensor | Sequence[Tensor],
    patterns: Sequence[Bounded],
    extent: int | str | None,
) -> list[tuple[Tensor, float]]:
    """The states and rows of a loop; rows of an unknown number also summed, so that more can be made of them."""
    results = [results] if isinstance(results, Tensor) else results
    outputs = [(result, state.bound) for result, state in zip(results, states, strict=False)]
    for rows in results[len(states) :]:
        outputs.append((rows, LARGEST_BOUND))
        if extent is None:
            axes = scope.builder.integers([0])
            outputs.append((scope.builder.op("ReduceSum", rows, axes, keepdims=draw.number(0, 1)), 3 * LARGEST_BOUND))
    return outputs


PLAIN: list[Emit] = [unary, in_its_domain, binary, matmul, reduction, rearrangement, from_the_tables]
CONTROL: list[Emit] = [branches, iterations, recurrence]


def add_node(draw: Draw, scope: Scope) -> None:
    """Draw an operator and its operands, and let what it returns be read."""
    kinds = [*PLAIN, *CONTROL, *CONTROL] if draw.allows_control and scope.depth < 2 else PLAIN
    for tensor, bound in draw.one_of(kinds)(draw, scope):
        result = tensor
        if bound > LARGEST_BOUND:
            result, bound = scope.builder.op("Mul", tensor, LARGEST_BOUND / bound), LARGEST_BOUND
        if result.shape is not None and elements(draw, Bounded(result.value, bound).extents) <= 2 * MOST_ELEMENTS:
            scope.values.append(Bounded(result.value, bound))


def name_apart(main: ir.Graph) -> None:
    """Give every value a name of its own: a body's builder knows nothing of the graphs around it."""
    graphs = [main, *main.subgraphs()]
    inner = [value for body in graphs[1:] for value in body.inputs]
    made = [output for node in main.all_nodes() for output in node.outputs]
    for number, value in enumerate([*inner, *made]):
        if value.name != "":
            value.name = f"v{number}"


@st.composite
def random_graphs(draw: st.DrawFn, control: bool = True, dtype: ir.DataType = ir.DataType.DOUBLE) -> RandomGraph:
    """Graphs of 2 to 9 drawn operators, with one to three inputs and any number of weights."""
    opset = draw(st.sampled_from(OPSETS))
    main = ir.Graph([], [], nodes=[], name="drawn", opset_imports={"": opset})
    is_open = draw(st.booleans())
    sizes = (2, 3) if is_open else (2,)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    drawn = Draw(draw, main, dtype, rng, sizes, control, batches=[{} for _ in sizes])
    scope = Scope(Builder(main), [])
    for _ in range(draw(st.integers(1, 3))):
        shape = [drawn.extent() for _ in range(draw(st.integers(0, 3)))]
        batch = ["n"] if is_open and draw(st.booleans()) else []
        scope.values.append(drawn.variable([*batch, *shape], is_weight=False))
    inputs = len(scope.values)
    for _ in range(draw(st.integers(2, 9))):
        add_node(drawn, scope)
    made = scope.values[inputs:] or scope.values
    chosen = [made[-1], *(made[draw(st.integers(0, len(made) - 1))] for _ in range(draw(st.integers(0, 2))))]
    of = draw(st.integers(0, len(chosen) - 1))
    name_apart(main)
    for position, bounded in enumerate(chosen):
        output = scope.builder.op("Identity", scope.tensor(bounded))
        output.value.name = f"y{position}"
        main.outputs.append(output.value)
    return RandomGraph(ir.Model(main, ir_version=10), drawn.wrt, f"y{of}", drawn.batches, drawn.weights)
