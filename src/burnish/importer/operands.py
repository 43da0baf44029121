"""Roles of operands by position: weights, statistics, configuration. Also gathers all weights in the main graph.

The main graph's initializers hold all weights of a canonical model. Some files only hold shapes of weights, as
``ConstantOfShape``, such as the ``light`` models of the onnx package. These are trained like others, from a constant value or
re-initialized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, Names, attribute_value, bodies, constant_array, static_shape
from burnish.graph.annotations import COMPUTED, NAME_IN_BODY
from burnish.graph.constants import replace_by_initializer
from burnish.graph.uses import origin_of, producer_of
from burnish.quantization.graph import learns_scale

WEIGHT_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "GRU": (1, 2, 3),
    "Gather": (0,),
    "Gemm": (0, 1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
}
"""Operands that are weights if they are constant."""

STATISTIC_OPERANDS: Mapping[str, tuple[int, ...]] = {"BatchNormalization": (3, 4)}
"""Running statistics, which training updates but does not differentiate."""

CONFIGURATION_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "Clip": (1, 2),
    "DequantizeLinear": (1, 2),
    "Dropout": (1, 2),
    "NegativeLogLikelihoodLoss": (2,),
    "OneHot": (2,),
    "Pad": (2,),
    "Pow": (1,),
    "QuantizeLinear": (1, 2),
    "Resize": (1, 2, 3),
    "RoiAlign": (1, 2),
    "RotaryEmbedding": (1, 2),
    "SoftmaxCrossEntropyLoss": (2,),
    "Upsample": (1,),
}
"""Floating-point operands that configure an operator."""

NOT_DIFFERENTIABLE = frozenset(
    "Bernoulli Ceil EyeLike Floor Multinomial NonMaxSuppression RandomNormal RandomNormalLike RandomUniform RandomUniformLike "
    "Range Round Sign".split()
)
"""Operators with floating-point outputs and no gradient, or a zero one."""

QUANTIZES = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
"""Operators that quantize to integers; gradients pass as if they did not round."""

INTEGER_OPERANDS: Mapping[str, tuple[int, ...] | None] = {
    "Add": None,
    "Cast": (0,),
    "Clip": (0,),
    "Concat": None,
    "ConvInteger": (0, 1),
    "DepthToSpace": (0,),
    "DequantizeLinear": (0,),
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Identity": (0,),
    "MatMulInteger": (0, 1),
    "Max": None,
    "MaxPool": (0,),
    "Min": None,
    "Mul": None,
    "Pad": (0, 2),
    "Reshape": (0,),
    "Slice": (0,),
    "SpaceToDepth": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Sub": None,
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "Where": (1, 2),
}
"""Operators allowed between quantization and dequantization, and their operands that may hold integers; None for all."""


SUMS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
"""Dtypes for sums of quantized integers."""


def may_hold_integers(node: ir.Node, index: int) -> bool:
    """True if an input of a node may hold quantized integers and carry their gradient."""
    if node.domain != "" or node.op_type not in INTEGER_OPERANDS:
        return False
    value = node.inputs[index]
    if node.op_type in ("Add", "Mul", "Sub") and (value is None or value.dtype not in SUMS):
        return False  # narrower integers overflow
    operands = INTEGER_OPERANDS[node.op_type]
    return operands is None or index in operands


def constant_operands(node: ir.Node) -> tuple[int, ...]:
    """Return the positions of inputs without a gradient: configuration and running statistics."""
    if node.domain != "":
        return ()
    if node.op_type in ("DequantizeLinear", "QuantizeLinear") and learns_scale(node):
        return (2,)
    return (*CONFIGURATION_OPERANDS.get(node.op_type, ()), *STATISTIC_OPERANDS.get(node.op_type, ()))


ARRANGES = frozenset("Cast Concat Flatten Identity Reshape Slice Split Squeeze Transpose Unsqueeze".split())
"""Operators that only rearrange the elements of weights."""


def gather_initializers(model: ir.Model) -> bool:
    """Make, in place, every weight an initializer of the main graph, and no initializer a graph input.

    An initializer that is also an input is a weight that callers may override; in training it is state. Weights in Constant nodes
    become initializers with the names of the nodes' outputs, even if the layer reads them through rearranging nodes. The ones and
    zeros for a normalization layer without scale and bias stay constants: they were never weights.

    Weights in branches and loop bodies are lifted under their names too. Duplicate names get a number, except for the first.
    """
    graph = model.graph
    weights = set(graph.initializers.values())
    before = len(graph.inputs)
    graph.inputs[:] = [value for value in graph.inputs if value not in weights]
    subgraphs = [subgraph for subgraph in model.graphs() if subgraph is not graph]
    # Other values in bodies are renamed if their name is taken.
    values = (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs))
    names = Names(value.name for value in values)
    for subgraph in subgraphs:
        _lift_from_subgraph(graph, subgraph, names)
    # If an exporter writes all weights as Constants, constant scales and biases may be weights too.
    has_initializers = any(
        value.dtype in FLOATING and value.shape is not None and len(value.shape) > 1 for value in graph.initializers.values()
    )
    operands = [
        operand for subgraph in (graph, *subgraphs) for node in subgraph for operand in weight_operands(node, has_initializers)
    ]
    constants = dict.fromkeys(constant for operand in operands for constant in _constants_of(operand))
    for constant in constants:
        _lift(graph, constant, names)
    return bool(constants) or bool(subgraphs) or len(graph.inputs) < before


def weight_operands(node: ir.Node, has_initializers: bool) -> Iterator[ir.Value]:
    """Yield the constant weights of a node."""
    if node.domain != "":
        return
    for index in WEIGHT_OPERANDS.get(node.op_type, ()):
        operand = node.inputs[index] if index < len(node.inputs) else None
        if operand is not None and not (has_initializers and _stands_for_nothing(node, index, operand)):
            yield operand
    if node.op_type == "Add":
        # bias of a dense layer written as MatMul and Add
        for operand, other in (node.inputs, reversed(node.inputs)):
            if operand is not None and producer_of(other, "MatMul", "Conv", "ConvTranspose", "Gemm") is not None:
                yield operand


def _stands_for_nothing(node: ir.Node, index: int, operand: ir.Value) -> bool:
    if not node.op_type.endswith("Normalization") or index not in (1, 2):
        return False
    array = constant_array(operand) if operand.producer() is not None else None
    return array is not None and bool(np.all(array == (1 if index == 1 else 0)))


def _constants_of(value: ir.Value) -> list[ir.Value]:
    """Return the Constant outputs that a value is rearranged from; empty if data or an initializer is involved.

    Constants combined with an initializer fill in for missing parts of a layer, such as the zeros of a second bias.
    """
    constants: list[ir.Value] = []
    seen, pending = {value}, [value]
    while pending:
        current = pending.pop()
        node = producer_of(current)
        if node is None:
            return []
        if node.op_type == "Constant":
            constants.append(current)
            continue
        if node.op_type == "If":
            index = node.outputs.index(current)
            operands = [output for body in bodies(node) for output in body.outputs[index : index + 1]]
        elif node.op_type in ARRANGES:
            read = node.inputs if node.op_type == "Concat" else node.inputs[:1]
            operands = [operand for operand in read if operand is not None]
        else:
            return []
        pending.extend(operand for operand in operands if operand not in seen)
        seen.update(operands)
    return constants


def _lift_from_subgraph(graph: ir.Graph, subgraph: ir.Graph, names: Names) -> None:
    """Lift the floating-point tensors of a branch or loop body; axes and shapes stay, for inference."""
    for name, value in list(subgraph.initializers.items()):
        if value.dtype not in FLOATING or value.shape is None or len(value.shape) == 0 or value.is_graph_input():
            continue
        if value.is_graph_output():
            _return_by_identity(subgraph, value)
        del subgraph.initializers[name]
        value.name = names.take(name)
        NAME_IN_BODY.set(value, name)
        graph.register_initializer(value)


def _return_by_identity(subgraph: ir.Graph, value: ir.Value) -> None:
    """Return an initializer from a body through an Identity: outer values cannot be body outputs."""
    node = ir.node("Identity", [value])
    subgraph.append(node)
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    for position, output in enumerate(subgraph.outputs):
        if output is value:
            subgraph.outputs[position] = node.outputs[0]


def _lift(graph: ir.Graph, value: ir.Value, names: Names) -> None:
    node = value.producer()
    is_output = value.is_graph_output()
    if node is None or not value.name or COMPUTED.is_on(node) or (is_output and node.graph is graph):
        return
    array = constant_array(value)
    if array is None or array.ndim == 0:
        return
    attribute = node.attributes.get("value")
    tensor = ir.Tensor(array) if attribute is None else attribute.as_tensor()
    if tensor.dtype not in FLOATING:
        return
    is_inside = node.graph is not graph
    if is_output:
        assert isinstance(node.graph, ir.Graph)
        _return_by_identity(node.graph, value)
    name_in_body = value.name
    value.name = names.take(name_in_body) if is_inside else name_in_body
    lifted = replace_by_initializer(
        graph, node, tensor if isinstance(tensor, ir.ExternalTensor) else ir.Tensor(array, tensor.dtype)
    )
    if is_inside:
        NAME_IN_BODY.set(lifted, name_in_body)


WEIGHTS = {"BatchNormalization": (1, 2, 3, 4), "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2)}
PASSED_ON = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})
LARGEST = 1 << 31
"""Most elements of a weight; more would let a tiny file exhaust memory."""


def hold_stripped_weights(model: ir.Model) -> bool:
    """Make, in place, initializers of weights that are filled with one value, if the model has no other matrix.

    In a model with real weights such fills are placeholders for a missing bias or scale.
    """
    graph = model.graph
    if any(map(_is_matrix, graph.initializers.values())):
        return False
    held = len(graph.initializers)
    scaled: set[ir.Value] = set()
    for node in list(graph):
        if node.domain != "":
            continue
        for index in WEIGHTS.get(node.op_type, ()):
            if index < len(node.inputs):
                _hold(graph, node.inputs[index])
        if node.op_type in ("Add", "Mul"):
            _hold_scale_or_shift(graph, node, scaled)
    return len(graph.initializers) > held


def _is_matrix(value: ir.Value) -> bool:
    shape = static_shape(value) or ()
    return value.dtype in FLOATING and len(shape) > 1 and math.prod(shape) > 1 and bool(value.uses())


def _hold_scale_or_shift(graph: ir.Graph, node: ir.Node, scaled: set[ir.Value]) -> None:
    """Hold the weights of a separate scale, and then shift, after batch normalization."""
    for operand, other in (node.inputs, reversed(node.inputs)):
        after_norm = producer_of(other, "BatchNormalization") is not None
        if (after_norm or other in scaled) and _hold(graph, operand):
            scaled.add(node.outputs[0])


def _hold(graph: ir.Graph, value: ir.Value | None) -> bool:
    if value is None:
        return False
    value = origin_of(value, PASSED_ON)
    node = producer_of(value, "ConstantOfShape")
    if node is None or node.graph is not graph:
        return value.is_initializer()
    extents = constant_array(node.inputs[0])
    if extents is None or extents.ndim != 1 or not extents.size or (extents < 1).any() or value.is_graph_output():
        return False
    shape = [int(extent) for extent in extents]
    fill: ir.TensorProtocol = attribute_value(node, "value", ir.Tensor(np.zeros(1, np.float32)))
    if fill.dtype not in FLOATING or fill.size != 1 or math.prod(shape) > LARGEST or not value.name:
        return False
    replace_by_initializer(graph, node, ir.Tensor(np.broadcast_to(fill.numpy().reshape(()), shape), fill.dtype))
    return True
