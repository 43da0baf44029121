"""Original parameters of a PyTorch module, from the metadata and names of exporters.

The optimizer of the newer exporter (``dynamo=True``) precomputes tensors, and records which were parameters and from which others
were computed. So a transposed weight is a weight, but a table of positions, a mask or a grid is none.

Merged parameters are separated again. In a fresh model many are equal (scales of one, biases of zero): the TorchScript exporter
then writes one initializer, and ``Identity`` nodes with the other names. A deliberately shared weight is one initializer with
several consumers. But precomputed weights, such as transposed ones, exist per call of a layer and are merged too, under generated
names.
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
"""Names that the exporter gives to intermediate values, constants, and rearranged tensors."""
_TOKEN = re.compile(r"%(\w+)")
_BIASED = ("Gemm", "Conv", "ConvTranspose")
"""Operators whose third input is a bias along the second axis of the result."""
_ENTRY = re.compile(r"^(\S+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']*)'", re.MULTILINE)


def is_no_parameter(value: ir.Value, kinds: Mapping[str, str]) -> bool:
    """True if the exporter recorded that an initializer was no parameter and not computed from one; False without a record.

    Args:
        value: the initializer.
        kinds: the result of ``noted_kinds``.
    """
    kind = value.metadata_props.get(KIND) or kinds.get(value.name or "")
    if kind is not None:
        return kind != PARAMETER
    sources = _sources(value)
    return bool(kinds) and bool(sources) and not any(kinds.get(source) == PARAMETER for source in sources)


def is_parameter(value: ir.Value, kinds: Mapping[str, str]) -> bool:
    """True if the exporter recorded an initializer as a parameter."""
    return (value.metadata_props.get(KIND) or kinds.get(value.name or "")) == PARAMETER


def noted_kinds(graph: ir.Graph) -> dict[str, str]:
    """Return the kind of each tensor of the exported module, by its name in the module and in the exported graph."""
    return {name: kind for node, kind, target in _entries(graph) for name in (node, target)}


def _entries(graph: ir.Graph) -> list[tuple[str, str, str]]:
    return _ENTRY.findall(graph.metadata_props.get(SIGNATURE, ""))


def missing_parameters(graph: ir.Graph) -> set[str]:
    """Return the parameters of the exported module that no initializer is or was computed from."""
    computed = {source for value in graph.initializers.values() for source in _sources(value)}
    targets = {target for _, kind, target in _entries(graph) if kind == PARAMETER}
    return targets.difference(graph.initializers, computed)


def lost_parameters(graph: ir.Graph) -> list[str]:
    """Return the parameters that the exported module reads but its nodes in the model do not.

    Parameters of folded batch normalizations are excluded, see ``folded_layers``. Nothing is known about a parameter that no
    operator names: the module may not use it, or have it under two names.
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
    """Return the parameters that an initializer was computed from; empty if the exporter only rearranged elements.

    Args:
        value: the initializer.
        kinds: the result of ``noted_kinds``.
    """
    sources = _sources(value)
    passed = (value.name or "", *(source for source in sources if source not in kinds))
    if all(_REARRANGES.fullmatch(name) for name in passed):
        return []
    return [source for source in sources if kinds.get(source) == PARAMETER]


def tie_copies(model: ir.Model) -> bool:
    """Connect readers of a copied or transposed weight to the original, in place.

    A language model's head that shares its embedding's table is exported as the table and a transposed copy, which would train as
    two weights.

    Returns:
        True if there were any.
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
    """Restore initializers of parameters that the exporter merged with equal ones or dropped, in place.

    In a fresh model, scales of one and biases of zero are equal in all layers, and the zeros are not even added. Each node
    records its module call with the parameters that the call reads. If the call's nodes read equally many, they correspond in
    order.

    Returns:
        True if there were any.
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
            continue  # the layer's own weights replaced those of the batch normalization
        operands = [_Operand(node, place) for node in nodes for place, value in enumerate(node.inputs) if value]
        named = dict.fromkeys(targets[token] for token in _TOKEN.findall(call) if token in targets)
        read = [operand for operand in operands if operand.value.is_initializer() and kinds.get(operand.name) == PARAMETER]
        # Parameters of other calls are substitutes for merged ones; the call's own may be read several times.
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
    """Return an initializer with a tensor that may be shared: tensors of a model are never written to."""
    assert tensor is not None
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    value.metadata_props[KIND] = PARAMETER
    return value


def _order_of(source: ir.Value, copied: ir.Value) -> list[int] | None:
    original, copy = constant_array(source), constant_array(copied)
    if original is None or copy is None or original.dtype != copy.dtype or original.size != copy.size:
        return None
    if original.shape == copy.shape and np.array_equal(original, copy):
        return []
    return [1, 0] if original.ndim == 2 and original.T.shape == copy.shape and np.array_equal(original.T, copy) else None


def _sources(value: ir.Value) -> list[str]:
    try:
        sources = ast.literal_eval(value.metadata_props.get(COMPUTED_FROM, "[]"))
    except (SyntaxError, *UNREADABLE):
        return []
    return [source for source in sources if isinstance(source, str)] if isinstance(sources, list) else []


_COMPUTED = re.compile(r"onnx::\w+_\d+")
_NUMBER_OF_CALL = re.compile(r"_\d+$")


def untie_parameters(model: ir.Model) -> bool:
    """Replace, in place, ``Identity(initializer)`` nodes by initializers with the names of their outputs.

    If a layer is called twice and its weight was precomputed per call, both calls read one weight. An initializer read by only
    one Identity was not merged and keeps its name.

    Returns:
        True if there were any.
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
    """True if a weight has a generated name: it is no parameter of the module, but computed from some."""
    return _COMPUTED.fullmatch(weight.name or "") is not None


def _merged(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
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
    """Return a key that is equal for a computed weight in all calls of one layer.

    The exporter names nodes after the module of the call. Equal weights with varying elements belong to repeated calls of one
    module, or to copies of an untrained one. For uniform weights, such as zero biases, the reader's other weights must be equal
    too.

    Args:
        weight: a merged weight, or one that others were merged into.
        merged: the result of ``_merged``.
        modules: the modules in node names.
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
    module, slash, name = (node.name or "").rpartition("/")
    return (module, name) if slash else (None, "")


def _differs(weight: ir.Value) -> bool:
    array = constant_array(weight)
    return array is not None and array.size > 1 and bool((array != array.flat[0]).any())


def separate_statistics(model: ir.Model) -> bool:
    """Give running statistics their own initializers, in place, if another layer or a scale or bias shares them.

    In a fresh model, running means and biases are zero, running variances and scales one, and a graph optimizer may store equal
    tensors once. But training changes each differently. An initializer with varying elements was not merged with a scale or bias:
    its other readers use the statistics. Layers with the same scale and bias are calls of one layer and share statistics.

    Returns:
        True if there were any.
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
    """Give each layer that reads a fresh running statistic, except the first, its own copy, in place.

    Updated statistics vary between channels; layers that read the same ones keep sharing them (``shared_statistics``).
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
    """Return the running statistics shared by layers with different scales or biases, and the number of layers."""
    return {name: len(layers) for name, layers in _layers_by_statistic(model.graph)}


def _layers_by_statistic(graph: ir.Graph) -> Iterator[tuple[str, list[list[tuple[ir.Node, int]]]]]:
    # In a module each buffer has its own name, so sharing is deliberate.
    for name, value in () if OF_MODULE.is_on(graph) else list(graph.initializers.items()):
        layers: dict[Hashable, list[tuple[ir.Node, int]]] = {}
        for node, index in value.uses():
            if _is_statistic(node, index):
                layers.setdefault(tuple(map(_identity, node.inputs[1:3])), []).append((node, index))
        if len(layers) > 1:
            yield name, list(layers.values())


def _identity(operand: ir.Value | None) -> Hashable:
    """Return a key for a scale or bias: the operand, or the numbers of a constant in its place."""
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
"""Operator -> indices of scales and biases, initially ones and zeros."""


def _is_parameter(node: ir.Node, index: int) -> bool:
    return node.domain == "" and index in _PARAMETERS.get(node.op_type, ())


def _is_statistic(node: ir.Node, index: int) -> bool:
    return node.domain == "" and index in STATISTIC_OPERANDS.get(node.op_type, ())


def _names_the_operation(node: ir.Node) -> bool:
    """True if the output is named after the node, as for a computation, and not after a parameter."""
    output = node.outputs[0].name or ""
    return bool(node.name) and output.startswith((f"{node.name}_output_", f"{node.name}:"))


_RULES = "pkg.onnxscript.rewriter.rule_name"
_RULE = "FuseBatchNormInto"
_COMPUTED_AHEAD = re.compile(r"onnx::Conv_\d+")
"""Names that PyTorch's older exporter gives to computed operands of a convolution; parameters keep their names."""
_RUNTIME_PREFIX = "ConvBnFusion_"
_TENSORFLOW_BIAS = re.compile(r".*(/batchnorm/sub|_bias_fused_bn)(:0)?")
"""Names of the folded bias, beta - mean * scale, by TensorFlow's graph optimizer (Keras' layer) and by tf2onnx."""
_AUTHORS_WHO_FOLD = frozenset({"Ultralytics"})
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def folded_layers(model: ir.Model) -> dict[str, str]:
    """Return the layers with a folded batch normalization: weight name -> bias name, empty without a bias.

    Recognizes files of both PyTorch exporters, TensorFlow, tf2onnx, ONNX Runtime's optimizer, Ultralytics and burnish. Without
    such traces a network built without normalization looks the same, so it is not reported. Nor is a layer followed by batch
    normalization: it got a new one since.

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
    """True if a node's metadata say that a batch normalization was folded into it."""
    return FOLDED.is_on(node) or _RULE in node.metadata_props.get(_RULES, "")


def _is_named_so(names: list[str]) -> bool:
    computed = all(_COMPUTED_AHEAD.fullmatch(name) for name in names)
    if len(names) != 2:
        return False
    return computed or all(name.startswith(_RUNTIME_PREFIX) for name in names) or bool(_TENSORFLOW_BIAS.fullmatch(names[1]))


def _is_of_author(node: ir.Node, names: list[str], author: str | None) -> bool:
    """True if a convolution has a bias and the file's author folds all batch normalization before exporting."""
    return author in _AUTHORS_WHO_FOLD and node.op_type == "Conv" and len(names) == 2 and bool(names[1])


def _initializer_name(value: ir.Value | None) -> str:
    while value is not None and (producer := producer_of(value, "Transpose", "Identity", "Reshape")) is not None:
        value = producer.inputs[0]
    return value.name or "" if value is not None and value.is_initializer() else ""


def _is_normalized(node: ir.Node) -> bool:
    return any(user.op_type == "BatchNormalization" for user in node.outputs[0].consumers())
