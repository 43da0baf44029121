"""Metrics against closed forms in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from burnish import losses, metrics
from burnish.errors import ConfigurationError
from oracles.small_graphs import SmallGraph

CLASSIFY = losses.cross_entropy(ignore_index=-1)
REGRESS = losses.mean_squared_error()


def metric_graph(metric: metrics.Metric, loss: losses.Loss, shape: Any, dtype: str) -> SmallGraph:
    graph = SmallGraph({"x": (dtype, shape)})
    (spec,) = loss.label_specs((graph["x"],))
    graph = SmallGraph({"x": (dtype, shape), "label": (spec.dtype.numpy().name, spec.shape)})
    total, count = metric.terms(graph["x"], graph["label"], loss)
    graph.output("sum", total)
    graph.output("count", count)
    graph.check()
    return graph


def classified(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, labels of which a third is ignored, and for each counted position the rank of its label's score."""
    rng = np.random.default_rng(0)
    scores = rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float64)
    labels = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    labels[rng.random(labels.shape) < 1 / 3] = -1
    own = np.take_along_axis(scores, np.maximum(labels, 0)[:, None], 1)
    return scores, labels, (scores > own).sum(1)[labels >= 0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(40, 6), (5, 6, 7), (3, 6, 2, 5)], ids=str)
@pytest.mark.parametrize("name", ["accuracy", "top_1", "top_3", "top_6"])
def test_counts_of_right_answers(name: str, shape: tuple[int, ...], dtype: str) -> None:
    scores, labels, ranks = classified(shape)
    k = 1 if name == "accuracy" else int(name[-1])
    metric = metrics.get(name)
    assert metric.name == name
    for declared in (shape, ("batch", *shape[1:]), tuple(f"d{axis}" for axis in range(len(shape)))):
        results = metric_graph(metric, CLASSIFY, declared, dtype).run(x=scores.astype(dtype), label=labels)
        assert {array.dtype for array in results.values()} == {np.dtype("int64")}
        assert results["count"] == (labels >= 0).sum()
        assert results["sum"] == (ranks < k).sum()


def test_a_tie_goes_to_the_first() -> None:
    scores = np.array([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0]])
    graph = metric_graph(metrics.accuracy(), CLASSIFY, (2, 3), "float64")
    assert graph.run(x=scores, label=np.array([0, 1]))["sum"] == 2
    assert graph.run(x=scores, label=np.array([1, 2]))["sum"] == 0


def test_nothing_is_counted_where_all_labels_are_ignored() -> None:
    for metric in (metrics.accuracy(), metrics.top_k(2)):
        results = metric_graph(metric, CLASSIFY, ("batch", 3), "float32").run(
            x=np.zeros((4, 3), np.float32), label=np.full(4, -1)
        )
        assert (results["sum"], results["count"]) == (0, 0)


class WithoutIgnored(losses.LossBase):
    """A loss over class indices that ignores none."""

    name = "counts_all"

    def label_specs(self, predictions: Any) -> tuple[losses.LabelSpec, ...]:
        (spec,) = losses.cross_entropy().label_specs(predictions)
        return (losses.LabelSpec(spec.name, spec.dtype, spec.shape, spec.minimum, spec.maximum),)

    def terms(self, predictions: Any, labels: Any) -> Any:
        return losses.cross_entropy().terms(predictions, labels)

    def options(self) -> dict[str, Any]:
        return {"name": self.name}


def test_a_loss_that_ignores_no_label_counts_all() -> None:
    loss = losses.get(WithoutIgnored())
    graph = metric_graph(metrics.accuracy(), loss, ("batch", 2), "float32")
    results = graph.run(x=np.array([[0, 1], [1, 0], [0, 1]], np.float32), label=np.array([1, 1, 1]))
    assert (results["sum"], results["count"]) == (2, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["mean_absolute_error", "mae", "mean_squared_error", "mse"])
def test_errors_of_values(name: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, targets = rng.standard_normal((2, 9, 3)).astype(dtype)
    results = metric_graph(metrics.get(name), REGRESS, ("batch", 3), dtype).run(x=x, label=targets)
    errors = np.abs(x.astype(np.float64) - targets) ** (2 if "s" in name.replace("absolute", "") else 1)
    np.testing.assert_allclose(results["sum"], errors.sum(), rtol=1e-6)
    assert results["sum"].dtype == np.dtype(dtype)
    assert (results["count"], results["count"].dtype) == (27, np.dtype("int64"))


def test_a_name_and_the_object_resolve() -> None:
    assert metrics.get("accuracy") == metrics.accuracy()
    assert metrics.get("top_5") == metrics.top_k(5)
    assert metrics.get("mae") == metrics.mean_absolute_error()
    assert metrics.get("mse") == metrics.mean_squared_error()
    metric = metrics.top_k(3)
    assert metrics.get(metric) is metric
    assert isinstance(metric, metrics.Metric)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: metrics.get("acc"), "there is no metric 'acc'; there is accuracy, mae, mean_absolute_error, .*, top_<k>"),
        (lambda: metrics.get("top_k"), "there is no metric 'top_k'"),
        (lambda: metrics.get(1), "a metric is a name or an object of burnish.metrics, not int; there is"),
        (lambda: metrics.top_k(0), "top_k: k must be at least 1, not 0"),
        (
            lambda: metric_graph(metrics.top_k(4), CLASSIFY, (2, 3), "float32"),
            "top_4: the prediction 'x' has 3 classes: choose k of at most 3",
        ),
        (
            lambda: metric_graph(metrics.accuracy(), REGRESS, (2, 3), "float32"),
            "accuracy compares class indices, and the loss mean_squared_error compares values: .* mean_absolute_error",
        ),
        (
            lambda: metric_graph(metrics.mean_absolute_error(), CLASSIFY, (2, 3), "float32"),
            "mean_absolute_error compares values, and the loss cross_entropy compares class indices: .* accuracy",
        ),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
