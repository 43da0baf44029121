"""Recurrent networks of several layers, as PyTorch computes them, with dropout between the layers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import burnish
from burnish.engines.reference import ReferenceEngine
from burnish.importer.pytorch import export_module
from oracles.combinations import diagonal

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

KINDS = [("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("GRU", {}), ("LSTM", {})]


class Sequences(nn.Module):
    """The mean over time of what a recurrent network of two layers returns."""

    def __init__(self, kind: str, **options: object) -> None:
        super().__init__()
        self.network = getattr(nn, kind)(4, 3, num_layers=2, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)[0].mean(1)


@diagonal(
    (("kind", "options"), KINDS),
    ("form", [{}, {"bidirectional": True, "bias": False}, {"batch_first": True, "bidirectional": True}]),
    test=1,
)
def test_gradients_are_those_of_pytorch(kind: str, options: dict[str, str], form: dict[str, bool]) -> None:
    torch.manual_seed(0)
    module = Sequences(kind, **options, **form).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    exported = export_module(module, (x,), dynamic_shapes={})
    assert Counter(node.op_type for node in exported.model.graph)[kind] == 2
    names = [name for name, _ in module.named_parameters()]
    graph = burnish.grad(exported.model, wrt=names, of="output")
    output = module(x)
    cotangent = torch.randn_like(output)
    feeds = {"x": x.numpy(), "cotangent:output": cotangent.numpy()}
    results = ReferenceEngine().run(graph, feeds)
    expected = torch.autograd.grad(output, list(module.parameters()), cotangent)
    np.testing.assert_allclose(results["output"], output.detach().numpy(), rtol=1e-10)
    for name, gradient in zip(names, expected, strict=True):
        np.testing.assert_allclose(results[f"grad:{name}"], gradient.numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_dropout_is_drawn_between_layers(kind: str, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    module = Sequences(kind, dropout=0.5, batch_first=True, **options)
    batch = {"x": torch.randn(3, 5, 4).numpy(), "labels": np.zeros(3, np.int64)}
    with burnish.Session(burnish.compile(module, example_inputs=torch.randn(2, 5, 4))) as session:
        losses = {session.step(batch, lr=0.0)["loss"] for _ in range(3)}
        assert len(losses) == 3
        assert session.evaluate(batch)["loss"] == session.evaluate(batch)["loss"]
