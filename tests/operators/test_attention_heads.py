"""Attention over queries, keys and values with an axis of heads, whose number only the graph may know."""

from __future__ import annotations

import numpy as np
import onnx
import torch

import burnish
from oracles.combinations import diagonal

TEXT = """<ir_version: 11, opset_import: ["": 23]>
g (float[B, QUERY, S, 4] q, float[B, KEY, S, 4] k, float[B, KEY, S, 4] v) => (float[B, QUERY, S, 4] y)
<float[4, 4] w = {1, 0.5, -1, 0.2, 0.3, 1, 0.1, -0.5, 0.7, 0.2, 1, 0.4, -0.3, 0.6, 0.2, 1}> {
    a = MatMul (q, w) b = MatMul (k, w) c = MatMul (v, w) y = Attention (a, b, c) }"""


@diagonal(
    (("query", "key"), [("H", "H"), ("H", "G"), ("4", "G"), ("H", "2"), ("4", "2")]),
    ("engine", ["onnxruntime", "torch", "reference"]),
    test=8,
)
def test_heads_whose_number_is_known_when_the_graph_runs(query: str, key: str, engine: str) -> None:
    source = onnx.parser.parse_model(TEXT.replace("QUERY", query).replace("KEY", key))
    rng = np.random.default_rng(0)
    heads = {"q": 4, "k": 4 if key == query else 2, "v": 4 if key == query else 2}
    batch = {name: rng.normal(size=(2, count, 3, 4)).astype(np.float32) for name, count in heads.items()}
    weight = torch.tensor(onnx.numpy_helper.to_array(source.graph.initializer[0]), requires_grad=True)
    q, k, v = (torch.from_numpy(batch[name]) @ weight for name in "qkv")
    repeats = heads["q"] // heads["k"]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    (y**2).mean().backward()
    session = burnish.Session(burnish.compile(source, loss="mse", optimizer="sgd:lr=1.0,momentum=0"), engine=engine)
    np.testing.assert_allclose(session.predict(batch)["y"], y.detach().numpy(), rtol=1e-5, atol=1e-6)
    session.step({**batch, "targets": np.zeros(y.shape, np.float32)})
    gradient = weight.detach().numpy() - session.state()["param/w"]
    assert weight.grad is not None
    np.testing.assert_allclose(gradient, weight.grad.numpy(), rtol=1e-4, atol=1e-6)
