"""Parameters that an exporter merged because they were equal become separate again.

At initialization many parameters are equal (scales of one, biases of zero). The TorchScript exporter then writes one
initializer, and ``Identity`` nodes on it whose outputs carry the names of the others. A model that shares a weight on purpose
has one initializer with several consumers, and no Identity; but a weight that the exporter computes ahead of time, such as a
transposed one, it computes for each call of the layer, and merges in the same way, under names of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping

import onnx_ir as ir

from burnish.graph.constants import add_initializer, constant_array, replace_by_initializer
from burnish.graph.names import Names
from burnish.graph.uses import remove_node, replace_uses
from burnish.importer.operands import OF_MODULE, STATISTIC_OPERANDS

_COMPUTED = re.compile(r"onnx::\w+_\d+")
_NUMBER_OF_CALL = re.compile(r"_\d+$")


def untie_parameters(model: ir.Model) -> bool:
    """Replace, in place, ``Identity(initializer)`` nodes whose output has a name of its own by initializers of that name.

    Where a layer is called twice, and the exporter computed its weight for each call, both calls read one weight. An initializer
    that only one Identity reads was merged with nothing, and keeps its own name.

    Returns:
        Whether there was any.
    """
    graph = model.graph
    merged = _merged(graph)
    modules = {_module_and_name(node)[0] for node in graph.all_nodes()}
    layers = {value: _layer_of(value, merged, modules) for value in (*merged, *merged.values()) if is_computed(value)}
    weights = {layers[source]: source for source in merged.values() if source in layers}
    read = Counter(merged.values())
    for output, source in merged.items():
        node, layer = output.producer(), layers.get(output)
        assert node is not None
        is_alone = len(source.uses()) == 1 and read[source] == 1
        if is_alone or (layer is not None and layer in weights):
            replace_uses(output, source if is_alone or layer is None else weights[layer])
            remove_node(node)
            continue
        tensor = source.const_value
        assert tensor is not None
        separate = replace_by_initializer(graph, node, ir.Tensor(tensor.numpy().copy(), tensor.dtype))
        if layer is not None:
            weights[layer] = separate
    return bool(merged)


def is_computed(weight: ir.Value) -> bool:
    """Whether a weight has a name that the exporter made up: it is no parameter of the module, but computed from some."""
    return _COMPUTED.fullmatch(weight.name or "") is not None


def _merged(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Return the outputs of ``Identity`` that were parameters, in order, and the initializer that each was merged into."""
    merged: dict[ir.Value, ir.Value] = {}
    for node in graph:
        operand = node.inputs[0] if node.op_type == "Identity" and node.domain == "" else None
        if operand is None or node.outputs[0].is_graph_output() or _names_the_operation(node):
            continue
        source = merged.get(operand, operand)
        if source.is_initializer() and source.const_value is not None and source.graph is graph:
            merged[node.outputs[0]] = source
    return merged


def _layer_of(weight: ir.Value, merged: Mapping[ir.Value, ir.Value], modules: Collection[str | None]) -> Hashable:
    """Return what tells a computed weight from others that are merged with it: it is the same for all calls of one layer.

    The exporter names nodes after the module in whose call they stand. Numbers that differ among each other are equal where a
    module is called again, and in copies of one that was not trained yet. Of numbers that are all alike, as biases of zero, the
    other weights of their reader have to be the same, too.

    Args:
        weight: one that was merged, or that others were merged into.
        merged: as ``_merged`` returns it.
        modules: that nodes are named after.
    """
    source = merged.get(weight, weight)
    reader = next((reader for reader, _ in weight.uses() if reader.outputs[0] not in merged), None)
    module, name = (None, "") if reader is None else _module_and_name(reader)
    first_call = None if module is None else _NUMBER_OF_CALL.sub("", module)
    called = first_call if first_call in modules else module
    if _differs(source):
        return source, called
    operands = () if reader is None else (merged.get(value, value) for value in reader.inputs if value is not None)
    beside = tuple(value for value in operands if value.is_initializer() and _differs(value))
    return source, called, name, beside, None if beside else reader


def _module_and_name(node: ir.Node) -> tuple[str | None, str]:
    """The module that a node is named after, and what it is called there; no module where the name says none."""
    module, slash, name = (node.name or "").rpartition("/")
    return (module, name) if slash else (None, "")


def _differs(weight: ir.Value) -> bool:
    """Whether the elements of a weight differ among each other."""
    array = constant_array(weight)
    return array is not None and array.size > 1 and bool((array != array.flat[0]).any())


def separate_statistics(model: ir.Model) -> bool:
    """Give running statistics initializers of their own, in place, where another layer, or a scale or bias, has the same one.

    In a fresh model the running means and biases are zero, and the running variances and scales are one; an optimizer of graphs
    that keeps equal tensors once makes one initializer of them. Training moves each in its own way. An initializer whose
    elements differ was merged with no scale or bias: what reads it beside a layer's statistics means the statistics. Layers with
    the same scale and bias are one layer that is called several times, and share their statistics.

    Returns:
        Whether there was any.
    """
    graph = model.graph
    names = Names.of(graph)
    separated = _separate_layers(graph, names)
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


def _separate_layers(graph: ir.Graph, names: Names) -> bool:
    """Give each layer after the first that reads a fresh running statistic one of its own, in place.

    Statistics that were updated differ from channel to channel. Layers that read the same ones of these keep them
    (``shared_statistics``).
    """
    separated = False
    for name, layers in _layers_by_statistic(graph):
        array = constant_array(graph.initializers[name])
        if array is None or _differs(graph.initializers[name]):
            continue
        for places in layers[1:]:
            own = add_initializer(graph, names.take(f"{name}_statistic"), array.copy())
            for node, index in places:
                node.replace_input_with(index, own)
        separated = True
    return separated


def shared_statistics(model: ir.Model) -> dict[str, int]:
    """Return the running statistics that layers with scales or biases of their own share, and how many layers."""
    return {name: len(layers) for name, layers in _layers_by_statistic(model.graph)}


def _layers_by_statistic(graph: ir.Graph) -> Iterator[tuple[str, list[list[tuple[ir.Node, int]]]]]:
    """Give the running statistics of several layers, with the operands of each layer that are such a statistic."""
    # A module has each buffer by its own name, and a layer that shares one does so on purpose.
    for name, value in () if OF_MODULE in graph.meta else list(graph.initializers.items()):
        layers: dict[Hashable, list[tuple[ir.Node, int]]] = {}
        for node, index in value.uses():
            if _is_statistic(node, index):
                layers.setdefault(tuple(map(_identity, node.inputs[1:3])), []).append((node, index))
        if len(layers) > 1:
            yield name, list(layers.values())


def _identity(operand: ir.Value | None) -> Hashable:
    """What tells a scale or bias from others: itself, or the numbers that a layer without one has in its place."""
    array = None if operand is None or operand.is_initializer() else constant_array(operand)
    return operand if array is None else array.tobytes()


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
