"""Softmax cross-entropy as the engine's kernels: which losses have them, and values and gradients against float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.errors import NonFiniteLossError
from oracles.combinations import diagonal, named
from oracles.kernel_graphs import kernel_graphs

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the engine's kernels")

IGNORED = -100
MODEL = """<ir_version: 10, opset_import: ["": 18]>
graph (float[batch, 6] x) => (float[batch, 5] logits) <float[5, 6] w> {
    logits = Gemm <transB = 1> (x, w)
}"""
SEQUENCE = """<ir_version: 10, opset_import: ["": 18]>
graph (float[batch, 6, 4] x) => (float[batch, 5, 4] logits) <float[5, 6] w> {
    logits = MatMul (w, x)
}"""


def program(loss, text: str = MODEL) -> burnish.Program:
    proto = onnx.parser.parse_model(text)
    array = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    return burnish.compile(burnish.load(proto), loss=loss, optimizer="sgd")


def operators(made: burnish.Program, graph: str = "step") -> list[str]:
    return [node.op_type for node in fuse(kernel_graphs(made, FUSED)[graph], kernels=True).graph]


def exact(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the terms and its gradient, by PyTorch's autograd in float64."""
    wide = logits.double().requires_grad_()
    total = torch.nn.functional.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
    (gradient,) = torch.autograd.grad(total, wide)
    return total.detach(), gradient


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["step", "grad", "evaluate"])
def test_a_loss_over_labels_is_a_kernel_and_its_gradient_another(graph):
    found = operators(program("cross_entropy"), graph)
    assert found.count("FusedCrossEntropy") == 1
    assert found.count("FusedCrossEntropyGrad") == (graph != "evaluate")
    assert not {"LogSoftmax", "ScatterElements", "Exp"} & set(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        burnish.losses.cross_entropy(label_smoothing=0.1),
        burnish.losses.cross_entropy(weight=[1, 2, 3, 4, 5]),
        burnish.losses.cross_entropy(probabilities=True),
        burnish.losses.focal(),
    ],
    ids=["smoothing", "weight", "probabilities", "focal"],
)
def test_other_losses_are_lowered(loss):
    found = operators(program(loss))
    assert "LogSoftmax" in found
    assert not {"FusedCrossEntropy", "SoftmaxCrossEntropy", "SoftmaxCrossEntropyGrad"} & set(found)


def test_the_loss_of_logits_of_more_axes_is_lowered():
    found = operators(program("cross_entropy", SEQUENCE))
    assert "ScatterElements" in found
    assert not {"FusedCrossEntropy", "SoftmaxCrossEntropy", "SoftmaxCrossEntropyGrad"} & set(found)


@pytest.mark.slow
@diagonal(
    ("labels", named([[0, 4, 1, 1, 3, 2, 0], [0, -1, 1, -1, 3, -1, 0], [-1] * 7], ["all", "some", "none"])),
    ("loss", [burnish.losses.cross_entropy(), burnish.losses.cross_entropy(reduction="sum", ignore_index=2)]),
)
def test_steps_are_those_of_atens_operators(loss, labels):
    made = program(loss)
    given = {"x": np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32), "labels": np.array(labels)}
    given["labels"][given["labels"] == -1] = loss.ignore_index
    sessions = [burnish.Session(made, engine=TorchEngine(compile=kind)) for kind in ("regions", "none")]
    for _ in range(3):
        ours, theirs = (session.step(given) for session in sessions)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert sessions[0].evaluate(given)["loss"] == pytest.approx(sessions[1].evaluate(given)["loss"], rel=1e-6)
    ours, theirs = (session.state() for session in sessions)
    np.testing.assert_allclose(ours["param/w"], theirs["param/w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (3, 2), (32, 10), (7, 33), (300, 1000), (5, 30_523)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_values_and_gradients_have_the_digits_of_float32(rows, classes, scale):
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, classes, generator=generator) * scale
    labels = torch.randint(classes, (rows,), generator=generator)
    labels[::3] = IGNORED if rows > 1 else 0
    total, count, saved = torch.ops.burnish.cross_entropy(logits, labels, IGNORED)
    flow = torch.tensor(-0.7)
    gradient = torch.ops.burnish.cross_entropy_gradient(logits, labels, saved, flow, IGNORED)
    expected, expected_gradient = exact(logits, labels)
    assert count.item() == (labels != IGNORED).sum()
    assert total.item() == pytest.approx(expected.item(), rel=2e-7, abs=1e-7 * rows)
    # The exponent is rounded to the digits of float32, relative to its own size, which the exponential makes a relative error.
    torch.testing.assert_close(gradient.double(), expected_gradient * flow.double(), rtol=1e-6 * max(scale, 1), atol=1e-7)


def test_logits_may_be_strided_and_labels_negative():
    logits = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)).t()
    labels = torch.tensor([3, -1, 0, -10, 9, 1, 2, 5])
    total, _, saved = torch.ops.burnish.cross_entropy(logits, labels, IGNORED)
    gradient = torch.ops.burnish.cross_entropy_gradient(logits, labels, saved, torch.tensor(1.0), IGNORED)
    expected, expected_gradient = exact(logits, labels % 10)
    assert total.item() == pytest.approx(expected.item(), rel=2e-7)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(0, 5), (4, 5)])
def test_where_no_label_counts_all_is_zero(shape):
    logits, labels = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.full(shape[:1], IGNORED)
    total, count, saved = torch.ops.burnish.cross_entropy(logits, labels, IGNORED)
    gradient = torch.ops.burnish.cross_entropy_gradient(logits, labels, saved, torch.tensor(1.0), IGNORED)
    assert (total.item(), count.item()) == (0.0, 0.0)
    assert torch.equal(gradient, torch.zeros(shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 2, 20])
def test_what_is_not_finite_comes_out_as_from_pytorch(bad, place):
    logits = torch.randn(4, 21, generator=torch.Generator().manual_seed(0))
    logits[1, place] = bad
    labels = torch.tensor([5, 2, 7, 1])
    total, _, saved = torch.ops.burnish.cross_entropy(logits, labels, IGNORED)
    gradient = torch.ops.burnish.cross_entropy_gradient(logits, labels, saved, torch.tensor(1.0), IGNORED)
    expected, expected_gradient = exact(logits, labels)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.slow
def test_nan_in_the_batch_is_a_loss_that_is_refused():
    session = burnish.Session(program("cross_entropy"), engine="torch")
    before = session.state()["param/w"]
    with pytest.raises(NonFiniteLossError, match="is nan"):
        session.step({"x": np.full((2, 6), np.nan, np.float32), "labels": np.array([0, 1])})
    np.testing.assert_array_equal(session.state()["param/w"], before)


def test_the_bits_are_the_same_for_any_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(501, 1000, generator=generator), torch.randint(1000, (501,), generator=generator)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            total, _, saved = torch.ops.burnish.cross_entropy(logits, labels, IGNORED)
            gradient = torch.ops.burnish.cross_entropy_gradient(logits, labels, saved, torch.tensor(0.3), IGNORED)
            found.append((total, gradient))
    finally:
        torch.set_num_threads(before)
    for total, gradient in found[1:]:
        assert torch.equal(total, found[0][0])
        assert torch.equal(gradient, found[0][1])


def test_what_the_kernel_cannot_take_is_refused():
    logits, labels = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="label 4 in row 1 is out of range for 4 classes"):
        torch.ops.burnish.cross_entropy(logits, torch.tensor([0, 4, 0]), IGNORED)
    with pytest.raises(RuntimeError, match=r"float32 logits \[N, C\] expected"):
        torch.ops.burnish.cross_entropy(logits.double(), labels, IGNORED)
    with pytest.raises(RuntimeError, match="an int64 label per row expected"):
        torch.ops.burnish.cross_entropy(logits, labels[:2], IGNORED)
