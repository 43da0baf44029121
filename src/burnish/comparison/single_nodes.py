"""Models of a single node, with its input arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from burnish.graph import constant_array
from burnish.graph.uses import read_by


def single_node_model(node: ir.Node, values: Mapping[str, np.ndarray]) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """Return a model of one node, and its inputs.

    Constants stay constants; all other values, including those a body reads from outside, become inputs of static shape. All
    named outputs become outputs.

    Args:
        node: a node of a graph with known dtypes.
        values: the values that it reads, by name.

    Raises:
        KeyError: a value is missing.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    read: dict[str, ir.Value] = {value.name or "": value for value in read_by(node)}
    inputs, constants, feeds = [], [], {}
    for name, value in read.items():
        array = constant_array(value)
        if array is not None:
            constants.append(_renamed(ir.to_proto(ir.tensor(array)), name))
            continue
        feeds[name] = np.asarray(values[name])
        inputs.append(_described(value, list(feeds[name].shape)))
    typed = [value for value in node.outputs if value.name and value.dtype is not None]
    outputs = [_described(value, None) for value in typed]
    proto = onnx.GraphProto(name="node", node=[ir.to_proto(node)], input=inputs, output=outputs, initializer=constants)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in graph.opset_imports.items()]
    model = ir.from_proto(onnx.helper.make_model(proto, opset_imports=opsets, ir_version=10))
    for declared, original in zip(typed, model.graph.outputs, strict=True):
        original.shape = None if declared.shape is None else ir.Shape(declared.shape.dims)
    return model, feeds


def _described(value: ir.Value, shape: list[int] | None) -> onnx.ValueInfoProto:
    assert value.dtype is not None
    return onnx.helper.make_tensor_value_info(value.name or "", int(value.dtype), shape)


def _renamed(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    tensor.name = name
    return tensor
