"""Another model inside of the graph under construction: a loss that comes as one, or a teacher."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.graph.versions import keeps_meaning, oldest_opset, raise_opset


def inlined(model: ir.Model, builder: Builder, inputs: Mapping[str, Tensor], what: str) -> tuple[Tensor, ...]:
    """Emit a copy of a model's nodes, reading ``inputs`` in place of its own; its initializers become constants.

    Args:
        model: a canonical model; it stays as it is.
        builder: of the graph, which declares the model's opset where that is newer and a node needs it.
        inputs: a tensor for each input of the model, by name.
        what: the model in an error: ``onnx: the loss graph``.

    Returns:
        Its outputs, in order.

    Raises:
        ConfigurationError: an operator means another thing in the opset of the graph.
    """
    copy = model.clone()
    theirs, ours = copy.opset_imports[""], builder.opset
    nodes = copy.graph.all_nodes()
    if theirs <= ours:
        changed = next((node for node in nodes if not keeps_meaning(node, theirs, ours)), None)
    else:
        changed = next((node for node in nodes if oldest_opset(node, theirs, ours) > ours), None)
    if changed is not None and not (theirs > ours and raise_opset(builder.graph, theirs)):
        raise ConfigurationError(
            f"{what} is of opset {theirs} and the model of opset {ours}, and {changed.op_type} changed between "
            "them: export both with the same opset"
        )
    outputs = list(copy.graph.outputs)
    copy.graph.outputs.clear()
    replaced = {value: inputs[value.name or ""] for value in copy.graph.inputs}
    for value in copy.graph.initializers.values():
        assert value.const_value is not None
        replaced[value] = builder.constant(value.const_value.numpy())
    for value, tensor in replaced.items():
        value.replace_all_uses_with(tensor.value)
    for node in list(copy.graph):
        copy.graph.remove(node)
        node.name = None
        for value in node.outputs:
            value.name = None
        builder.graph.append(node)
        builder.graph.opset_imports.setdefault(node.domain, copy.opset_imports.get(node.domain, 1))
    return tuple(replaced.get(output) or builder.tensor(output) for output in outputs)
