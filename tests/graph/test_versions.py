"""Nodes in other opsets: which keep their meaning, and what is the oldest one they are valid in."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from burnish.graph.versions import keeps_meaning, oldest_opset, raise_opset


def model(body: str, opset: int, dtype: str = "float") -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g ({dtype}[1, 4, 8, 8] x) => (y) {{ {body} }}')
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def last(found: ir.Model) -> ir.Node:
    return list(found.graph)[-1]


@pytest.mark.parametrize(
    ("body", "opset", "newer", "expected"),
    [
        ("y = Conv(x, x)", 18, 23, True),
        ("y = Relu(x)", 18, 23, True),
        ("y = Cast<to=1>(x)", 18, 23, True),
        ("y = AveragePool<kernel_shape=[2, 2]>(x)", 18, 23, True),
        ("y = AveragePool<kernel_shape=[2, 2], ceil_mode=1>(x)", 18, 19, False),
        ("y = AveragePool<kernel_shape=[2, 2], ceil_mode=1>(x)", 19, 23, True),
        ("y = GridSample(x, x)", 18, 19, True),
        ("y = GridSample(x, x)", 18, 20, False),
        ("y = DFT(x)", 18, 20, False),
        ("y = GroupNormalization<num_groups=2>(x, x, x)", 18, 21, False),
        ("y = GroupNormalization<num_groups=2>(x, x, x)", 21, 23, True),
        ("y = RMSNormalization(x, x)", 18, 23, False),
        ('y = Pad<mode="wrap">(x, x)', 18, 19, False),
        ("y = Cast<to=18>(x)", 23, 24, False),
        ("y = Cast<to=17>(x)", 23, 24, True),
        ("y = Mod(x, x)", 27, 28, False),
        ("y = Mod<fmod=1>(x, x)", 27, 28, True),
    ],
)
def test_meaning(body: str, opset: int, newer: int, expected: bool) -> None:
    node = last(
        ir.from_proto(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g (float[4] x) => (y) {{ {body} }}'))
    )
    assert keeps_meaning(node, opset, newer) == expected


def test_nodes_of_other_domains_are_as_they_are() -> None:
    assert keeps_meaning(ir.node("Anything", [], domain="vendor"), 18, 23)


def test_a_model_is_raised_whole_or_not_at_all() -> None:
    found = model("z = Relu(x) y = Softmax(z)", 18)
    assert raise_opset(found.graph, 21)
    assert found.opset_imports[""] == 21
    assert raise_opset(found.graph, 20)
    assert found.opset_imports[""] == 21
    held = model("z = AveragePool<kernel_shape=[2, 2], ceil_mode=1>(x) y = Relu(z)", 18)
    assert not raise_opset(held.graph, 21)
    assert held.opset_imports[""] == 18


@pytest.mark.parametrize(
    ("body", "opset", "dtype", "expected"),
    [
        ("y = Relu(x)", 23, "float", 18),
        ("y = Identity(x)", 23, "float", 18),
        ("y = GlobalAveragePool(x)", 22, "float", 18),
        ("y = GlobalAveragePool(x)", 22, "bfloat16", 22),
        ("y = Gelu(x)", 23, "float", 20),
        ("y = Cast<to=10>(x)", 21, "float", 18),
        ("y = Cast<to=10, saturate=1>(x)", 21, "float", 19),
        ("y = RMSNormalization(x, x)", 23, "float", 23),
        ("y = AveragePool<kernel_shape=[2, 2], ceil_mode=1>(x)", 22, "float", 19),
        ("y = Concat<axis=0>(x, x, x)", 23, "float", 18),
    ],
)
def test_oldest_opset(body: str, opset: int, dtype: str, expected: int) -> None:
    found = model(body, opset, dtype)
    found.graph.outputs[0].type = last(found).outputs[0].type or ir.TensorType(ir.DataType.FLOAT)
    assert oldest_opset(last(found), opset, 18) == expected
