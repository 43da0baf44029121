"""Initializers that were Constant nodes before a simplifier came are weights where a layer reads them as such, and else not."""

from __future__ import annotations

import onnx
import pytest

from burnish.importer import InitializerKind, classify_initializers, load

TEXT = """
<ir_version: 8, opset_import: ["": 18]>
head (float[N, 2] x) => (float[N, 2] y)
<float[2, 2] FIRST = {1, 0, 0, 1}, float[2] SECOND = {1, 2}> {
    turned = Transpose <perm = [1, 0]> (FIRST)
    h = MatMul(x, turned)
    activated = Relu(h)
    y = Mul(activated, SECOND)
}"""


@pytest.mark.parametrize(
    ("name", "kind", "producer"),
    [
        ("/head/Constant_3_output_0", InitializerKind.CONSTANT, "pytorch"),
        ("Constant_output_0", InitializerKind.CONSTANT, ""),
        ("head.scale", InitializerKind.WEIGHT, "pytorch"),
        ("Constant_output_0.scale", InitializerKind.WEIGHT, "pytorch"),
        ("model/attention/mul/y:0", InitializerKind.CONSTANT, "tf2onnx"),
        ("model/scale/Const_2:0", InitializerKind.CONSTANT, "tf2onnx"),
        ("model/scale/mul/ReadVariableOp:0", InitializerKind.WEIGHT, "tf2onnx"),
        ("model/attention/mul/y:0", InitializerKind.WEIGHT, "pytorch"),
    ],
)
def test_what_a_name_says(name: str, kind: InitializerKind, producer: str) -> None:
    proto = onnx.parser.parse_model(TEXT)
    proto.producer_name = producer
    renamed = {"FIRST": "/layer/Constant_1_output_0", "SECOND": name}
    for tensor in proto.graph.initializer:
        tensor.name = renamed[tensor.name]
    for node in proto.graph.node:
        node.input[:] = [renamed.get(operand, operand) for operand in node.input]
    kinds = classify_initializers(load(proto))
    assert kinds[name] is kind
    assert kinds["/layer/Constant_1_output_0"] is InitializerKind.WEIGHT
