"""What PyTorch's exporter (``dynamo=True``) notes beside a tensor: whether it was a parameter, and what it was computed from.

A model that is exported with the exporter's optimizer holds tensors that were computed ahead of time. The notes say which of
these are weights: a table of positions, a mask or a grid is none, and a transposed weight is one.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, constant_array
from burnish.graph.uses import replace_uses
from burnish.importer.folded_normalization import says_folded
from burnish.untrusted import UNREADABLE

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
