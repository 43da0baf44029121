"""Rewrites of floating-point types, and reductions that sum in float32.

float16 and bfloat16 models compute in float32, models for comparisons in float64, and float64 parts in float32 for runtimes
without float64.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from burnish.graph import SIXTEEN_BIT, Builder, Names, bodies, insert_behind, replace_output, replace_value
from burnish.graph.shapes import has_sixteen_bit_values, has_values_of
from burnish.graph.uses import only_user, remove_node

ELEMENT_TYPES = ("to", "dtype", "precision", "softmax_precision", "stash_type")
"""Attributes with the element type of an operator's output or of its computation."""

STASHING = frozenset({"LayerNormalization", "RMSNormalization"})
"""Operators that compute statistics in float32 unless ``stash_type`` is set."""

READ_AT_ONCE = 1024
"""Largest tensor that is converted at once, in elements; larger ones are converted on each read."""


def widen_node(node: ir.Node, narrow: Collection[ir.DataType], wide: ir.DataType) -> None:
    """Convert the narrow types of a node's outputs and attributes, and of its subgraphs' inputs and initializers, to ``wide``."""
    widen_values(node.outputs, narrow, wide)
    for body in bodies(node):
        widen_values(body.inputs, narrow, wide)
        widen_initializers(body, narrow, wide)
    for attribute in list(node.attributes.values()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in narrow:
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, widened(attribute.as_tensor(), wide))
        elif attribute.name in ELEMENT_TYPES and attribute.type == ir.AttributeType.INT and attribute.as_int() in narrow:
            node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(wide))
        elif ir.DataType.FLOAT in narrow and node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            number = attribute.as_float() if attribute.name == "value_float" else attribute.as_floats()
            node.attributes.pop(attribute.name)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.asarray(number, wide.numpy())))
    if ir.DataType.FLOAT in narrow and node.op_type in STASHING and node.domain == "":
        node.attributes["stash_type"] = ir.AttrInt64("stash_type", int(wide))
    is_zeros = node.op_type == "ConstantOfShape" and node.domain == "" and "value" not in node.attributes
    if is_zeros and ir.DataType.FLOAT in narrow:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, wide.numpy())))


def widen_values(values: Iterable[ir.Value], narrow: Collection[ir.DataType], wide: ir.DataType) -> None:
    """Convert the type of values, including sequences and optionals."""
    for value in values:
        if value.dtype in narrow:
            assert value.type is not None
            value.type = _wider(value.type, wide)


def widen_initializers(graph: ir.Graph, narrow: Collection[ir.DataType], wide: ir.DataType) -> None:
    """Convert a graph's initializers."""
    for value in graph.initializers.values():
        if value.const_value is not None and value.dtype in narrow:
            value.const_value = widened(value.const_value, wide)
    widen_values(graph.initializers.values(), narrow, wide)


def widened(tensor: ir.TensorProtocol, wide: ir.DataType) -> ir.TensorProtocol:
    """Return a tensor in another type; a large one is converted on each read and not kept in memory."""

    def read() -> ir.Tensor:
        return ir.Tensor(tensor.numpy().astype(wide.numpy()), name=tensor.name)

    if tensor.size <= READ_AT_ONCE:
        return read()
    return ir.LazyTensor(read, wide, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _wider(kind: ir.TypeProtocol, wide: ir.DataType) -> ir.TypeProtocol:
    if isinstance(kind, ir.SequenceType | ir.OptionalType):
        return type(kind)(_wider(kind.elem_type, wide))
    return type(kind)(wide)  # type: ignore[call-arg]


SINGLE = ir.DataType.FLOAT


def compute_in_float32(model: ir.Model, *, keep_inputs: bool = True, keep_outputs: bool = False) -> bool:
    """Make a float16 or bfloat16 model compute in float32, in place, as if its file were in float32.

    Casts between the two become Identity, and constants keep their rounded values. Exception: if all weights are wider, a value
    that is cast down and straight back is still rounded, since that was intended. Names stay.

    Args:
        model: a canonical model.
        keep_inputs: True to keep the dtypes of inputs, with casts for their readers.
        keep_outputs: True to keep the dtypes of outputs, with a final cast.
    """
    if not has_sixteen_bit_values(model):
        return False
    graph = model.graph
    outputs = [value.dtype for value in graph.outputs]
    rounded = _rounded_on_purpose(graph)
    if keep_inputs:
        order = order_of(graph)
        for value in graph.inputs:
            if value.dtype in SIXTEEN_BIT and value.uses():
                cast_for_readers(graph, value, SINGLE, order)
    else:
        widen_values(graph.inputs, SIXTEEN_BIT, SINGLE)
    widen_initializers(graph, SIXTEEN_BIT, SINGLE)
    operands = {node: node.inputs[0].dtype for node in graph.all_nodes() if _copies_bits(node) and node.inputs[0] is not None}
    for node in list(graph.all_nodes()):
        if node in operands:
            _keep_bits(node, operands[node])
        elif not rounded.intersection(node.outputs):
            _widen(node)
    if keep_outputs:
        for index, dtype in enumerate(outputs):
            if dtype in SIXTEEN_BIT and graph.outputs[index].dtype != dtype:
                _round_output(graph, graph.outputs[index], dtype)
    return True


Order = dict[ir.Node, tuple[int, ir.Node]]
"""For each node of a graph or its subgraphs: the position of the enclosing top-level node, and that node."""


def order_of(graph: ir.Graph) -> Order:
    """Return the positions of the nodes of a graph."""
    order: Order = {}
    for index, node in enumerate(graph):
        order[node] = index, node
        for body in bodies(node):
            order.update(dict.fromkeys(body.all_nodes(), (index, node)))
    return order


def cast_for_readers(
    graph: ir.Graph, value: ir.Value, dtype: ir.DataType, order: Order, besides: Collection[ir.Node] = ()
) -> None:
    """Cast a value before its first reader, and connect all readers except ``besides`` to the cast."""
    readers = [(node, index) for node, index in value.uses() if node not in besides]
    _, first = min((order[node] for node, _ in readers), key=lambda place: place[0])
    builder = Builder(graph, before=first)
    cast = builder.op("Cast", builder.tensor(value), to=int(dtype)).value
    for node, index in readers:
        node.replace_input_with(index, cast)


def _rounded_on_purpose(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that are only cast down and straight back, if all weights of the model are wider."""
    if any(value.dtype in SIXTEEN_BIT and value.shape is not None and len(value.shape) for value in graph.initializers.values()):
        return set()
    return {
        node.outputs[0]
        for node in graph.all_nodes()
        if _is_cast(node)
        and node.outputs[0].dtype in SIXTEEN_BIT
        and node.inputs[0] is not None
        and node.inputs[0].dtype not in SIXTEEN_BIT
        and _is_cast_back(node.outputs[0])
    }


def _is_cast_back(value: ir.Value) -> bool:
    readers = [node for node, _ in value.uses()]
    wider = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return (
        bool(readers)
        and not value.is_graph_output()
        and all(_is_cast(node) and node.outputs[0].dtype in wider for node in readers)
    )


def _is_cast(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.domain == ""


def _copies_bits(node: ir.Node) -> bool:
    """True if a node copies the bits of its operand, so that a wider type would change the result."""
    return node.op_type == "BitCast" and node.domain == ""


def _widen(node: ir.Node) -> None:
    widen_node(node, SIXTEEN_BIT, SINGLE)
    source, result = node.inputs[0] if node.inputs else None, node.outputs[0] if node.outputs else None
    if _is_cast(node) and source is not None and result is not None and source.dtype == result.dtype == SINGLE:
        # Keep the name for lookups; readers bypass the Identity.
        node.op_type = "Identity"
        node.attributes.clear()
        for reader, index in tuple(result.uses()):
            reader.replace_input_with(index, source)


def _keep_bits(node: ir.Node, operand: ir.DataType | None) -> None:
    graph, source, result = node.graph, node.inputs[0], node.outputs[0]
    assert graph is not None
    assert source is not None
    if operand in SIXTEEN_BIT and source.dtype != operand:
        builder = Builder(graph, before=node)
        node.replace_input_with(0, builder.cast(builder.tensor(source), operand).value)
    if result.dtype in SIXTEEN_BIT:
        following = ir.node("Cast", [result], {"to": int(SINGLE)})
        insert_behind(node, following, Names.of(graph))
        following.outputs[0].type = ir.TensorType(SINGLE)


def _round_output(graph: ir.Graph, value: ir.Value, dtype: ir.DataType) -> None:
    builder, name = Builder(graph), value.name
    rounded = builder.cast(builder.tensor(value), dtype).value
    replace_output(value, rounded)
    value.name = Names.of(graph).take(f"{name}:float32")
    rounded.name = name


NARROW = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def compute_in_float64(model: ir.Model) -> ir.Model:
    """Return a copy of a model that computes in float64 throughout, including inputs and constants.

    For the reference engine, which runs every operator in every dtype; others may refuse operands that must be float32, such as
    the scales of Resize. Constants keep their rounded values.

    Args:
        model: a model of standard operators; not changed.
    """
    copy = model.clone()
    widen_values(copy.graph.inputs, NARROW, ir.DataType.DOUBLE)
    widen_initializers(copy.graph, NARROW, ir.DataType.DOUBLE)
    for node in copy.graph.all_nodes():
        widen_node(node, NARROW, ir.DataType.DOUBLE)
    return copy


DOUBLE, SINGLE = ir.DataType.DOUBLE, ir.DataType.FLOAT


def compute_without_float64(model: ir.Model) -> bool:
    """Convert all float64 values of a model to float32, in place, including inputs, constants and outputs.

    Nonzero constants outside float32's range become the smallest or largest normal number.
    """
    if not has_values_of(model, (DOUBLE,)):
        return False
    widen_values(model.graph.inputs, (DOUBLE,), SINGLE)
    _round_initializers(model.graph)
    for node in list(model.graph.all_nodes()):
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == DOUBLE:
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _rounded(attribute.as_tensor()))
        for body in bodies(node):
            _round_initializers(body)
        widen_node(node, (DOUBLE,), SINGLE)
        _remove_cast_to_the_same(node)
    return True


def _round_initializers(graph: ir.Graph) -> None:
    for value in graph.initializers.values():
        if value.const_value is not None and value.dtype == DOUBLE:
            value.const_value = _rounded(value.const_value)
            value.type = ir.TensorType(SINGLE)


def _rounded(tensor: ir.TensorProtocol) -> ir.Tensor:
    array = tensor.numpy()
    limits = np.finfo(np.float32)
    size = np.clip(np.abs(array), float(limits.tiny), float(limits.max))
    kept = ~np.isfinite(array) | (array == 0)
    return ir.Tensor(np.where(kept, array, np.copysign(size, array)).astype(np.float32), name=tensor.name)


def _remove_cast_to_the_same(node: ir.Node) -> None:
    source = node.inputs[0] if node.inputs else None
    if node.op_type != "Cast" or node.domain != "" or source is None or source.dtype != SINGLE:
        return
    output = node.outputs[0]
    if output.dtype == SINGLE and not output.is_graph_output():
        replace_value(output, source)
        remove_node(node)


REDUCTIONS = frozenset(
    "CumSum ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceProd ReduceSum ReduceSumSquare".split()
)
ONLY_SHAPE = frozenset("Flatten Reshape Squeeze Transpose Unsqueeze".split())
"""Operators allowed between a sum and its cast back, so that a sum needed in float32 is never rounded."""


def widen_reductions(model: ir.Model) -> bool:
    """Compute reductions of sixteen-bit values in float32, in place; readers of the result still see its dtype."""
    names = None
    for node in list(model.graph):
        source = node.inputs[0] if node.inputs else None
        if node.op_type in REDUCTIONS and node.domain == "" and source is not None and source.dtype in SIXTEEN_BIT:
            names = names or Names.of(model.graph)
            _widen_operands(model.graph, names, node, source)
    return names is not None


def _widen_operands(graph: ir.Graph, names: Names, node: ir.Node, source: ir.Value) -> None:
    builder, dtype = Builder(graph, before=node), source.dtype
    assert dtype is not None
    node.replace_input_with(0, builder.cast(builder.tensor(source), ir.DataType.FLOAT).value)
    last, following = node, only_user(node.outputs[0])
    last.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    while following is not None and following.op_type in ONLY_SHAPE and following.inputs[0] is last.outputs[0]:
        last, following = following, only_user(following.outputs[0])
        last.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    rounding = ir.node("Cast", [last.outputs[0]], {"to": int(dtype)})
    insert_behind(last, rounding, names)
    rounded = rounding.outputs[0]
    rounded.type = ir.TensorType(dtype)
    for reader, _ in list(rounded.uses()):
        if reader.op_type == "Cast" and reader.domain == "" and reader.attributes["to"].as_int() == ir.DataType.FLOAT:
            replace_value(reader.outputs[0], last.outputs[0])
