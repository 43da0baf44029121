"""Connectionist temporal classification against PyTorch's, and by enumeration of every alignment."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

import burnish
from burnish import losses
from burnish.errors import ConfigurationError
from oracles.loss_graphs import label_specs, loss_graph
from oracles.scaled_model import RATE, scaled_outputs

T, N, C, S = 9, 4, 5, 3
SCALE = -1.7


def samples(blank: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """Sequences of several lengths; repeated labels, a single label and no label at all among them."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation([c for c in range(C) if c != blank] * 3)[: N * S].reshape(N, S)
    labels[0, 1] = labels[0, 0]
    labels[3] = -1
    labels[2, 1:] = -1
    return {
        "x": 2 * rng.standard_normal((N, T, C)),
        "labels": labels,
        "input_lengths": np.array([T, 7, 5, 6]),
        "target_lengths": np.array([3, 3, 1, 0]),
    }


def by_torch(arrays: dict[str, np.ndarray], **options: Any) -> tuple[float, np.ndarray]:
    x = torch.tensor(arrays["x"].astype(np.float64), requires_grad=True)
    labels = torch.from_numpy(np.maximum(arrays["labels"], 0))
    lengths = [torch.from_numpy(arrays[name]) for name in ("input_lengths", "target_lengths")]
    loss = F.ctc_loss(torch.log_softmax(x, 2).transpose(0, 1), labels, *lengths, **options)
    loss.backward(torch.tensor(SCALE, dtype=torch.float64))
    assert x.grad is not None
    return loss.item(), x.grad.numpy()


SHAPES = {"static": (N, T, C), "batch": ("batch", T, C), "all": ("batch", "frames", "classes")}


@pytest.mark.parametrize("declared", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("blank", [0, 2, C - 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_value_and_gradient_are_those_of_torch(declared: Any, blank: int, reduction: Any) -> None:
    arrays = samples(blank)
    value, gradient = by_torch(arrays, blank=blank, reduction=reduction)
    graph = loss_graph(losses.ctc(blank=blank, reduction=reduction), declared)
    results = graph.run(**arrays, dy=np.float64(SCALE))
    np.testing.assert_allclose(results["loss"], value, rtol=1e-10)
    np.testing.assert_allclose(results["dx"], gradient, rtol=1e-10, atol=1e-12)
    assert not results["dx"][1, 7:].any()


def test_on_the_reference_evaluator() -> None:
    arrays = samples()
    value, gradient = by_torch(arrays)
    results = loss_graph(losses.ctc(), (N, T, C)).run_reference(**arrays, dy=np.float64(SCALE))
    np.testing.assert_allclose(results["loss"], value, rtol=1e-10)
    np.testing.assert_allclose(results["dx"], gradient, rtol=1e-10, atol=1e-12)


def test_float32_and_frames_first() -> None:
    arrays = samples()
    arrays["x"] = arrays["x"].astype(np.float32)
    value, gradient = by_torch(arrays)
    arrays["x"] = np.ascontiguousarray(arrays["x"].transpose(1, 0, 2))
    results = loss_graph(losses.ctc(time_first=True), (T, "batch", C), "float32").run(**arrays, dy=np.float32(SCALE))
    np.testing.assert_allclose(results["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(results["dx"].transpose(1, 0, 2), gradient, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("labels", [[1], [1, 1], [2, 1], []], ids=str)
def test_the_likelihood_is_the_sum_over_all_alignments(labels: list[int]) -> None:
    frames, classes = 4, 3
    x = np.random.default_rng(0).standard_normal((1, frames, classes))
    p = np.exp(x[0]) / np.exp(x[0]).sum(1, keepdims=True)
    total = 0.0
    for path in itertools.product(range(classes), repeat=frames):
        spelled = [label for label, _ in itertools.groupby(path) if label != 0]
        if spelled == labels:
            total += np.prod([p[frame, label] for frame, label in enumerate(path)])
    padded = np.array([[*labels, -1, -1][:2]])
    results = loss_graph(losses.ctc(reduction="sum"), x.shape).run(
        x=x, labels=padded, input_lengths=np.array([frames]), target_lengths=np.array([len(labels)]), dy=np.float64(1)
    )
    np.testing.assert_allclose(results["loss"], -np.log(total), rtol=1e-12)


def test_too_few_frames_give_infinity_or_zero() -> None:
    arrays = samples()
    arrays["input_lengths"][0] = 3
    infinite = loss_graph(losses.ctc(), (N, T, C)).run(**arrays, dy=np.float64(SCALE))
    assert infinite["loss"] == np.inf
    value, gradient = by_torch(arrays, zero_infinity=True)
    results = loss_graph(losses.ctc(zero_infinity=True), (N, T, C)).run(**arrays, dy=np.float64(SCALE))
    np.testing.assert_allclose(results["loss"], value, rtol=1e-10)
    np.testing.assert_allclose(results["dx"], gradient, rtol=1e-10, atol=1e-12)
    assert not results["dx"][0].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_of_ten_thousand_are_finite(dtype: str) -> None:
    arrays = samples()
    arrays["x"] = np.random.default_rng(0).choice([-1e4, 1e4, 0.0], (N, T, C)).astype(dtype)
    results = loss_graph(losses.ctc(), (N, T, C), dtype).run(**arrays, dy=np.asarray(1, dtype))
    assert all(np.isfinite(array).all() for array in results.values())
    np.testing.assert_allclose(results["loss"], by_torch(arrays)[0], rtol=1e-5)


@pytest.mark.slow
def test_two_steps_are_those_of_torch() -> None:
    arrays = samples()
    program = burnish.compile(scaled_outputs({"x": arrays["x"]}), loss="ctc", optimizer=burnish.optim.sgd(lr=RATE, momentum=0))
    session = burnish.Session(program, threads=1)
    weight = torch.tensor(session.state()["param/w:x"], requires_grad=True)
    batch = {"in:x": arrays.pop("x"), **arrays}
    for _ in range(2):
        scaled = torch.from_numpy(batch["in:x"]) * weight
        lengths = [torch.from_numpy(arrays[name]) for name in ("input_lengths", "target_lengths")]
        loss = F.ctc_loss(
            torch.log_softmax(scaled, 2).transpose(0, 1), torch.from_numpy(np.maximum(arrays["labels"], 0)), *lengths
        )
        (gradient,) = torch.autograd.grad(loss, weight)
        np.testing.assert_allclose(session.step(batch)["loss"], loss.item(), rtol=1e-10)
        weight = (weight - RATE * gradient).detach().requires_grad_()
    np.testing.assert_allclose(session.state()["param/w:x"], weight.detach().numpy(), rtol=1e-10)
    parts = [{name: array[part] for name, array in batch.items()} for part in (slice(0, 1), slice(1, None))]
    np.testing.assert_allclose(session.evaluate_data(parts)["loss"], session.evaluate(batch)["loss"], rtol=1e-12)


def test_labels_are_named_and_bounded() -> None:
    specs = label_specs(losses.ctc(), {"x": ("batch", T, C)})
    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == [
        ("labels", ir.DataType.INT64, ("batch", "label_length")),
        ("input_lengths", ir.DataType.INT64, ("batch",)),
        ("target_lengths", ir.DataType.INT64, ("batch",)),
    ]
    assert [(spec.minimum, spec.maximum, spec.ignored) for spec in specs] == [(0, C - 1, -1), (1, T, None), (0, None, None)]


def test_options_make_the_loss_again() -> None:
    for loss in (losses.ctc(), losses.ctc(blank=3, zero_infinity=True, time_first=True, reduction="sum")):
        assert losses.get(json.loads(json.dumps(loss.options()))) == loss


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.ctc(blank=-1), "ctc: blank must be a class index, 0 or more, not -1"),
        (lambda: losses.ctc(zero_infinity=1), "ctc: zero_infinity must be True or False, not 1"),
        (lambda: losses.ctc(reduction="none"), "ctc: reduction must be 'mean' or 'sum', not 'none'"),
        (
            lambda: label_specs(losses.ctc(), {"x": (3, 4)}),
            r"ctc: the prediction 'x' has shape \[3, 4\]: .* \[batch, frames, classes\]",
        ),
        (
            lambda: label_specs(losses.ctc(blank=5), {"x": (3, 4, 5)}),
            "ctc: blank is 5, and the prediction 'x' has 5 classes, from 0",
        ),
    ],
)
def test_bad_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_samples_along_the_second_axis_are_named_where_the_loss_reads_frames() -> None:
    file = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[time, batch, 4] x) => (float[time, batch, 3] y)
        <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}> { y = MatMul (x, w) }""")
    with pytest.raises(ConfigurationError, match=r"'y' has frames along its first axis .*: choose 'ctc:time_first=true'"):
        burnish.compile(file, loss="ctc")
    labels = burnish.compile(file, loss="ctc:time_first=true").signature["step"].inputs_of(burnish.program.Role.LABEL)
    assert labels[0].shape == ("batch", "label_length")
