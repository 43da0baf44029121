"""Softmax cross-entropy and gradients of layers as semantic operators: what is emitted, and what flows through each output."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from burnish.autodiff import differentiate
from burnish.operators.loss import SOFTMAX_CROSS_ENTROPY
from burnish.operators.matmul import LINEAR_GRAD
from oracles.small_graphs import SmallGraph

WEIGHTS = np.array([0.5, 1.0, 2.0, 0.25, 3.0])


@pytest.mark.parametrize("smoothing", [None, 0.2])
@pytest.mark.parametrize("extents", [(4, 5), (2, 5, 3)])
def test_a_loss_has_the_gradients_of_its_sum_and_of_its_logarithms_together(smoothing, extents):
    labels_of = (extents[0], *extents[2:])
    graph = SmallGraph({"x": ("float64", ("batch", *extents[1:])), "labels": ("int64", ("batch", *labels_of[1:]))})
    weights = graph.builder.constant(WEIGHTS)
    total, counted, log_p = SOFTMAX_CROSS_ENTROPY.emit(
        graph["x"],
        graph["labels"],
        weights,
        ignore_index=-1,
        smoothing=None if smoothing is None else ir.tensor(np.float64(smoothing)),
    )
    y = total * 0.7 + graph.builder.op("ReduceSum", log_p * log_p, keepdims=0)
    gradient = differentiate(graph.builder, {y.value: graph.builder.scalar(1.0, y)}, [graph["x"].value])[graph["x"].value]
    for name, tensor in {"y": y, "counted": counted, "dx": gradient}.items():
        graph.output(name, tensor)
    generator = np.random.default_rng(0)
    x, labels = generator.normal(size=extents), generator.integers(0, 5, labels_of)
    labels.flat[1] = -1
    found = graph.run(x=x, labels=labels)
    wide = torch.tensor(x, requires_grad=True)
    expected = (
        0.7
        * torch.nn.functional.cross_entropy(
            wide,
            torch.tensor(labels),
            torch.tensor(WEIGHTS),
            ignore_index=-1,
            reduction="sum",
            label_smoothing=smoothing or 0.0,
        )
        + torch.log_softmax(wide, 1).square().sum()
    )
    expected.backward()
    np.testing.assert_allclose(found["y"], expected.item(), rtol=1e-12)
    np.testing.assert_allclose(found["counted"], WEIGHTS[labels[labels >= 0]].sum(), rtol=1e-12)
    np.testing.assert_allclose(found["dx"], wide.grad, rtol=1e-10, atol=1e-13)


def test_the_sum_of_weights_is_a_constant_to_the_gradient():
    graph = SmallGraph({"x": ("float32", ("batch", 5)), "labels": ("int64", ("batch",))})
    total, counted, _ = SOFTMAX_CROSS_ENTROPY.emit(graph["x"], graph["labels"], ignore_index=-1)
    y = total / counted
    differentiate(graph.builder, {y.value: graph.builder.scalar(1.0, y)}, [graph["x"].value])
    assert graph.operators() == ["SoftmaxCrossEntropy", "Div", "Div", "SoftmaxCrossEntropyGrad"]


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("lead", [("rows",), ("batch", 3)])
def test_gradients_of_a_layer_that_are_not_asked_for_have_no_elements(lead, transposed):
    graph = SmallGraph(
        {"dy": ("float32", (*lead, 4)), "x": ("float32", (*lead, 6)), "w": ("float32", (4, 6) if transposed else (6, 4))}
    )
    for x, weight, bias in ((graph["x"], graph["w"], 1), (graph["x"], None, 0), (None, graph["w"], 0)):
        dx, dw, db = LINEAR_GRAD.emit(graph["dy"], x, weight, transposed=transposed, bias=bias)
        assert dx.shape == (ir.Shape([0]) if weight is None else graph["x"].shape)
        assert dw.shape == (ir.Shape([0]) if x is None else graph["w"].shape)
        assert db.shape == ir.Shape([4 if bias else 0])


def test_the_gradient_of_a_frozen_layer_has_the_extents_of_its_results():
    graph = SmallGraph({"x": ("float32", ("a", "b", 3, 6)), "w": ("float32", (6, 4)), "dy": ("float32", ("a", "b", 3, 4))})
    y = graph.builder.op("MatMul", graph["x"], graph["w"])
    graph.output("dx", differentiate(graph.builder, {y.value: graph["dy"]}, [graph["x"].value])[graph["x"].value])
    generator = np.random.default_rng(0)
    dy, w = generator.normal(size=(2, 5, 3, 4)).astype(np.float32), generator.normal(size=(6, 4)).astype(np.float32)
    found = graph.run(x=np.zeros((2, 5, 3, 6), np.float32), dy=dy, w=w)["dx"]
    np.testing.assert_allclose(found, dy @ w.T, rtol=1e-5, atol=1e-6)
