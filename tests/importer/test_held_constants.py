"""Constants that look like weights and are none: of attention, and those that simplifiers write."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import burnish
from burnish.importer import InitializerKind, classify_initializers, load

TEXT = """
<ir_version: 8, opset_import: ["": 18]>
attention (float[N, S, 4] x) => (float[N, S, 4] y)
<float[1] root = {0.8}, float[1] other = {0.5}, float[4, 4] w = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}> {
    q = MatMul(x, w)
    scaled = Mul(q, root)
    turned = Transpose <perm = [0, 2, 1]> (q)
    turned_scaled = Mul(KEY, turned)
    scores = MatMul(scaled, turned_scaled)
    p = Softmax(scores)
    y = MatMul(p, x)
}"""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).split(8, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("key", "kind"), [("root", InitializerKind.CONSTANT), ("other", InitializerKind.WEIGHT)])
def test_what_multiplies_queries_and_keys_alike(key: str, kind: InitializerKind) -> None:
    kinds = classify_initializers(load(onnx.parser.parse_model(TEXT.replace("KEY", key))))
    assert kinds["root"] is kind
    assert kinds["w"] is InitializerKind.WEIGHT


MASKED = """
<ir_version: 8, opset_import: ["": 18]>
masked (float[N, 2, 2] x) => (float[N, 2, 2] p)
<float[1, 2] kept = {0.0, NUMBER}, float[1] filler = {-10000.0}, bool[2] chosen = {1, 1}, int64[1] axis = {0},
 float[2, 2] bias = {0.5, 0.1, -100.0, 0.2}> {
    mask = Unsqueeze(kept, axis)
    scores = Add(x, bias)
    added = Add(mask, scores)
    filled = Where(chosen, added, filler)
    p = Softmax(filled)
}"""


@pytest.mark.parametrize(
    ("number", "kind"),
    [("-100.0", InitializerKind.CONSTANT), ("-inf", InitializerKind.CONSTANT), ("-99.0", InitializerKind.WEIGHT)],
)
def test_what_excludes_places_of_a_softmax(number: str, kind: InitializerKind) -> None:
    proto = onnx.parser.parse_model(MASKED.replace("NUMBER", "-100.0"))
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array([[0.0, float(number)]], np.float32), "kept"))
    kinds = classify_initializers(load(proto))
    assert kinds["kept"] is kind
    assert kinds["filler"] is InitializerKind.CONSTANT
    assert kinds["bias"] is InitializerKind.WEIGHT


def test_the_mask_of_an_attention_layer() -> None:
    text = (
        MASKED.partition("{\n    mask")[0]
        .replace("NUMBER", "-100.0")
        .replace("float[N, 2, 2]", "float[N, 1, 2, 2]")
        .replace('"": 18', '"": 23')
    )
    proto = onnx.parser.parse_model(text + "{\n mask = Add(kept, filler)\n p = Attention(x, x, x, mask)\n}")
    kinds = classify_initializers(load(proto))
    assert kinds["kept"] is kinds["filler"] is InitializerKind.CONSTANT


@pytest.mark.parametrize(("last", "kind"), [("1", InitializerKind.CONSTANT), ("2", InitializerKind.WEIGHT)])
def test_a_lower_triangle_of_ones(last: str, kind: InitializerKind) -> None:
    text = """
<ir_version: 8, opset_import: ["": 18]>
masked (float[N, 2, 2] x) => (float[N, 2, 2] p)
<float[2, 2] seen = {1, 0, 1, LAST}, float one = {1}, float much = {10000}> {
    kept = Mul(x, seen)
    hidden = Sub(one, seen)
    subtracted = Mul(hidden, much)
    scores = Sub(kept, subtracted)
    p = Softmax(scores)
}"""
    assert classify_initializers(load(onnx.parser.parse_model(text.replace("LAST", last))))["seen"] is kind


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
def test_steps_of_an_exported_module(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Attention()
    x, target = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    path = tmp_path / "attention.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), path, dynamo=True, opset_version=opset, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(path, loss="mean_squared_error", optimizer="sgd:lr=0.5")
    session = burnish.Session(program)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    (name,) = (entry.name for entry in program.signature["step"].inputs if entry.role.value == "data")
    for _ in range(5):
        loss = nn.functional.mse_loss(module(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = session.step({name: x.numpy(), "targets": target.numpy()})
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)


SIMPLIFIED = """
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
    proto = onnx.parser.parse_model(SIMPLIFIED)
    proto.producer_name = producer
    renamed = {"FIRST": "/layer/Constant_1_output_0", "SECOND": name}
    for tensor in proto.graph.initializer:
        tensor.name = renamed[tensor.name]
    for node in proto.graph.node:
        node.input[:] = [renamed.get(operand, operand) for operand in node.input]
    kinds = classify_initializers(load(proto))
    assert kinds[name] is kind
    assert kinds["/layer/Constant_1_output_0"] is InitializerKind.WEIGHT
