"""Parameters that an exporter merged because they were equal become separate again.

At initialization many parameters are equal (scales of one, biases of zero). The TorchScript exporter then writes one
initializer, and ``Identity`` nodes on it whose outputs carry the names of the others. A model that shares a weight on purpose
has one initializer with several consumers, and no Identity; but a weight that the exporter computes ahead of time, such as a
transposed one, it computes for each call of the layer, and merges in the same way, under names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import onnx_ir as ir

from burnish.graph.constants import constant_array
from burnish.graph.edits import remove_node, replace_uses
from burnish.graph.initializers import add_initializer, replace_by_initializer
from burnish.graph.names import Names
from burnish.importer.operands import STATISTIC_OPERANDS

_COMPUTED = re.compile(r"onnx::\w+_\d+")


def untie_parameters(model: ir.Model) -> bool:
    """Replace, in place, ``Identity(initializer)`` nodes whose output has a name of its own by initializers of that name.

    Where a layer is called twice, and the exporter computed its weight for each call, both calls read one weight.

    Returns:
        Whether there was any.
    """
    graph = model.graph
    untied = False
    of_one_layer = _of_one_layer([node for node in graph if _is_merged(node, graph)])
    for node in list(graph):
        if not _is_merged(node, graph):
            continue
        source = node.inputs[0]
        assert source is not None
        if node in of_one_layer:
            replace_uses(node.outputs[0], source)
            remove_node(node)
        else:
            tensor = source.const_value
            assert tensor is not None
            replace_by_initializer(graph, node, ir.Tensor(tensor.numpy().copy(), tensor.dtype))
        untied = True
    return untied


def _is_merged(node: ir.Node, graph: ir.Graph) -> bool:
    source = node.inputs[0] if node.op_type == "Identity" and node.domain == "" else None
    if source is None or source.const_value is None or not source.is_initializer() or node.outputs[0].is_graph_output():
        return False
    return source.graph is graph and not _names_the_operation(node)


def _of_one_layer(merged: Sequence[ir.Node]) -> Collection[ir.Node]:
    """Return those of merged weights that are one weight, of a layer that is called several times.

    Numbers that differ among each other are never equal by chance, but in copies of a layer that was not trained yet, such as
    those of ``nn.TransformerEncoder``. These have parameters too that keep their own names, and are merged: some of numbers that
    differ, or a bias that is added to the product. Of numbers that are all alike, as biases of zero, those are one weight whose
    readers read such a one beside.
    """
    named = {node.outputs[0] for node in merged if not _is_computed(node)}
    same = [node for node in merged if _is_computed(node) and _differs(node)]
    readers = {reader for node in same for reader, _ in node.outputs[0].uses()}
    added = {value for reader in readers for output in reader.outputs for sum_, _ in output.uses() for value in sum_.inputs}
    if any(_differs(node) for node in merged if node.outputs[0] in named) or not named.isdisjoint(added):
        return ()
    computed = [node for node in merged if _is_computed(node)]
    alike = [node for node in computed if node not in same and readers.issuperset(reader for reader, _ in node.outputs[0].uses())]
    return {*same, *alike}


def _is_computed(node: ir.Node) -> bool:
    """Whether the output has a name that the exporter made up: it is no parameter of the module, but computed from some."""
    return _COMPUTED.fullmatch(node.outputs[0].name or "") is not None


def _differs(node: ir.Node) -> bool:
    """Whether the elements of a merged weight differ among each other."""
    array = None if node.inputs[0] is None else constant_array(node.inputs[0])
    return array is not None and array.size > 1 and bool((array != array.flat[0]).any())


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
