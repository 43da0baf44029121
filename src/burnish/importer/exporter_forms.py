"""Functions, transpositions, biases and subgradients as PyTorch's exporters write them.

``atan2``, ``sinc``, ``xlogy`` and ``cosine_similarity`` are exported with 0/0. Their replacements have PyTorch's value and
gradient there and are equal elsewhere.

The transposed keys of ``scaled_dot_product_attention`` are exported as Reshape to [samples * heads, keys, extent], Transpose, and
Reshape back. As one Transpose of the last two axes, the samples keep their name, and attention is recognized.

The newer exporter writes ``Conv3d(bias=False)`` with zeros of shape ``[channels, 2]``, which no runtime accepts.

The standard does not define derivatives, and an operator may represent several of PyTorch: ReduceMax is ``amax``, whose ties
share a gradient, and ``max(dim)``, whose first extreme gets all of it; Clip is ``clamp``, which passes a gradient at its bounds,
and ``hardtanh``, which does not. The newer exporter records the call of each node; for the older one the more likely call is
assumed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, constant_array, replace_node, same_dimension
from burnish.graph.annotations import COMPUTED, FIRST, INCLUSIVE, SUBGRADIENT, WHOLE
from burnish.graph.matching import Either, Match, Node, Number, Variable, find_match
from burnish.graph.uses import only_user, origin_of, producer_of, remove_unread
from burnish.importer.export_notes import CALL

LONGEST_EPSILON = 1e-6
"""Largest bound for which the older exporter's ``cosine_similarity`` does not noticeably differ."""


def restore_exported_functions(model: ir.Model) -> bool:
    """Replace, in place, exported functions with 0/0 by forms without it.

    Returns:
        True if there were any.
    """
    restored = False
    for graph in list(model.graphs()):
        for node in reversed(list(graph)):
            for pattern, write in _FORMS.get(node.op_type, ()) if node.domain == "" and node.graph is graph else ():
                match = find_match(pattern, node.outputs[0], _accepts)
                if match is not None:
                    operands = [value.producer() for value in node.inputs if value is not None]
                    replace_node(node, write(Builder(graph, before=node), match))
                    remove_unread(graph, *operands)
                    restored = True
                    break
    return restored


def _accepts(match: Match) -> bool:
    return "epsilon" not in match.found or (
        0 < match["epsilon"] <= LONGEST_EPSILON and _is_square(match["a"]) and _is_square(match["b"])
    )


def _is_square(value: ir.Value) -> bool:
    total = producer_of(value, "ReduceSum")
    terms = value if total is None else total.inputs[0]
    square = producer_of(terms, "Mul")
    return constant_array(terms) is not None or (square is not None and square.inputs[0] is square.inputs[1])


def _atan2(builder: Builder, match: Match) -> Tensor:
    """Emit the angle of (x, y) from the quotient that is at most 1; 0 at the origin."""
    y, x = builder.tensor(match["y"]), builder.tensor(match["x"])
    zero, one = builder.scalar(0, y), builder.scalar(1, y)
    is_steep = builder.op("Greater", builder.op("Abs", y), builder.op("Abs", x))
    longer, shorter = builder.op("Where", is_steep, y, x), builder.op("Where", is_steep, x, y)
    is_origin = builder.op("Equal", longer, zero)
    angle = builder.op("Atan", builder.op("Where", is_origin, zero, shorter) / builder.op("Where", is_origin, one, longer))
    above, behind = builder.tensor(match["above"]), builder.tensor(match["behind"])
    half = builder.op("Where", above, builder.scalar(math.pi / 2, y), builder.scalar(-math.pi / 2, y))
    return builder.op("Where", is_steep, half - angle, angle + builder.op("Where", behind, half + half, zero))


def _sinc(builder: Builder, match: Match) -> Tensor:
    x = builder.tensor(match["x"])
    is_zero, one, scaled = builder.op("Equal", x, 0.0), builder.scalar(1, x), x * math.pi
    return builder.op("Where", is_zero, one, builder.op("Sin", scaled) / builder.op("Where", is_zero, one, scaled))


def _xlogy(builder: Builder, match: Match) -> Tensor:
    x, y = builder.tensor(match["x"]), builder.tensor(match["y"])
    is_zero = builder.op("And", builder.op("Equal", x, 0.0), builder.op("LessOrEqual", y, 0.0))
    return x * builder.op("Log", builder.op("Where", is_zero, builder.scalar(1, y), y))


def _cosine(builder: Builder, match: Match) -> Tensor:
    """Emit the product of two vectors divided by their lengths, each with a lower bound that stops no gradient."""
    squares = [_sum_of_squares(builder, match[name], match["product"]) for name in ("a", "b")]
    lengths = [builder.op("Max", builder.op("Sqrt", square), match["epsilon"]) for square in squares]
    for length in lengths:
        producer = length.value.producer()
        assert producer is not None
        SUBGRADIENT.set(producer, WHOLE)
    return builder.tensor(match["product"]) / (lengths[0] * lengths[1])


def _sum_of_squares(builder: Builder, total: ir.Value, product: ir.Value) -> Tensor:
    reduction, dot = producer_of(total, "ReduceSum"), producer_of(product, "ReduceSum")
    factors = None if dot is None else producer_of(dot.inputs[0], "Mul")
    stored = None if reduction is None else constant_array(reduction.inputs[0])
    if reduction is None or factors is None or stored is None:
        return builder.tensor(total)
    for weight in factors.inputs:
        array = constant_array(weight)
        if weight is not None and weight.is_initializer() and array is not None and np.array_equal(array * array, stored):
            tensor = builder.tensor(weight)
            axes = [builder.tensor(value) for value in reduction.inputs[1:] if value is not None]
            attributes = {name: attribute.value for name, attribute in reduction.attributes.items()}
            return builder.op("ReduceSum", tensor * tensor, *axes, like=builder.tensor(total), **attributes)
    return builder.tensor(total)


def _forms() -> dict[str, tuple[tuple[Node, Callable[[Builder, Match], Tensor]], ...]]:
    x, y, product, zero = Variable("x"), Variable("y"), Variable("product"), Number(0.0)
    angle = Node("Atan", Node("Div", y, x))
    turned = Node("Where", Variable("above"), Node("Add", angle, Number(math.pi)), Node("Sub", angle, Number(math.pi)))
    scaled = Node("Mul", x, Number(math.pi))
    logarithm = Node("Where", Node("IsNaN", y), y, Node("Mul", x, Node("Log", y)))
    is_zero = Node("Equal", x, zero)
    bounded = Node("Max", Node("Sqrt", Node("Mul", Variable("a"), Variable("b"))), Number(name="epsilon"))
    return {
        "Where": (
            (Node("Where", Variable("behind"), turned, angle), _atan2),
            (Node("Where", is_zero, Number(1.0), Node("Div", Node("Sin", scaled), scaled)), _sinc),
            (Node("Where", is_zero, Either(zero, x), logarithm), _xlogy),
        ),
        "Div": ((Node("Div", product, bounded), _cosine),),
    }


_FORMS = _forms()


_JOINED = Node(
    "Reshape",
    Node(
        "Transpose",
        Node("Reshape", Variable("matrices"), reads=lambda node: {"batch": node.outputs[0].shape}),
        attributes={"perm": (0, 2, 1)},
    ),
    reads=lambda node: {},
)


def join_transpositions(model: ir.Model) -> bool:
    """Replace, in place, Reshape, Transpose and Reshape in the main graph by one Transpose; return True if there were any.

    Shapes must be inferred; nodes stay unless extents are known to be equal.
    """
    joined = False
    for node in list(model.graph):
        match = next(_JOINED.match(node.outputs[0]), None) if node.op_type == "Reshape" else None
        if match is None or not _transposes(match["matrices"].shape, match["batch"], node.outputs[0].shape):
            continue
        builder, matrices = Builder(model.graph, before=node), match["matrices"]
        rank = len(matrices.shape)
        makers = [value.producer() for value in node.inputs if value is not None]
        replace_node(node, builder.op("Transpose", builder.tensor(matrices), perm=[*range(rank - 2), rank - 1, rank - 2]))
        remove_unread(model.graph, *makers)
        joined = True
    return joined


def _transposes(matrices: ir.Shape | None, batch: ir.Shape | None, result: ir.Shape | None) -> bool:
    if matrices is None or batch is None or result is None:
        return False
    if len(matrices) < 3 or len(batch) != 3 or len(result) != len(matrices):
        return False
    *leading, rows, columns = matrices.dims
    # The first extent follows from the others, since the number of elements is the same.
    pairs = zip((rows, columns, *leading[1:], columns, rows), (*batch.dims[1:], *result.dims[1:]), strict=True)
    return all(same_dimension(one, other) for one, other in pairs)


_PASSING = ("Cast", "CastLike", "Identity", "Reshape", "Squeeze", "Unsqueeze")


def leave_out_zero_biases(model: ir.Model) -> bool:
    """Remove, in place, biases of convolutions that are broadcast zeros; return True if there were any.

    A zero bias stored in full shape is trainable and stays.
    """
    changed = False
    for node in list(model.graph.all_nodes()):
        if node.op_type not in ("Conv", "ConvTranspose") or node.domain != "" or len(node.inputs) < 3:
            continue
        bias = node.inputs[2]
        if bias is None or not _is_broadcast_zero(bias):
            continue
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        node.resize_inputs(2)
        remove_unread(graph, bias.producer())
        changed = True
    return changed


def _is_broadcast_zero(value: ir.Value) -> bool:
    origin = origin_of(value, _PASSING)
    made = producer_of(origin, "Expand", "ConstantOfShape", "Constant")
    if made is None:
        return False
    if made.op_type == "Constant":
        array = constant_array(origin) if COMPUTED.is_on(made) else None
        return array is not None and not array.any()
    if made.op_type == "ConstantOfShape":
        fill = attribute_value(made, "value", None)
        return fill is None or not fill.numpy().any()
    array = None if made.inputs[0] is None else constant_array(origin_of(made.inputs[0], _PASSING))
    return array is not None and array.size == 1 and not array.any()


_TARGET = re.compile(r"target=torch\.ops\.aten\.(\w+)(?:\.(\w+))?")
_COPIED = re.compile(r"args = \(%clone")
"""``cosine_similarity`` clones the lengths and clamps the clones without autograd; ``normalize`` clamps the lengths with it."""
_CLAMPS = frozenset({"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "clip", "clip_"})
_RELU6 = (0.0, 6.0)
"""Without a record, this activation is more likely than a clamp with its bounds."""


def note_subgradients(model: ir.Model) -> None:
    """Record, in place, the subgradients of a model exported by PyTorch."""
    nodes = [node for node in model.graph.all_nodes() if node.domain == ""]
    are_noted = any(CALL in node.metadata_props for node in nodes)
    modules: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        modules[_module_of(node)].update({node.op_type} - {"Constant"})
    for node in nodes:
        if not SUBGRADIENT.is_on(node):
            subgradient = _subgradient_of_call(node) if are_noted else _likely_subgradient(node, modules)
            if subgradient is not None:
                SUBGRADIENT.set(node, subgradient)


def _subgradient_of_call(node: ir.Node) -> str | None:
    note = node.metadata_props.get(CALL, "")
    called = _TARGET.search(note)
    name, overload = (called[1], called[2]) if called is not None else (None, None)
    if name == "clamp_min" and node.op_type in ("Clip", "Max") and _COPIED.search(note) and _is_length(node.inputs[0]):
        return WHOLE
    if node.op_type in ("Max", "Min"):
        return FIRST if name in _CLAMPS else None
    if node.op_type == "Clip":
        return INCLUSIVE if name in _CLAMPS or (name is None and _bounds(node) not in (_RELU6, (-1.0, 1.0))) else None
    if node.op_type in ("ReduceMax", "ReduceMin"):
        return FIRST if name in ("max", "min") and overload == "dim" else None
    return None


def _likely_subgradient(node: ir.Node, modules: Mapping[str, set[str]]) -> str | None:
    """Return the subgradient of the most likely PyTorch call if no calls are recorded."""
    if node.op_type in ("Max", "Min"):  # clamp with tensor bounds is a minimum of a maximum
        inner, outer = (
            (node, only_user(node.outputs[0], "Min")) if node.op_type == "Max" else (producer_of(node.inputs[0], "Max"), node)
        )
        return FIRST if inner is not None and outer is not None and outer.inputs[0] is inner.outputs[0] else None
    if node.op_type == "Clip":
        is_activation = _bounds(node) == _RELU6 or (_module_of(node) != "" and modules[_module_of(node)] == {"Clip"})
        return None if is_activation else INCLUSIVE
    if node.op_type in ("ReduceMax", "ReduceMin"):
        axes = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
        is_norm = producer_of(node.inputs[0], "Abs") is not None
        return FIRST if axes is not None and axes.size == 1 and not is_norm else None
    return None


def _is_length(value: ir.Value | None) -> bool:
    return value is not None and producer_of(origin_of(value, ("Identity",)), "ReduceL2") is not None


def _bounds(node: ir.Node) -> tuple[float, ...]:
    arrays = (None if value is None else constant_array(value) for value in node.inputs[1:3])
    return tuple(float(array.reshape(())) if array is not None and array.size == 1 else float("nan") for array in arrays)


def _module_of(node: ir.Node) -> str:
    """Return the module in a node's name: ``/features/2`` of ``/features/2/Clip``."""
    return (node.name or "").rpartition("/")[0]
