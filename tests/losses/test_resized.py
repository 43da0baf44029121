"""Losses of predictions that are smaller than their labels, beside PyTorch's interpolate."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import burnish
from burnish import losses
from burnish.errors import ConfigurationError
from oracles.loss_graphs import label_specs, loss_graph
from oracles.scaled_model import scaled_outputs

RNG = np.random.default_rng(5)
X = RNG.standard_normal((2, 3, 4, 5))
LABELS = RNG.integers(0, 3, (2, 8, 15))


@pytest.mark.parametrize("shape", [X.shape, ("batch", 3, "height", "width")])
@pytest.mark.parametrize("size", [(8, 15), None])
def test_a_prediction_is_resized_to_its_labels(size: Any, shape: Any) -> None:
    x = torch.from_numpy(X).requires_grad_()
    larger = F.interpolate(x, size=(8, 15), mode="bilinear", align_corners=False)
    labels = LABELS.copy()
    labels[0, 0] = 255
    loss = F.cross_entropy(larger, torch.from_numpy(labels), ignore_index=255)
    loss.backward()
    own = losses.resized(losses.cross_entropy(ignore_index=255), size=size)
    assert x.grad is not None
    results = loss_graph(own, shape).run_reference(x=X, labels=labels, dy=np.float64(1))
    np.testing.assert_allclose(results["loss"], loss.item(), rtol=1e-10)
    np.testing.assert_allclose(results["dx"], x.grad, rtol=1e-10, atol=1e-12)
    # ONNX Runtime resizes in float32 alone.
    results = loss_graph(own, shape, "float32").run(x=X.astype(np.float32), labels=labels, dy=np.float32(1))
    np.testing.assert_allclose(results["loss"], loss.item(), rtol=1e-6)
    np.testing.assert_allclose(results["dx"], x.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_metrics_read_the_resized_prediction() -> None:
    program = burnish.compile(
        scaled_outputs({"x": X}), loss=losses.resized("cross_entropy"), metrics=["accuracy", "recall:macro"]
    )
    session = burnish.Session(program, engine="reference")
    weight = torch.tensor(session.state()["param/w:x"])
    larger = F.interpolate(torch.from_numpy(X) * weight, size=(8, 15), mode="bilinear", align_corners=False)
    figures = session.evaluate({"in:x": X, "labels": LABELS})
    assert figures["accuracy"] == pytest.approx((larger.argmax(1).numpy() == LABELS).mean())
    first = session.step({"in:x": X, "labels": LABELS})["loss"]
    assert session.step({"in:x": X, "labels": LABELS})["loss"] < first


def test_options_make_the_loss_again() -> None:
    loss = losses.resized("dice:smooth=0.5", size=[8, 15], interpolation="nearest")
    assert losses.get(json.loads(json.dumps(loss.options()))) == loss
    (spec,) = label_specs(loss, {"x": ("batch", 3, 4, 5)})
    assert spec.shape == ("batch", 8, 15)
    (spec,) = label_specs(losses.resized("mse"), {"x": ("batch", 3, 4, 5)})
    assert spec.shape == ("batch", 3, "label_height", "label_width")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.resized("triplet"), "the loss triplet reads 3 outputs, and one prediction is resized"),
        (lambda: losses.resized("mse", size=[8]), r"size must be the height and the width of the labels, not \(8,\)"),
        (lambda: losses.resized("mse", interpolation="area"), "interpolation must be 'linear', 'nearest' or 'cubic'"),
        (lambda: losses.resized("cross_entropy:class_axis=-1"), "classes of cross_entropy must be along axis 1"),
        (lambda: label_specs(losses.resized("mse"), {"x": (2, 3)}), r"what is resized is \[batch, classes, height, width\]"),
    ],
)
def test_what_cannot_be_resized_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
