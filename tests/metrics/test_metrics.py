"""Metrics that are quotients, against closed forms in numpy; names, settings and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from burnish import losses, metrics
from burnish.errors import ConfigurationError
from oracles.metric_graphs import metric_graph

CLASSIFY = losses.cross_entropy(ignore_index=-1)
REGRESS = losses.mean_squared_error()


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
        figure = results.pop("figure")
        assert figure.dtype == np.dtype(dtype)
        assert figure == pytest.approx(metric.combine(results), rel=1e-6)
        assert {array.dtype for array in results.values()} == {np.dtype("int64")}
        assert results["count"] == (labels >= 0).sum()
        assert results["sum"] == (ranks < k).sum()


def test_a_tie_goes_to_the_first() -> None:
    scores = np.array([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0]])
    graph = metric_graph(metrics.accuracy(), CLASSIFY, (2, 3), "float64")
    assert graph.run(x=scores, label=np.array([0, 1]))["sum"] == 2
    assert graph.run(x=scores, label=np.array([1, 2]))["sum"] == 0


def test_the_most_probable_class_is_the_right_one() -> None:
    """As MixUp makes targets: shares of two classes."""
    scores = np.array([[1.0, 2.0, 0.0], [3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    targets = np.array([[0.4, 0.6, 0.0], [0.3, 0.0, 0.7], [0.0, 0.1, 0.9]])
    loss = losses.cross_entropy(probabilities=True)
    results = metric_graph(metrics.accuracy(), loss, ("batch", 3), "float64").run(x=scores, label=targets)
    assert (results["sum"], results["count"]) == (2, 3)


def test_nothing_is_counted_where_all_labels_are_ignored() -> None:
    for metric in (metrics.accuracy(), metrics.top_k(2)):
        results = metric_graph(metric, CLASSIFY, ("batch", 3), "float32").run(
            x=np.zeros((4, 3), np.float32), label=np.full(4, -1)
        )
        assert (results["sum"], results["count"]) == (0, 0)
        assert np.isnan(results["figure"])
        assert np.isnan(metric.combine(results))


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


ONE_OF_EACH = [
    metrics.accuracy(),
    metrics.top_k(3),
    metrics.mean_absolute_error(),
    metrics.mean_squared_error(),
    metrics.root_mean_squared_error(),
    metrics.r2(),
    metrics.perplexity(),
    metrics.normalized_entropy(),
    metrics.precision(),
    metrics.recall("macro"),
    metrics.f1(2),
    metrics.f1("weighted", threshold=0.25),
    metrics.precision(threshold=0.125),
    metrics.auc(),
    metrics.auc("macro", bins=512),
]


@pytest.mark.parametrize("metric", ONE_OF_EACH, ids=lambda metric: metric.name)
def test_a_metric_is_found_again_by_its_name(metric: metrics.Metric) -> None:
    assert metrics.get(metric.name) == metric
    assert metrics.is_known(metric)
    assert metrics.higher_is_better(metric.name) is metric.higher_is_better


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("top_k:5", metrics.top_k(5)),
        ("top_k:k=5", metrics.top_k(5)),
        ("f1:average=macro, threshold=0.3", metrics.f1("macro", threshold=0.3)),
        ("auc:bins=64", metrics.auc(bins=64)),
        ("recall:1", metrics.recall(1)),
        ("rmse", metrics.rmse()),
    ],
)
def test_settings_as_text(text: str, metric: metrics.Metric) -> None:
    assert metrics.get(text) == metric


def test_which_way_is_better() -> None:
    better = {name for name in ("accuracy", "top_3", "f1", "precision", "recall", "auc") if metrics.higher_is_better(name)}
    assert better == {"accuracy", "top_3", "f1", "precision", "recall", "auc"}
    assert not any(
        metrics.higher_is_better(name) for name in ("loss", "loss:a", "mae", "mse", "rmse", "perplexity", "unheard_of")
    )


@pytest.mark.parametrize("metric", ["accuracy", "f1:macro", "sum", "mine"])
def test_outputs_of_totals_are_told_apart(metric: str) -> None:
    for part in ("sum", "count", "hits"):
        assert metrics.total_of(metrics.output_name(metric, part)) == (metric, part)
    assert metrics.output_name("f1:macro", "hits") == "total:f1:macro:hits"
    assert metrics.output_name("accuracy", "sum") == "sum:accuracy"
    assert metrics.total_of(metric) is None


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
        (
            lambda: metrics.get("acc"),
            r"there is no metric 'acc' \(did you mean 'auc'\?\); choose among accuracy, auc, coco_map, f1, mae, .*, voc_map$",
        ),
        (lambda: metrics.get("top_k"), "metric 'top_k' needs the option 'k': give it"),
        (lambda: metrics.get("top_x"), "there is no metric 'top_x'"),
        (lambda: metrics.get("accuracy:5"), "metric 'accuracy' has no option '5'; it takes none"),
        (lambda: metrics.get("f1:mean=1"), "metric 'f1' has no option 'mean'; it takes average, threshold"),
        (lambda: metrics.get("f1:macro,0.3"), "metric 'f1:macro,0.3': settings are written name=value, .*, not '0.3'"),
        (lambda: metrics.get("f1:macro,average=micro"), "metric 'f1:macro,average=micro' gives average twice: give it once"),
        (
            lambda: metrics.get("f1:mean"),
            "f1: average must be 'binary', 'micro', 'macro', 'weighted' or the index of one class, not 'mean'",
        ),
        (lambda: metrics.auc(-1), "auc: average must be .* or the index of one class, not -1"),
        (lambda: metrics.recall(threshold=1), "recall: threshold must be a number between 0 and 1, not 1"),
        (lambda: metrics.auc(bins=1), "auc: bins must be a whole number of at least 2, not 1"),
        (
            lambda: metric_graph("f1", CLASSIFY, (2, 3)),
            "f1: the average 'binary' is for two classes, and the prediction 'x' has 3: use .* such as 'f1:macro'",
        ),
        (lambda: metric_graph("auc", CLASSIFY, (2, 3)), "auc: the average 'binary' is for two classes, .* such as 'auc:macro'"),
        (lambda: metric_graph("auc:3", CLASSIFY, (2, 3)), "auc:3: the prediction 'x' has 3 classes: give a class from 0 to 2"),
        (
            lambda: metric_graph("recall:macro", losses.bce_with_logits(), (5,)),
            r"recall:macro: the prediction 'x' has shape \[5\] and no axis of classes: use the average 'binary'",
        ),
        (
            lambda: metric_graph("precision:macro,threshold=0.3", CLASSIFY, (2, 3)),
            "precision:macro,threshold=0.3: the loss cross_entropy compares class indices, .*: leave threshold out",
        ),
        (
            lambda: metric_graph("precision:threshold=0.3", losses.hinge(), (2, 3)),
            "precision:threshold=0.3: the loss hinge reads scores, which are a yes above 0 .*: leave threshold out",
        ),
        (
            lambda: metric_graph("auc", REGRESS, (2, 3)),
            "auc compares classes or yes-or-no answers, and the loss mean_squared_error compares values: .*absolute_error",
        ),
        (
            lambda: metric_graph("f1", losses.cross_entropy(probabilities=True), (2, 3)),
            "f1 compares classes or yes-or-no answers, and the loss cross_entropy compares values",
        ),
        (
            lambda: metric_graph("perplexity", REGRESS, (2, 3)),
            "perplexity compares class indices, and the loss mean_squared_error compares values",
        ),
        (
            lambda: metric_graph("perplexity", losses.multi_margin(), (2, 3)),
            "perplexity: the loss multi_margin reads scores that are no probabilities: leave the metric out, or use accuracy",
        ),
        (
            lambda: metric_graph("top_2", losses.bce_with_logits(), (2, 3)),
            "top_2 compares class indices, and the loss bce_with_logits compares values",
        ),
        (lambda: metrics.get(1), "a metric is a name or an object of burnish.metrics, not 1; choose among"),
        (lambda: metrics.top_k(0), "top_k: k must be at least 1, not 0"),
        (
            lambda: metric_graph(metrics.top_k(4), CLASSIFY, (2, 3), "float32"),
            "top_4: the prediction 'x' has 3 classes: choose k of at most 3",
        ),
        (
            lambda: metric_graph(metrics.accuracy(), REGRESS, (2, 3), "float32"),
            "accuracy compares classes or yes-or-no answers, and the loss mean_squared_error compares values: .*absolute_error",
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
