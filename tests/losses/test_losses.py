"""Losses against PyTorch: values, gradients, and what happens at the edges."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from burnish import losses
from burnish.autodiff import differentiate
from burnish.errors import ConfigurationError
from oracles.loss_graphs import label_specs, loss_graph
from oracles.small_graphs import SmallGraph

CLASSES = 5
IGNORE = -100
SHAPES = {"rank2": (7, CLASSES), "rank3": (3, CLASSES, 4), "rank4": (2, CLASSES, 3, 2), "one_class": (4, 1)}
OPTIONS = [
    {"label_smoothing": smoothing, "weighted": weighted, "reduction": reduction, "ignore_index": ignore}
    for smoothing, weighted, reduction, ignore in itertools.product((0.0, 0.1, 1.0), (False, True), ("mean", "sum"), (IGNORE, 1))
]


def torch_cross_entropy(x: np.ndarray, labels: np.ndarray, dy: float, **options: Any) -> tuple[float, np.ndarray]:
    tensor = torch.from_numpy(np.asarray(x, np.float64)).requires_grad_()
    weight = options.pop("weight", None)
    weight = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(tensor, torch.from_numpy(labels), weight=weight, **options)
    loss.backward(torch.tensor(dy, dtype=torch.float64))
    assert tensor.grad is not None
    return loss.item(), tensor.grad.numpy()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_cross_entropy_is_that_of_torch(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    classes = shape[1]
    options = dict(options)
    weight = rng.uniform(0.1, 3.0, classes).tolist() if options.pop("weighted") else None
    loss = losses.cross_entropy(weight=weight, **options)
    x = 3 * rng.standard_normal(shape)
    labels = rng.integers(0, classes, (shape[0], *shape[2:]))
    labels.flat[2] = options["ignore_index"]
    labels.flat[0] = 0
    dy = -1.7
    expected, gradient = torch_cross_entropy(x, labels, dy, weight=weight, **options)
    for declared in (("batch", *shape[1:]), tuple(f"d{axis}" for axis in range(len(shape)))):
        results = loss_graph(loss, declared).run(x=x, labels=labels, dy=np.float64(dy))
        np.testing.assert_allclose(results["loss"], expected, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(results["dx"], gradient, rtol=1e-10, atol=1e-14)
    single = loss_graph(loss, shape, "float32").run(x=x.astype(np.float32), labels=labels, dy=np.float32(dy))
    assert {array.dtype for array in single.values()} == {np.dtype("float32")}
    np.testing.assert_allclose(single["loss"], expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(single["dx"], gradient, rtol=1e-5, atol=2e-6 * np.abs(gradient).max() + 1e-12)


def test_sums_and_weights_of_batches_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(2)
    loss = losses.cross_entropy(weight=[0.5, 1.0, 2.0, 0.0, 3.0], label_smoothing=0.1)
    x, labels = rng.standard_normal((12, CLASSES)), rng.integers(0, CLASSES, 12)
    labels[:3] = IGNORE
    session = loss_graph(loss, ("batch", CLASSES)).session()
    parts = [session(x=x[part], labels=labels[part], dy=np.float64(1)) for part in (slice(0, 3), slice(3, 4), slice(4, 12))]
    whole = session(x=x, labels=labels, dy=np.float64(1))
    for name in ("total", "weight"):
        np.testing.assert_allclose(sum(part[name] for part in parts), whole[name], rtol=1e-14)
    assert parts[0]["weight"] == 0


@pytest.mark.parametrize("weight", [None, [0.5, 1.0, 2.0, 0.0, 3.0]])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_whose_labels_are_all_ignored_has_loss_and_gradient_zero(weight: Any, smoothing: float) -> None:
    loss = losses.cross_entropy(weight=weight, label_smoothing=smoothing)
    x = np.random.default_rng(0).standard_normal((3, CLASSES))
    results = loss_graph(loss, (3, CLASSES)).run(x=x, labels=np.full(3, IGNORE), dy=np.float64(1))
    assert str(results["loss"]) == "0.0"
    assert results["weight"] == 0
    assert not results["dx"].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_of_ten_thousand_are_exact_in_float32(smoothing: float) -> None:
    x = np.array(
        [[1e4, -1e4, 0.0, 9999.0, 1.0], [-1e4, -1e4, -1e4, -1e4, -1e4], [1e4, 1e4, 0.0, -1e4, 5e3], [88.8, -103.0, 0, 1, 2]],
        np.float32,
    )
    labels = np.array([1, 4, 0, 1])
    results = loss_graph(losses.cross_entropy(label_smoothing=smoothing), x.shape, "float32").run(
        x=x, labels=labels, dy=np.float32(1)
    )
    expected, gradient = torch_cross_entropy(x, labels, 1.0, label_smoothing=smoothing)
    np.testing.assert_allclose(results["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(results["dx"], gradient, rtol=1e-5, atol=1e-7)


def test_an_ignored_position_may_hold_anything() -> None:
    x = np.array([[0.0, 1.0], [np.inf, -np.inf]])
    graph = SmallGraph({"x": ("float64", (2, 2)), "label": ("int64", (2,))})
    ((total, weight, *_),) = losses.cross_entropy(ignore_index=7).terms([graph["x"]], [graph["label"]])
    graph.output("total", total)
    graph.output("weight", weight)
    results = graph.run(x=x, label=np.array([0, 7]))
    np.testing.assert_allclose(results["total"], np.log1p(np.e), rtol=1e-12)
    assert results["weight"] == 1


def test_cross_entropy_costs_no_one_hot() -> None:
    graph = SmallGraph({"x": ("float32", ("batch", 1000)), "label": ("int64", ("batch",))})
    ((total, weight, *_),) = losses.cross_entropy().terms([graph["x"]], [graph["label"]])
    forward = set(graph.graph)
    gradient = differentiate(graph.builder, {total.value: graph.builder.scalar(1.0, total)}, [graph["x"].value])
    assert gradient[graph["x"].value] is not None
    wide = [
        node.op_type
        for node in graph.graph
        if node.outputs[0].shape is not None and len(node.outputs[0].shape) == 2 and node.outputs[0].shape[1] == 1000
    ]
    assert "OneHot" not in wide
    assert wide.count("LogSoftmax") == 1
    assert len(wide) <= 6
    assert len(forward) <= 20
    assert weight.dtype == graph["x"].dtype


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(4, 3), (6,), (2, 3, 2), ()], ids=str)
def test_mean_squared_error_is_that_of_torch(shape: tuple[int, ...], reduction: Any) -> None:
    rng = np.random.default_rng(1)
    x, targets = np.asarray(rng.standard_normal(shape)), np.asarray(rng.standard_normal(shape))
    tensor = torch.from_numpy(x.copy()).requires_grad_()
    expected = torch.nn.functional.mse_loss(tensor, torch.from_numpy(targets), reduction=reduction)
    expected.backward(torch.tensor(-0.6, dtype=torch.float64))
    loss = losses.mean_squared_error(reduction=reduction)
    assert tensor.grad is not None
    for declared in (shape, tuple(f"d{axis}" for axis in range(len(shape)))):
        results = loss_graph(loss, declared).run(x=x, targets=targets, dy=np.float64(-0.6))
        np.testing.assert_allclose(results["loss"], expected.item(), rtol=1e-12)
        np.testing.assert_allclose(results["dx"], tensor.grad.numpy(), rtol=1e-12)


def test_what_the_label_must_be() -> None:
    (spec,) = label_specs(losses.cross_entropy(ignore_index=255), {"x": ("batch", 10, 4, None)}, "float32")
    assert (spec.name, spec.dtype.name, spec.shape) == ("labels", "INT64", ("batch", 4, None))
    assert (spec.minimum, spec.maximum, spec.ignored) == (0, 9, 255)
    (spec,) = label_specs(losses.mean_squared_error(), {"y": ("batch", 3)})
    assert (spec.name, spec.dtype.name, spec.shape) == ("targets", "DOUBLE", ("batch", 3))
    assert spec.minimum is spec.maximum is spec.ignored is None
    assert label_specs(losses.cross_entropy(), {"x": ("batch", "classes")})[0].maximum is None


def test_a_name_its_options_and_the_object_all_resolve() -> None:
    assert losses.get("cross_entropy") == losses.cross_entropy()
    assert losses.get("mse") == losses.get("mean_squared_error") == losses.mean_squared_error()
    for loss in (losses.cross_entropy(weight=[1, 2], label_smoothing=0.1), losses.mean_squared_error(reduction="sum")):
        assert losses.get(loss) is loss
        assert losses.get(json.loads(json.dumps(loss.options()))) == loss
        assert isinstance(loss, losses.Loss)


def _terms(loss: losses.Loss, dtype: str, shape: Any, label: tuple[str, Any]) -> None:
    graph = SmallGraph({"logits": (dtype, shape), "targets": label})
    loss.terms([graph["logits"]], [graph["targets"]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.get("crossentropy"), "there is no loss 'crossentropy'; there is cross_entropy, mean_squared_error, mse"),
        (lambda: losses.get(3), "loss must be a name or a loss object of burnish.losses, not int; there is cross_entropy"),
        (lambda: losses.get({"name": "mse", "delta": 1}), "loss 'mse': .*'delta'"),
        (lambda: losses.get({}), "there is no loss 'None'"),
        (lambda: losses.cross_entropy(reduction="none"), "cross_entropy: reduction must be 'mean' or 'sum', not 'none'"),
        (lambda: losses.mean_squared_error(reduction="max"), "mean_squared_error: reduction must be 'mean' or 'sum', not 'max'"),
        (lambda: losses.cross_entropy(label_smoothing=1.5), "label_smoothing must be between 0 and 1, not 1.5"),
        (lambda: losses.cross_entropy(label_smoothing="a"), "label_smoothing must be between 0 and 1, not 'a'"),
        (lambda: losses.cross_entropy(ignore_index=None), "ignore_index must be an integer, not None"),
        (lambda: losses.cross_entropy(weight=[1, -1]), "weight must hold finite numbers that are not negative"),
        (lambda: losses.cross_entropy(weight=[float("nan")]), "weight must hold finite numbers"),
        (lambda: losses.cross_entropy(weight="heavy"), "weight must hold finite numbers"),
        (
            lambda: _terms(losses.cross_entropy(weight=[1, 2]), "float32", (3, 4), ("int64", (3,))),
            "weight has 2 numbers, and the prediction 'logits' has 4 classes",
        ),
        (
            lambda: _terms(losses.cross_entropy(), "float32", (3,), ("int64", (3,))),
            r"'logits' has shape \[3\], and classes are read along axis 1.*outputs=",
        ),
        (
            lambda: _terms(losses.cross_entropy(), "int64", (3, 4), ("int64", (3,))),
            "the prediction 'logits' is INT64, not floating-point",
        ),
        (lambda: _terms(losses.cross_entropy(), "float32", None, ("int64", (3,))), "the shape of .* 'logits' is not known"),
        (lambda: _terms(losses.mean_squared_error(), "float32", (3, 1), ("float32", (3,))), "'logits' has shape .* 'targets'"),
        (lambda: _terms(losses.mean_squared_error(), "float32", (3, 1), ("float32", (3, 4))), "are not broadcast"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
