"""LSTM, GRU and RNN as they stand in graphs that evaluate and predict: a module of what they become in training."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from burnish.engines.torch.translate.rules import Call, translates
from burnish.engines.torch.translate.translation import Translator
from burnish.errors import EngineError
from burnish.graph import describe_node
from burnish.rewriting import expand_recurrent_layers


@translates("GRU", "LSTM", "RNN", since=7)
def recurrent_layer(op: Call) -> Any:
    layer = op.node
    read = dict.fromkeys(value for value in layer.inputs if value is not None)
    own = {value: ir.Value(name=f"in{index}", type=value.type, shape=value.shape) for index, value in enumerate(read)}
    operands = [None if value is None else own[value] for value in layer.inputs]
    node = ir.Node("", layer.op_type, operands, list(layer.attributes.values()), num_outputs=len(layer.outputs))
    for inner, outer in zip(node.outputs, layer.outputs, strict=True):
        inner.type, inner.shape = outer.type, outer.shape
    outputs = [index for index, output in enumerate(layer.outputs) if output.uses() or output.is_graph_output()]
    body = ir.Graph(
        list(own.values()),
        [node.outputs[index] for index in outputs],
        nodes=[node],
        name=f"{layer.op_type}_{layer.name or ''}",
        opset_imports={"": op.opset},
    )
    expanded = expand_recurrent_layers(ir.Model(body, ir_version=10)).graph
    if any(inner.op_type == layer.op_type for inner in expanded):
        raise EngineError(
            f"{describe_node(layer)} has clip, input_forget=1 or an activation that the torch engine has no form for: "
            "use engine='onnxruntime'"
        )
    module = Translator(expanded, op.opset, op.device).translated()
    results = op.module(module, list(read))
    found = {index: results[position] for position, index in enumerate(outputs)}
    return tuple(found.get(index) for index in range(len(layer.outputs)))
