"""Parameters as a module had them, of what exporters note beside tensors, name, merge and fold.

A model that is exported with the optimizer of the newer exporter (``dynamo=True``) holds tensors that were computed ahead of
time. It notes beside a tensor whether it was a parameter, and what it was computed from. The notes say which tensors are weights:
a table of positions, a mask or a grid is none, and a transposed weight is one.

Parameters that an exporter merged because they were equal become separate again. At initialization many parameters are equal
(scales of one, biases of zero). The TorchScript exporter then writes one initializer, and ``Identity`` nodes on it whose outputs
carry the names of the others. A model that shares a weight on purpose has one initializer with several consumers, and no
Identity; but a weight that the exporter computes ahead of time, such as a transposed one, it computes for each call of the layer,
and merges in the same way, under names of its own.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder
from burnish.graph.annotations import FOLDED, OF_MODULE
from burnish.graph.constants import add_initializer, constant_array, replace_by_initializer
from burnish.graph.names import Names
from burnish.graph.uses import producer_of, remove_node, replace_uses
from burnish.importer.operands import STATISTIC_OPERANDS
from burnish.untrusted_files import UNREADABLE

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
CALL = "pkg.torch.onnx.fx_node"
COMPUTED_FROM = "pkg.onnxscript.optimizer.folded_from"

PARAMETER = "PARAMETER"
_REARRANGES = re.compile(
    r"(val|zeros|ones|full|arange|t|numpy_t|permute|transpose|view|_unsafe_view|reshape|unsqueeze|squeeze|clone|alias|detach)(_\d+)?"
)
"""What the exporter calls values inside of an operator of the module, constants, and what only has elements in another order."""
_TOKEN = re.compile(r"%(\w+)")
_BIASED = ("Gemm", "Conv", "ConvTranspose")
"""Operators whose third input is a bias of the second axis of what they give."""
_ENTRY = re.compile(r"^(\S+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']*)'", re.MULTILINE)


def is_no_parameter(value: ir.Value, kinds: Mapping[str, str]) -> bool:
    """Whether the exporter says that an initializer was no parameter, nor computed from one; False where it is silent.

    Args:
        value: the initializer.
        kinds: what ``noted_kinds`` gives.
    """
    kind = value.metadata_props.get(KIND) or kinds.get(value.name or "")
    if kind is not None:
        return kind != PARAMETER
    sources = _sources(value)
    return bool(kinds) and bool(sources) and not any(kinds.get(source) == PARAMETER for source in sources)


def is_parameter(value: ir.Value, kinds: Mapping[str, str]) -> bool:
    """Whether the exporter says that an initializer was a parameter."""
    return (value.metadata_props.get(KIND) or kinds.get(value.name or "")) == PARAMETER


def noted_kinds(graph: ir.Graph) -> dict[str, str]:
    """Return the kind of each tensor of the exported module, by its name in the module and by that in the exported graph."""
    return {name: kind for node, kind, target in _entries(graph) for name in (node, target)}


def _entries(graph: ir.Graph) -> list[tuple[str, str, str]]:
    """Name in the exported graph, kind and name in the module of each tensor that the signature lists."""
    return _ENTRY.findall(graph.metadata_props.get(SIGNATURE, ""))


def missing_parameters(graph: ir.Graph) -> set[str]:
    """Return the parameters of the exported module that neither are initializers nor were computed into one."""
    computed = {source for value in graph.initializers.values() for source in _sources(value)}
    targets = {target for _, kind, target in _entries(graph) if kind == PARAMETER}
    return targets.difference(graph.initializers, computed)


def lost_parameters(graph: ir.Graph) -> list[str]:
    """Return the parameters that an operator of the exported module reads, and its nodes in the model do not.

    Those of a batch normalization that was folded are left out, as ``folded_layers`` tells of them. Of a parameter that no
    operator names nothing is known: the module may not use it, or have it by two names.
    """
    missing = missing_parameters(graph)
    targets = {node: target for node, kind, target in _entries(graph) if kind == PARAMETER}
    named = {
        targets.get(token)
        for node in (graph.all_nodes() if missing else ())
        if not says_folded(node)
        for token in _TOKEN.findall(node.metadata_props.get(CALL, ""))
    }
    return sorted(missing.intersection(named))


def parameters_behind(value: ir.Value, kinds: Mapping[str, str]) -> list[str]:
    """Return the parameters that the exporter computed an initializer from; none where it only put elements in another order.

    Args:
        value: the initializer.
        kinds: what ``noted_kinds`` gives.
    """
    sources = _sources(value)
    passed = (value.name or "", *(source for source in sources if source not in kinds))
    if all(_REARRANGES.fullmatch(name) for name in passed):
        return []
    return [source for source in sources if kinds.get(source) == PARAMETER]


def tie_copies(model: ir.Model) -> bool:
    """Let what reads a copy of a weight that the exporter made, as it is or transposed, read the weight, in place.

    A language model's head that shares the table of its embedding comes as a table and a transposed copy, which would train as
    two weights.

    Returns:
        Whether there was any.
    """
    graph = model.graph
    first = next(iter(graph), None)
    has_tied = False
    for name, copied in list(graph.initializers.items()):
        sources = _sources(copied)
        source = graph.initializers.get(sources[0]) if len(sources) == 1 else None
        if source is None or source is copied or copied.is_graph_output() or not source.uses() or not copied.uses():
            continue
        perm = _order_of(source, copied)
        if perm is None:
            continue
        builder = Builder(graph, before=first)
        tensor = builder.tensor(source)
        replace_uses(copied, (builder.op("Transpose", tensor, perm=perm) if perm else tensor).value)
        del graph.initializers[name]
        has_tied = True
    return has_tied


def restore_parameters(model: ir.Model) -> bool:
    """Give each parameter that the exporter merged with an equal one, or left out, an initializer of its own again, in place.

    Scales of one and biases of zero are equal in all layers of a fresh model, and the zeros are no longer added after a product.
    A node notes the call of the module that it is a part of, with the parameters that the call reads: where the nodes of a call
    read as many, they are the same in order.

    Returns:
        Whether there was any.
    """
    graph = model.graph
    kinds = noted_kinds(graph)
    missing = missing_parameters(graph)
    if not missing:
        return False
    targets = {node: target for node, kind, target in _entries(graph) if kind == PARAMETER}
    calls: dict[str, list[ir.Node]] = defaultdict(list)
    for node in graph:
        if call := node.metadata_props.get(CALL):
            calls[call].append(node)
    restored: dict[str, ir.Value] = {}
    for call, nodes in calls.items():
        if any(map(says_folded, nodes)):
            continue  # The layer's own weights stand where those of the batch normalization were.
        operands = [_Operand(node, place) for node in nodes for place, value in enumerate(node.inputs) if value]
        named = dict.fromkeys(targets[token] for token in _TOKEN.findall(call) if token in targets)
        read = [operand for operand in operands if operand.value.is_initializer() and kinds.get(operand.name) == PARAMETER]
        # Parameters of other calls stand for those of this one that were merged with them; its own may be read several times.
        standing_in = [operand for operand in read if operand.name not in named]
        absent = [name for name in named if name in missing]
        if len(standing_in) == len(absent):
            for operand, name in zip(standing_in, absent, strict=True):
                operand.replace(restored.setdefault(name, _initializer(name, operand.value.const_value)))
        elif not standing_in and len(absent) == 1:
            _add_bias(nodes, absent[0], restored)
    for name, value in restored.items():
        graph.initializers[name] = value
    return bool(restored)


class _Operand(NamedTuple):
    """An input of a node that is there."""

    node: ir.Node
    place: int

    @property
    def value(self) -> ir.Value:
        value = self.node.inputs[self.place]
        assert value is not None
        return value

    @property
    def name(self) -> str:
        return self.value.name or ""

    def replace(self, value: ir.Value) -> None:
        self.node.replace_input_with(self.place, value)


def _add_bias(nodes: list[ir.Node], name: str, restored: dict[str, ir.Value]) -> None:
    """Add zeros to the one product or convolution of a call, whose bias was left out because it is zero."""
    products = [node for node in nodes if node.op_type in _BIASED and node.domain == "" and len(node.inputs) == 2]
    if len(products) != 1 or products[0].outputs[0].shape is None or products[0].outputs[0].dtype is None:
        return
    output = products[0].outputs[0]
    channels = output.shape[1]  # type: ignore[index]
    if isinstance(channels, int):
        zeros = ir.Tensor(np.zeros(channels, output.dtype.numpy()))  # type: ignore[union-attr]
        products[0].resize_inputs(3)
        products[0].replace_input_with(2, restored.setdefault(name, _initializer(name, zeros)))


def _initializer(name: str, tensor: ir.TensorProtocol | None) -> ir.Value:
    """An initializer over a tensor that another may share: nothing writes to a tensor of a model."""
    assert tensor is not None
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    value.metadata_props[KIND] = PARAMETER
    return value


def _order_of(source: ir.Value, copied: ir.Value) -> list[int] | None:
    """The order of axes that makes one tensor of the other, empty where it is the same; None where it is another one."""
    original, copy = constant_array(source), constant_array(copied)
    if original is None or copy is None or original.dtype != copy.dtype or original.size != copy.size:
        return None
    if original.shape == copy.shape and np.array_equal(original, copy):
        return []
    return [1, 0] if original.ndim == 2 and original.T.shape == copy.shape and np.array_equal(original.T, copy) else None


def _sources(value: ir.Value) -> list[str]:
    """The names that the exporter's optimizer computed an initializer from."""
    try:
        sources = ast.literal_eval(value.metadata_props.get(COMPUTED_FROM, "[]"))
    except (SyntaxError, *UNREADABLE):
        return []
    return [source for source in sources if isinstance(source, str)] if isinstance(sources, list) else []


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
    for name, value in () if OF_MODULE.is_on(graph) else list(graph.initializers.items()):
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


_RULES = "pkg.onnxscript.rewriter.rule_name"
_RULE = "FuseBatchNormInto"
_COMPUTED_AHEAD = re.compile(r"onnx::Conv_\d+")
"""What PyTorch's older exporter calls the operands of a convolution that it computed; parameters keep their own names."""
_RUNTIME_PREFIX = "ConvBnFusion_"
_TENSORFLOW_BIAS = re.compile(r".*(/batchnorm/sub|_bias_fused_bn)(:0)?")
"""The bias that TensorFlow's graph optimizer leaves of Keras' layer, beta - mean * scale, and what tf2onnx calls its own."""
_AUTHORS_WHO_FOLD = frozenset({"Ultralytics"})
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def folded_layers(model: ir.Model) -> dict[str, str]:
    """Return the layers that hold a folded batch normalization: weight's name -> bias's name, empty where there is none.

    Known are the files of both exporters of PyTorch, TensorFlow, tf2onnx, ONNX Runtime's optimizer, Ultralytics and burnish. Of a
    file that says nothing nothing is said: a network that was built without normalization looks the same. A layer that is
    followed by batch normalization has got a new one since.

    Args:
        model: a canonical model.
    """
    author = model.metadata_props.get("author")
    layers: dict[str, str] = {}
    for node in model.graph.all_nodes():
        if node.domain != "" or node.op_type not in _LAYERS or len(node.inputs) < 2 or _is_normalized(node):
            continue
        names = [_initializer_name(value) for value in node.inputs[1:3]]
        if names[0] and (says_folded(node) or _is_named_so(names) or _is_of_author(node, names, author)):
            layers[names[0]] = names[1] if len(names) > 1 else ""
    return layers


def says_folded(node: ir.Node) -> bool:
    """Whether a note at a node says that a batch normalization was folded into it."""
    return FOLDED.is_on(node) or _RULE in node.metadata_props.get(_RULES, "")


def _is_named_so(names: list[str]) -> bool:
    computed = all(_COMPUTED_AHEAD.fullmatch(name) for name in names)
    if len(names) != 2:
        return False
    return computed or all(name.startswith(_RUNTIME_PREFIX) for name in names) or bool(_TENSORFLOW_BIAS.fullmatch(names[1]))


def _is_of_author(node: ir.Node, names: list[str], author: str | None) -> bool:
    """Whether a convolution has the bias of one that was folded, in a file of those who fold all before they export."""
    return author in _AUTHORS_WHO_FOLD and node.op_type == "Conv" and len(names) == 2 and bool(names[1])


def _initializer_name(value: ir.Value | None) -> str:
    """The name of an operand that is an initializer, or one that is transposed; else nothing."""
    while value is not None and (producer := producer_of(value, "Transpose", "Identity", "Reshape")) is not None:
        value = producer.inputs[0]
    return value.name or "" if value is not None and value.is_initializer() else ""


def _is_normalized(node: ir.Node) -> bool:
    return any(user.op_type == "BatchNormalization" for user in node.outputs[0].consumers())
