"""Dimensions that the standard's inference leaves open: of ranges, loops, Reshape, and layers with fixed lengths.

Ranges: inference gives a Range an extent only if its limit is a number, not if it is the extent of an open axis, such as for the
positions in a causal mask. Loops: inference ignores carried values, since an iteration may change their shape.

Reshape: inference invents a name for the dimension of a -1, and another one when rows become sequences again. Operands of an Add
would then not be known to have one shape, and its gradient would compare them at run time.

Layers: a file may leave the channels of its input open although a layer has, for example, scales for four. For other extents a
runtime reads past the scales, broadcasts one channel to four, or fails in its own node. So the axis is fixed to the length of the
parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import attribute_value, bodies, constant_array, describe_node, same_dimension, static_dimension
from burnish.graph.annotations import FIXED_BY
from burnish.graph.inference import infer_outputs
from burnish.graph.shapes import broadcast_shapes, multiple_name
from burnish.graph.uses import producer_of
from burnish.importer.shapes import infer_shapes
from burnish.operators.registry import Elementwise, elementwise

_PASSES_ON = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Operators that pass on the single element of a length."""


def settle_range_shapes(model: ir.Model) -> bool:
    """Give, in place, each Range from 0 with step 1 the dimension that it counts, and infer the shapes of its readers.

    Args:
        model: a model with other shapes inferred and names for open dimensions. A model with a Loop is left unchanged.
    """
    counted: dict[ir.Value, Any] = {}
    for node in model.graph.all_nodes():
        if node.op_type == "Loop" and node.domain == "":
            return False
        if node.op_type == "Range" and node.domain == "" and _counts_up(node):
            dimension = _counted_dimension(node.inputs[1])
            output = node.outputs[0]
            if dimension is not None and (output.shape is None or not _is_known(output.shape[0])):
                counted[output] = dimension
    for output, dimension in counted.items():
        output.shape = ir.Shape([dimension])
    if counted:
        infer_shapes(model, known={output.name or "" for output in counted})
    return bool(counted)


def _counts_up(node: ir.Node) -> bool:
    start, step = (constant_array(node.inputs[index]) for index in (0, 2))
    return start is not None and step is not None and start.size == step.size == 1 and start.item() == 0 and step.item() == 1


def _is_known(dimension: Any) -> bool:
    return isinstance(dimension, int) or (dimension.value is not None and not dimension.value.startswith("unk__"))


def _counted_dimension(length: ir.Value | None) -> Any:
    while length is not None and (passing := producer_of(length, *_PASSES_ON)) is not None:
        length = passing.inputs[0]
    picked = producer_of(length, "Gather", "Slice")
    place = 0
    if picked is not None:
        operands = [constant_array(value) for value in picked.inputs[1:]]
        if not operands or any(array is None or array.size != 1 for array in operands):
            return None
        numbers = [int(array.item()) for array in operands if array is not None]
        if picked.op_type == "Slice" and numbers[1] != numbers[0] + 1:
            return None
        place, length = numbers[0], picked.inputs[0]
    maker = producer_of(length, "Shape")
    if maker is None or maker.inputs[0] is None or maker.inputs[0].shape is None:
        return None
    dimensions = maker.inputs[0].shape.dims[attribute_value(maker, "start", 0) : attribute_value(maker, "end", None)]
    if not -len(dimensions) <= place < len(dimensions) or (picked is None and len(dimensions) != 1):
        return None
    dimension = dimensions[place]
    return dimension if isinstance(dimension, ir.SymbolicDim) and _is_known(dimension) else None


@dataclass(frozen=True)
class _State:
    """A state of a Loop: before the loop, at the start and the end of an iteration, and after the loop."""

    initial: ir.Value
    entering: ir.Value
    leaving: ir.Value
    final: ir.Value

    def shared(self, shape: ir.Shape) -> ir.Shape | None:
        """Return the dimensions of a shape that hold before the first and after each iteration; None if the rank differs."""
        others = (self.initial.shape, self.leaving.shape)
        if any(other is None or len(other) != len(shape) for other in others):
            return None
        columns = zip(shape.dims, *(other.dims for other in others if other is not None), strict=True)
        return ir.Shape([dim if all(same_dimension(dim, each) for each in rest) else None for dim, *rest in columns])


def settle_loop_shapes(model: ir.Model) -> bool:
    """Infer, in place, the shapes of the states of every Loop and of values computed from them.

    Each state is assumed to keep its initial shape. If an iteration then gives another extent, that extent is unknown, and the
    inference is repeated. The remaining shapes hold for any number of iterations.

    Args:
        model: a model with its other shapes inferred (``infer_shapes``).
    """
    states = list(_states(model.graph))
    if not states:
        return False
    told = _shapes(model)
    taken = _walked(model, states)
    # Terminates: each round adds a state or gives up an extent.
    while True:
        # Discard shapes that followed from an extent given up since.
        _restore(told)
        fits = _infer(model, taken)
        # An inner loop's initial shape may depend on an outer loop's.
        following: dict[_State, ir.Shape | None] = {
            state: state.initial.shape for state in states if state not in taken and state.initial.shape is not None
        }
        if not following:
            following = {state: None if shape is None else state.shared(shape) for state, shape in taken.items()}
        if all(state in taken and taken[state] == shape for state, shape in following.items()):
            break
        taken |= following
    if not fits:
        _restore(told)
        infer_shapes(model)
    return True


def _walked(model: ir.Model, states: list[_State]) -> dict[_State, ir.Shape | None]:
    """Return initial shapes if each state keeps its own. One walk covers a chain of loops; a round would advance by one loop.

    Shapes with an extent that the walk cannot infer are omitted: the standard's inference of the whole graph may find it.
    """
    try:
        _walk(model.graph, model.opset_imports, {state.final: state for state in states})
    except ModelError:  # possibly from a branch that is never taken
        return {}
    shapes = {state: state.initial.shape for state in states}
    return {
        state: ir.Shape(shape.dims)
        for state, shape in shapes.items()
        if shape is not None and all(isinstance(dim, int) or dim.value is not None for dim in shape.dims)
    }


def _walk(graph: ir.Graph, imports: Mapping[str, int], states: Mapping[ir.Value, _State]) -> None:
    for node in graph:
        for output in node.outputs:
            state = states.get(output)
            if state is not None and state.initial.shape is not None:
                state.entering.shape = ir.Shape(state.initial.shape.dims)
                state.final.shape = ir.Shape(state.initial.shape.dims)
        inner = bodies(node)
        for body in inner:
            _walk(body, imports, states)
        if not inner and any(output.shape is None for output in node.outputs):
            infer_outputs(node, imports)


def _shapes(model: ir.Model) -> list[tuple[ir.Value, ir.Shape | None]]:
    bodies = [graph.inputs for graph in model.graph.subgraphs()]
    nodes = [node.outputs for node in model.graph.all_nodes()]
    return [(value, value.shape) for values in (*bodies, *nodes) for value in values]


def _restore(told: list[tuple[ir.Value, ir.Shape | None]]) -> None:
    for value, shape in told:
        value.shape = shape


def _states(graph: ir.Graph) -> Iterator[_State]:
    for node in graph.all_nodes():
        if node.op_type != "Loop" or node.domain != "":
            continue
        body = node.attributes["body"].as_graph()
        columns = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], node.outputs, strict=False)
        for initial, entering, leaving, final in columns:
            if initial is not None and isinstance(initial.type, ir.TensorType):
                yield _State(initial, entering, leaving, final)


def _infer(model: ir.Model, taken: dict[_State, ir.Shape | None]) -> bool:
    """Infer shapes with the assumed shapes of states; return True if they fit the operators that read them.

    If not, other shapes are inferred nevertheless: one loop's change does not affect the rest.
    """
    known = set()
    for state, shape in taken.items():
        state.entering.shape = None if shape is None else ir.Shape(shape.dims)
        state.final.shape = None if shape is None else ir.Shape(shape.dims)
        if shape is not None and state.final.name:
            known.add(state.final.name)
    try:
        infer_shapes(model, known=known)
    except ModelError:
        infer_shapes(model, strict=False, known=known)
        return False
    return True


INVENTED = "unk__"
"""Prefix of names that the standard's inference invents."""


def name_reshaped_dimensions(model: ir.Model) -> bool:
    """Rename, in place, dimensions with invented names that are known to equal another dimension.

    A Reshape keeps the number of elements, so with one open dimension on either side each is a multiple of the other. If it
    equals a known dimension, it gets its name; a multiple gets a name such as ``64*batch``.

    Args:
        model: a model with inferred shapes and names for open dimensions.
    """
    names = _Names()
    for node in model.graph:
        if node.domain != "":
            continue
        output = node.outputs[0]
        if node.op_type in ("Reshape", "Flatten"):
            source = node.inputs[0]
            if source is not None and source.shape is not None and output.shape is not None:
                names.equate_elements(source.shape, output.shape)
        elif elementwise(node) is Elementwise.BROADCAST and output.shape is not None:
            shapes = [value.shape for value in node.inputs if value is not None]
            if all(shape is not None for shape in shapes):
                together = broadcast_shapes(*(names.resolved(shape) for shape in shapes if shape is not None))
                names.equate_dimensions(together, output.shape)
    if names.equal:
        for graph in model.graphs():
            for value in (output for node in graph for output in node.outputs):
                if value.shape is not None:
                    value.shape = names.resolved(value.shape)
    return bool(names.equal)


class _Names:
    """Known equalities of invented names.

    Attributes:
        equal: invented name -> equivalent name.
    """

    def __init__(self) -> None:
        self.equal: dict[str, str] = {}
        self._multiples: dict[str, tuple[Fraction, str]] = {}

    def resolved(self, shape: ir.Shape) -> ir.Shape:
        return ir.Shape([dim if isinstance(dim, int) else ir.SymbolicDim(self._name(dim)) for dim in shape.dims])

    def equate_elements(self, source: ir.Shape, target: ir.Shape) -> None:
        known, known_target = ([dim for dim in shape.dims if isinstance(dim, int)] for shape in (source, target))
        names, target_names = ([self._name(dim) for dim in shape.dims if not isinstance(dim, int)] for shape in (source, target))
        elements, others = math.prod(known), math.prod(known_target)
        if len(names) != 1 or len(target_names) != 1 or elements == 0 or others == 0:
            return
        name, target_name = names[0], target_names[0]
        if name is None or target_name is None or name == target_name or not target_name.startswith(INVENTED):
            return
        factor, base = self._multiples.get(name, (Fraction(1), name))
        base = self._standing_for(base)
        factor *= Fraction(elements, others)
        multiple = multiple_name(factor.numerator, base) if factor.denominator == 1 else f"{factor}*{base}"
        if multiple == target_name:
            return
        self.equal[target_name] = multiple
        if factor != 1:
            self._multiples[multiple] = factor, base

    def equate_dimensions(self, known: ir.Shape, shape: ir.Shape) -> None:
        for dim, other in zip(known.dims, self.resolved(shape).dims, strict=True):
            if isinstance(dim, int) or isinstance(other, int) or dim.value is None or other.value is None:
                continue
            if other.value != dim.value and other.value.startswith(INVENTED):
                self.equal[other.value] = dim.value

    def _name(self, dim: ir.SymbolicDim) -> str | None:
        return None if dim.value is None else self._standing_for(dim.value)

    def _standing_for(self, name: str) -> str:
        while name in self.equal:
            name = self.equal[name]
        return name


_PER_CHANNEL = {"BatchNormalization": (1, 2, 3, 4), "InstanceNormalization": (1, 2), "GroupNormalization": (1, 2)}
_OVER_LAST_AXES = {"LayerNormalization": (1, 2), "RMSNormalization": (1,), "PRelu": (1,)}
_RECURRENT = ("GRU", "LSTM", "RNN")
_CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "ConvTranspose": 1, "QLinearConv": 3}
_PRODUCTS = {"Gemm": 1, "MatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3}
"""Operator -> index of the second factor."""


class _Same(NamedTuple):
    """An operand's axis that must have a multiple of the extent of another operand's axis."""

    operand: int
    axis: int
    parameter: int
    place: int
    times: int = 1


def fix_layer_axes(model: ir.Model) -> bool:
    """Fix, in place, open axes of inputs for which a layer accepts only one extent.

    The layer is recorded with the inputs (``FIXED_BY``).

    Returns:
        True if there were any; shapes must then be inferred again.
    """
    graph = model.graph
    asked = _asked_by(graph)
    has_any = False
    for value in graph.inputs:
        dims = [] if value.shape is None else list(value.shape.dims)
        fixed = {axis: asked[dim.value] for axis, dim in enumerate(dims) if not isinstance(dim, int) and dim.value in asked}
        if fixed:
            FIXED_BY.set(value, {axis: reason for axis, (_, reason) in fixed.items()})
            value.shape = ir.Shape([fixed[axis][0] if axis in fixed else dim for axis, dim in enumerate(dims)])
            has_any = True
    return has_any


def _asked_by(graph: ir.Graph) -> dict[str | None, tuple[int, str]]:
    """Return open dimensions for which layers accept only one extent, with the extent and the reason.

    Names in bodies are those of the inputs. For branches, only requirements common to all of them count.
    """
    asked: dict[str | None, tuple[int, str]] = {}
    for node in graph:
        for dimension, extent, reason in _extents_of(node):
            asked.setdefault(dimension, (extent, reason))
        first, *others = [_asked_by(body) for body in bodies(node)] or [{}]
        for name, found in first.items():
            if all(name in other and other[name][0] == found[0] for other in others):
                asked.setdefault(name, found)
    return asked


def _extents_of(node: ir.Node) -> Iterator[tuple[str, int, str]]:
    if node.domain != "":
        return
    for same in _same_extents(node):
        x, parameter = node.inputs[same.operand], node.inputs[same.parameter]
        assert x is not None
        assert x.shape is not None
        assert parameter is not None
        assert parameter.shape is not None
        extent, dimension = static_dimension(parameter.shape, same.place), x.shape.dims[same.axis]
        if extent is None or isinstance(dimension, int) or dimension.value is None:
            continue
        lengths = ", ".join(str(size if isinstance(size, int) else size.value) for size in parameter.shape.dims)
        groups = f", in {same.times} groups" if same.times > 1 else ""
        reason = f"{describe_node(node)} takes {extent * same.times} there: its '{parameter.name}' is [{lengths}]{groups}"
        yield dimension.value, extent * same.times, reason


def _same_extents(node: ir.Node) -> Iterator[_Same]:
    rank = _rank(node, 0)
    if rank is None:
        return
    kind = node.op_type
    for index in _PER_CHANNEL.get(kind, ()):
        if rank > 1 and _rank(node, index) == 1:
            yield _Same(0, 1, index, 0)
    for index in _OVER_LAST_AXES.get(kind, ()):
        length = _rank(node, index) or 0
        first = 0 if kind == "PRelu" else attribute_value(node, "axis", -1) % rank
        for axis in range(max(first, rank - length), rank):
            # One scale may be shared by all elements of a row, but never by all channels.
            if static_dimension(_shape(node, index), axis - rank) != 1:
                yield _Same(0, axis, index, axis - rank)
    if kind in _RECURRENT and rank == 3:
        of_states = [_Same(index, 2, 2, 2) for index in (5, 6) if _rank(node, index) == 3 and _rank(node, 2) == 3]
        yield from ([_Same(0, 2, 1, 2)] if _rank(node, 1) == 3 else []) + of_states
    weight = _CONVOLUTIONS.get(kind, 0)
    if weight and rank > 2 and _rank(node, weight) == rank:
        is_transposed = kind == "ConvTranspose"
        yield _Same(0, 1, weight, 0 if is_transposed else 1, 1 if is_transposed else attribute_value(node, "group", 1))
    second = _PRODUCTS.get(kind, 0)
    others = _rank(node, second) if second else None
    if second and others:
        left = -1 if kind != "Gemm" or not attribute_value(node, "transA", 0) else 0
        right = 0 if others == 1 else -2 if kind != "Gemm" or not attribute_value(node, "transB", 0) else -1
        yield _Same(0, left, second, right)
        yield _Same(second, right, 0, left)
    if kind == "Einsum" and "." not in (equation := attribute_value(node, "equation", "")):
        terms = equation.replace(" ", "").partition("->")[0].split(",")
        places = [(operand, axis, letter) for operand, term in enumerate(terms) for axis, letter in enumerate(term)]
        for (operand, axis, letter), (other, place, again) in itertools.permutations(places, 2):
            if letter == again and operand != other:
                yield _Same(operand, axis, other, place)


def _shape(node: ir.Node, index: int) -> ir.Shape | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else value.shape


def _rank(node: ir.Node, index: int) -> int | None:
    shape = _shape(node, index)
    return None if shape is None else len(shape)
