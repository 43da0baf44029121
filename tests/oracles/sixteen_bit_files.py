"""Files in float16 and bfloat16 as converters write them, made of files in float32."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from oracles import small_networks

SINGLE = onnx.TensorProto.FLOAT
CODES = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
NETWORKS = {"perceptron": small_networks.perceptron, "transformer": small_networks.transformer, "mobile": small_networks.mobile}
# What converters leave in float32, for its range or for want of kernels.
BLOCKED = {"perceptron": ("Tanh",), "transformer": ("Softmax", "LayerNormalization"), "mobile": ("BatchNormalization", "Clip")}


def array_in(dtype: str, array: np.ndarray) -> np.ndarray:
    """An array in a dtype that numpy may have no name for."""
    return array.astype(ir.DataType[dtype.upper()].numpy())


def tensor_in(dtype: str, array: np.ndarray, name: str) -> onnx.TensorProto:
    """A tensor of rounded numbers."""
    return ir.to_proto(ir.Tensor(array_in(dtype, array), name=name))


def converted(
    model: onnx.ModelProto, dtype: str, keep_io: bool = False, blocked: Collection[str] = (), scales: Collection[str] = ()
) -> onnx.ModelProto:
    """Return a model of float32 in sixteen bits: weights, constants and activations.

    Args:
        model: of one graph without bodies; left as it is.
        dtype: ``float16`` or ``bfloat16``.
        keep_io: whether inputs and outputs stay float32, with a Cast behind and before them.
        blocked: operators that stay in float32, between casts.
        scales: initializers that stay float32, such as the scales of Resize.
    """
    code = CODES[dtype]
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    floats = {value.name for value in values if value.type.tensor_type.elem_type == SINGLE}
    floats |= {tensor.name for tensor in inferred.initializer if tensor.data_type == SINGLE}
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    del graph.value_info[:]
    floats -= set(scales)
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.name in floats}
    for name, tensor in weights.items():
        tensor.CopyFrom(tensor_in(dtype, numpy_helper.to_array(tensor), name))
    nodes: list[onnx.NodeProto] = []
    narrow = {}
    for value in graph.input:
        if value.name in floats:
            if keep_io:
                narrow[value.name] = f"{value.name}_narrow"
                nodes.append(helper.make_node("Cast", [value.name], [narrow[value.name]], to=code))
            else:
                value.type.tensor_type.elem_type = code
    outputs = {value.name for value in graph.output if value.name in floats}
    for node in model.graph.node:
        own = onnx.NodeProto()
        own.CopyFrom(node)
        for attribute in own.attribute:
            if attribute.HasField("t") and attribute.t.data_type == SINGLE:
                attribute.t.CopyFrom(tensor_in(dtype, numpy_helper.to_array(attribute.t), attribute.t.name))
            elif attribute.name == "to" and attribute.i == SINGLE:
                attribute.i = code
        own.input[:] = [narrow.get(name, name) for name in node.input]
        if keep_io:
            own.output[:] = [f"{name}_narrow" if name in outputs else name for name in node.output]
        before, behind = [], []
        if node.op_type in blocked:
            for index, name in enumerate(node.input):
                if name in floats:
                    before.append(helper.make_node("Cast", [own.input[index]], [f"{node.name}_{index}"], to=SINGLE))
                    own.input[index] = f"{node.name}_{index}"
            for index, name in enumerate(node.output):
                if name in floats:
                    behind.append(helper.make_node("Cast", [f"{node.name}_out_{index}"], [own.output[index]], to=code))
                    own.output[index] = f"{node.name}_out_{index}"
        nodes += [*before, own, *behind]
    if keep_io:
        nodes += [helper.make_node("Cast", [f"{name}_narrow"], [name], to=SINGLE) for name in outputs]
    else:
        for value in graph.output:
            if value.name in outputs:
                value.type.tensor_type.elem_type = code
    del graph.node[:]
    graph.node.extend(nodes)
    for index, node in enumerate(graph.node):
        node.name = node.name or f"node_{index}"
    return result


def classifier(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], input_shape: list[int | str]) -> onnx.ModelProto:
    """A file in float16 from ``x`` to three logits ``y``."""
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", CODES["float16"], input_shape)],
        [helper.make_tensor_value_info("y", CODES["float16"], ["batch", 3])],
        [numpy_helper.from_array(array.astype(np.float16), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def single(network: str, dtype: str) -> onnx.ModelProto:
    """A file in float32 whose weights a dtype of sixteen bits holds."""
    proto = ir.to_proto(NETWORKS[network]())
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(array_in(dtype, array).astype(np.float32), tensor.name))
    return proto


def weights_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in ir.from_proto(proto).graph.initializers.items()}
