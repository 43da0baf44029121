"""Parameters that an exporter merged because they were equal become separate again.

At initialization many parameters are equal (scales of one, biases of zero). The TorchScript exporter then writes one
initializer, and ``Identity`` nodes on it whose outputs carry the names of the others. A model that shares a weight on purpose
has one initializer with several consumers, and no Identity.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph.constants import constant_array
from burnish.graph.initializers import add_initializer, replace_by_initializer
from burnish.graph.names import Names
from burnish.importer.operands import STATISTIC_OPERANDS


def untie_parameters(model: ir.Model) -> bool:
    """Replace, in place, ``Identity(initializer)`` nodes whose output has a name of its own by initializers of that name.

    Returns:
        Whether there was any.
    """
    graph = model.graph
    untied = False
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Identity" and node.domain == "" else None
        output = node.outputs[0]
        if source is None or source.const_value is None or not source.is_initializer() or output.is_graph_output():
            continue
        if source.graph is graph and not _names_the_operation(node):
            tensor = source.const_value
            replace_by_initializer(graph, node, ir.Tensor(tensor.numpy().copy(), tensor.dtype))
            untied = True
    return untied


def separate_statistics(model: ir.Model) -> bool:
    """Give running statistics initializers of their own, in place, where a layer's scale or bias is the same initializer.

    In a fresh model the running means and biases are zero, and the running variances and scales are one; an optimizer of graphs
    that keeps equal tensors once makes one initializer of them. Training moves the two in different ways. An initializer whose
    elements differ was merged by nobody: what reads it beside a layer's statistics means the statistics.

    Returns:
        Whether there was any.
    """
    graph = model.graph
    names = Names.of(graph)
    separated = False
    for name, value in list(graph.initializers.items()):
        statistics = [(node, index) for node, index in value.uses() if _is_statistic(node, index)]
        if not statistics or not any(_is_parameter(node, index) for node, index in value.uses()):
            continue
        array = constant_array(value)
        if array is None or array.size == 0 or (array != array.flat[0]).any():
            continue
        for node, index in statistics:
            node.replace_input_with(index, add_initializer(graph, names.take(f"{name}_statistic"), array.copy()))
        separated = True
    return separated


_PARAMETERS = {
    "BatchNormalization": (1, 2),
    "Conv": (2,),
    "ConvTranspose": (2,),
    "Gemm": (2,),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
}
"""Which operands of an operator are scales and biases, which start as ones and zeros."""


def _is_parameter(node: ir.Node, index: int) -> bool:
    return node.domain == "" and index in _PARAMETERS.get(node.op_type, ())


def _is_statistic(node: ir.Node, index: int) -> bool:
    return node.domain == "" and index in STATISTIC_OPERANDS.get(node.op_type, ())


def _names_the_operation(node: ir.Node) -> bool:
    """Whether the output is named after the node, as a computation's is, and not after a parameter."""
    output = node.outputs[0].name or ""
    return bool(node.name) and output.startswith((f"{node.name}_output_", f"{node.name}:"))
