"""What the inputs of operators are for, by position: weights, statistics, configuration; and weights in one place.

Initializers of the main graph hold all weights of a canonical model. Some files hold weights by their shape alone:
``ConstantOfShape`` where a layer reads its weights. The ``light`` models of the onnx package are written so, to keep the files
small. Their weights train like others, from one value that all elements have, or freshly initialized.
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
"""Operands that are weights wherever they are constant."""

STATISTIC_OPERANDS: Mapping[str, tuple[int, ...]] = {"BatchNormalization": (3, 4)}
"""Running statistics, which training updates and never differentiates."""

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
"""Floating-point operands that set how an operator works."""

NOT_DIFFERENTIABLE = frozenset(
    "Bernoulli Ceil EyeLike Floor Multinomial NonMaxSuppression RandomNormal RandomNormalLike RandomUniform RandomUniformLike "
    "Range Round Sign".split()
)
"""Operators with floating-point outputs whose inputs receive no gradient, or one that is zero everywhere."""

QUANTIZES = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
"""Operators that give integers for floating-point numbers, through which a gradient passes as if they did not round."""

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
"""Operators that may stand between a quantization and what makes floating-point numbers of it again, and their operands that may
hold its integers; None for all."""


SUMS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
"""What integers of a quantization are summed in."""


def may_hold_integers(node: ir.Node, index: int) -> bool:
    """Whether an input of a node may hold integers that stand for floating-point numbers, and carry their gradient."""
    if node.domain != "" or node.op_type not in INTEGER_OPERANDS:
        return False
    value = node.inputs[index]
    if node.op_type in ("Add", "Mul", "Sub") and (value is None or value.dtype not in SUMS):
        return False  # what does not fit wraps around
    operands = INTEGER_OPERANDS[node.op_type]
    return operands is None or index in operands


def constant_operands(node: ir.Node) -> tuple[int, ...]:
    """The positions of the inputs of a node that receive no gradient: configuration, and running statistics."""
    if node.domain != "":
        return ()
    if node.op_type in ("DequantizeLinear", "QuantizeLinear") and learns_scale(node):
        return (2,)
    return (*CONFIGURATION_OPERANDS.get(node.op_type, ()), *STATISTIC_OPERANDS.get(node.op_type, ()))


ARRANGES = frozenset("Cast Concat Flatten Identity Reshape Slice Split Squeeze Transpose Unsqueeze".split())
"""Operators that only put the elements of weights into the form in which a layer reads them."""


def gather_initializers(model: ir.Model) -> bool:
    """Make, in place, every weight an initializer of the main graph, and no initializer a graph input.

    An initializer that is also an input is a weight with a default a caller may override; in training it is state. Weights
    that an exporter wrote as Constant nodes are lifted under the name of the node's output, also where the layer reads them
    through nodes that only arrange their elements. The ones and zeros that stand for the scale and bias that a normalization
    layer does not have stay constants: they were never weights.

    Weights of either form in branches and loop bodies are lifted under their names too, and are read from there. Where several
    have one name, the first keeps it and a number follows it in the others.
    """
    graph = model.graph
    weights = set(graph.initializers.values())
    before = len(graph.inputs)
    graph.inputs[:] = [value for value in graph.inputs if value not in weights]
    subgraphs = [subgraph for subgraph in model.graphs() if subgraph is not graph]
    # Values inside of bodies that are no weights get other names where theirs are taken.
    values = (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs))
    names = Names(value.name for value in values)
    for subgraph in subgraphs:
        _lift_from_subgraph(graph, subgraph, names)
    # An exporter that writes all weights as Constant nodes writes a fresh scale and bias so, too.
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
    """What a node reads as its weights, where that is constant."""
    if node.domain != "":
        return
    for index in WEIGHT_OPERANDS.get(node.op_type, ()):
        operand = node.inputs[index] if index < len(node.inputs) else None
        if operand is not None and not (has_initializers and _stands_for_nothing(node, index, operand)):
            yield operand
    if node.op_type == "Add":
        # The bias of a dense layer that is written as MatMul and Add.
        for operand, other in (node.inputs, reversed(node.inputs)):
            if operand is not None and producer_of(other, "MatMul", "Conv", "ConvTranspose", "Gemm") is not None:
                yield operand


def _stands_for_nothing(node: ir.Node, index: int, operand: ir.Value) -> bool:
    """Whether a constant is the scale 1 or the bias 0 that a normalization layer without them is written with."""
    if not node.op_type.endswith("Normalization") or index not in (1, 2):
        return False
    array = constant_array(operand) if operand.producer() is not None else None
    return array is not None and bool(np.all(array == (1 if index == 1 else 0)))


def _constants_of(value: ir.Value) -> list[ir.Value]:
    """The outputs of Constant nodes that a value is arranged of; none where data or an initializer has a part in it.

    What stands beside an initializer is what a layer lacks, such as the zeros of a second bias.
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
    """Move the floating-point tensors of a branch or loop body; axes and shapes stay where inference sees them."""
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
    """Let a body return what a node gives: a value of the graph around it can be none of its outputs."""
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
"""Elements of a weight; above, a few bytes of a file would ask for more memory than there is."""


def hold_stripped_weights(model: ir.Model) -> bool:
    """Make, in place, initializers of weights that are only filled with one value, in a model that reads no matrix otherwise.

    In a model with weights of its own such a fill is the zero or the one that stands for a bias or scale that a layer lacks.
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
    """Hold the weight of a layer of its own that scales what batch normalization gives, and of one that then adds to it."""
    for operand, other in (node.inputs, reversed(node.inputs)):
        after_norm = producer_of(other, "BatchNormalization") is not None
        if (after_norm or other in scaled) and _hold(graph, operand):
            scaled.add(node.outputs[0])


def _hold(graph: ir.Graph, value: ir.Value | None) -> bool:
    """Turn what a value is passed on from into an initializer, if it is a fill; return whether an initializer is there now."""
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
