"""Metrics against scikit-learn: ties, absent classes, ignored labels, and batches of uneven size against the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as scikit

from burnish import losses, metrics
from oracles.combinations import diagonal, named
from oracles.metric_graphs import FIGURE, added, metric_graph

CLASSES = 5
ABSENT = 3  # never a label
SAMPLES = 90
BATCHES = (1, 40, 7, 42)
CLASSIFY = losses.cross_entropy(ignore_index=-7, weight=(1, 2, 3, 4, 5), label_smoothing=0.1)
RETRIEVALS = {"precision": scikit.precision_score, "recall": scikit.recall_score, "f1": scikit.f1_score}


def classified(classes: int = CLASSES, shape: tuple[int, ...] = (), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits of which a third of the rows stand there twice, and labels that they say something of; a fifth is ignored."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(SAMPLES, classes, *shape))
    labels = rng.integers(0, classes, (SAMPLES, *shape))
    labels[labels == ABSENT] = 0
    rows += 1.5 * (np.arange(classes).reshape(-1, *[1] * len(shape)) == labels[:, None])
    rows[SAMPLES // 3 : 2 * (SAMPLES // 3)] = rows[: SAMPLES // 3]
    labels[rng.random(labels.shape) < 0.2] = -7
    return rows, labels


def counted(x: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of scores and labels of the positions that count."""
    rows, flat = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]), labels.reshape(-1)
    return rows[flat >= 0], flat[flat >= 0]


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(-1, keepdims=True))
    result: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return result


def in_batches(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    ends = np.cumsum(BATCHES)
    assert ends[-1] == SAMPLES
    for end, size in zip(ends, BATCHES, strict=True):
        yield [array[end - size : end] for array in arrays]


def check(name: str, loss: losses.Loss, x: np.ndarray, label: np.ndarray, expected: float, rel: float = 1e-12) -> Any:
    """Assert what the graph says of the whole, on two runtimes, and what batches add up to; return the added totals."""
    metric = metrics.get(name)
    whole = metric_graph(metric, loss, x.shape)
    parts = metric_graph(metric, loss, ("batch", *x.shape[1:])).session()
    results = whole.run(x=x, label=label)
    assert results[FIGURE] == pytest.approx(expected, rel=rel)
    assert whole.run_reference(x=x, label=label)[FIGURE] == pytest.approx(expected, rel=rel)
    small = metric_graph(metric, loss, ("batch", *x.shape[1:]), "float32")
    cast = label if label.dtype.kind == "i" else label.astype(np.float32)
    assert small.run(x=x.astype(np.float32), label=cast)[FIGURE] == pytest.approx(expected, rel=1e-5)
    totals = added([parts(x=some, label=labels) for some, labels in in_batches(x, label)])
    for part, total in totals.items():
        assert total.shape == results[part].shape
        if total.dtype.kind == "i":
            np.testing.assert_array_equal(total, results[part])
        else:
            np.testing.assert_allclose(total, results[part], rtol=1e-12)
    return totals


@diagonal(
    ("name", RETRIEVALS), ("average", ["macro", "micro", "weighted", 0, 2]), ("shape", named([(), (3,), (2, 2)], str)), test=9
)
def test_retrieval_of_classes(name: str, average: str | int, shape: tuple[int, ...]) -> None:
    x, labels = classified(shape=shape)
    rows, flat = counted(x, labels)
    assert ABSENT not in flat
    assert ABSENT in rows.argmax(1)
    how = {"average": average} if isinstance(average, str) else {"labels": [average], "average": "macro"}
    expected = RETRIEVALS[name](flat, rows.argmax(1), zero_division=0, **how)
    totals = check(f"{name}:{average}", CLASSIFY, x, labels, expected)
    assert metrics.get(f"{name}:{average}").combine(totals) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", RETRIEVALS)
def test_a_class_that_appears_nowhere_is_left_out(name: str) -> None:
    x, labels = classified()
    x[:, ABSENT] = -100.0
    rows, flat = counted(x, labels)
    expected = RETRIEVALS[name](flat, rows.argmax(1), average="macro")  # scikit-learn goes by the classes that appear
    totals = check(f"{name}:macro", CLASSIFY, x, labels, expected)
    assert metrics.get(f"{name}:macro").combine(totals) == pytest.approx(expected, rel=1e-12)
    nothing = metric_graph(f"{name}:{ABSENT}", CLASSIFY, x.shape).run(x=x, label=labels)
    assert np.isnan(nothing.pop(FIGURE))
    assert np.isnan(metrics.get(f"{name}:{ABSENT}").combine(nothing))


@pytest.mark.parametrize("name", RETRIEVALS)
def test_retrieval_of_two_classes(name: str) -> None:
    x, labels = classified(classes=2)
    rows, flat = counted(x, labels)
    expected = RETRIEVALS[name](flat, rows.argmax(1))
    totals = check(name, losses.cross_entropy(ignore_index=-7), x, labels, expected)
    assert metrics.get(name).combine(totals) == pytest.approx(expected, rel=1e-12)


def answered(shape: tuple[int, ...] = (), seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Log odds on a grid of halves, so that many tie, some of them at 0; and targets of 0 and 1."""
    rng = np.random.default_rng(seed)
    targets = (rng.random((SAMPLES, *shape)) < 0.4).astype(np.float64)
    return np.round(2 * (rng.normal(size=targets.shape) + targets - 0.5)) / 2, targets


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


YES_OR_NO = {
    "logits": (losses.bce_with_logits(), lambda x: x, lambda y: y),
    "probabilities": (losses.binary_cross_entropy(), sigmoid, lambda y: y),
    "scores": (losses.hinge(), lambda x: x, lambda y: 2 * y - 1),
}


@diagonal(
    ("name", [*RETRIEVALS, "accuracy", "auc"]), ("scale", YES_OR_NO), ("shape", named([(), (1,), (3,), (2, 2)], str)), test=12
)
def test_yes_or_no(name: str, scale: str, shape: tuple[int, ...]) -> None:
    loss, predict, target = YES_OR_NO[scale]
    x, y = answered(shape)
    references = {**RETRIEVALS, "accuracy": scikit.accuracy_score, "auc": scikit.roc_auc_score}
    expected = references[name](y.reshape(-1), x.reshape(-1) if name == "auc" else x.reshape(-1) > 0)
    totals = check(name, loss, predict(x), target(y), expected)
    # Halves lie in bins of their own, so that the binned area is the exact one.
    assert metrics.get(name).combine(totals) == pytest.approx(expected, rel=1e-12)


@diagonal(("name", [*RETRIEVALS, "auc"]), ("average", ["macro", "micro", "weighted", 2]), test=9)
def test_several_questions(name: str, average: str | int) -> None:
    x, y = answered((3,))
    if name == "auc":
        of_two = [scikit.roc_auc_score(y[:, n], x[:, n]) for n in range(3)]
        expected = of_two[2] if average == 2 else scikit.roc_auc_score(y, x, average=average)
    else:
        how = {"average": average} if isinstance(average, str) else {"labels": [average], "average": "macro"}
        expected = RETRIEVALS[name](y, x > 0, **how)
    totals = check(f"{name}:{average}", losses.bce_with_logits(), x, y, expected)
    assert metrics.get(f"{name}:{average}").combine(totals) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", ["logits", "probabilities"])
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_a_threshold(threshold: float, scale: str) -> None:
    loss, predict, target = YES_OR_NO[scale]
    x, y = answered((2,))
    expected = scikit.f1_score(y.reshape(-1), sigmoid(x).reshape(-1) > threshold)
    totals = check(f"f1:threshold={threshold}", loss, predict(x), target(y), expected)
    assert metrics.f1(threshold=threshold).combine(totals) == pytest.approx(expected, rel=1e-12)


@diagonal(("average", ["macro", "weighted", "micro", 0, 2]), ("shape", named([(), (3,)], str)), test=3)
def test_one_class_against_the_others(average: str | int, shape: tuple[int, ...]) -> None:
    x, labels = classified(shape=shape)
    rows, flat = counted(x, labels)
    p, hot = softmax(rows), np.eye(CLASSES)[flat]
    present = [n for n in range(CLASSES) if n != ABSENT]  # scikit-learn has no area of a class that is not there
    if average == "micro":
        expected = scikit.roc_auc_score(hot, p, average="micro")
    elif isinstance(average, int):
        expected = scikit.roc_auc_score(hot[:, average], p[:, average])
    else:
        expected = scikit.roc_auc_score(hot[:, present], p[:, present], average=average)
    metric = metrics.auc(average)
    totals = check(metric.name, CLASSIFY, x, labels, expected)
    bound = metric.error_bound(totals)
    assert abs(metric.combine(totals) - expected) <= min(bound, 5e-4) + 1e-12  # the bound also counts true ties, which do no harm
    coarse = metrics.auc(average, bins=4)
    totals = check(coarse.name, CLASSIFY, x, labels, expected)
    assert 1e-4 < abs(coarse.combine(totals) - expected) <= coarse.error_bound(totals) + 1e-12


def test_the_area_of_two_classes_is_that_of_the_second() -> None:
    x, labels = classified(classes=2)
    rows, flat = counted(x, labels)
    check("auc", losses.cross_entropy(ignore_index=-7), x, labels, scikit.roc_auc_score(flat, softmax(rows)[:, 1]))


@pytest.mark.parametrize("loss", ["nll", "multi_margin"])
def test_the_area_by_log_probabilities_and_by_scores(loss: str) -> None:
    x, labels = classified()
    labels = np.maximum(labels, 0)
    x = np.log(softmax(x)) if loss == "nll" else x
    present = [n for n in range(CLASSES) if n != ABSENT]
    expected = scikit.roc_auc_score(np.eye(CLASSES)[labels][:, present], x[:, present], average="macro")
    check("auc:macro", losses.get(loss), x, labels, expected)


def test_probabilities_of_zero_and_one_have_a_place() -> None:
    x = np.array([0.0, 1.0, 1.0, 0.0, 1e-6, 1 - 1e-6] * 15)
    y = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0] * 15)
    totals = check("auc", losses.binary_cross_entropy(), x, y, scikit.roc_auc_score(y, x), rel=1e-12)
    assert totals["positives"].sum() + totals["negatives"].sum() == SAMPLES


def test_an_area_needs_both_kinds() -> None:
    results = metric_graph("auc", losses.bce_with_logits(), ("batch",)).run(x=np.arange(4.0), label=np.ones(4))
    assert np.isnan(results.pop(FIGURE))
    assert np.isnan(metrics.auc().combine(results))


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", "focal"])
def test_perplexity(loss: str) -> None:
    x, labels = classified()
    rows, flat = counted(x, labels)
    expected = np.exp(scikit.log_loss(flat, softmax(rows), labels=range(CLASSES)))
    given = np.log(softmax(x)) if loss == "nll" else x
    totals = check("perplexity", losses.get({"name": loss, "ignore_index": -7}), given, labels, expected)
    assert metrics.perplexity().combine(totals) == pytest.approx(expected, rel=1e-12)


def test_perplexity_beyond_every_number_is_infinite() -> None:
    totals = {"negative_log_likelihood": np.array(1e6), "positions": np.array(10)}
    assert metrics.perplexity().combine(totals) == np.inf


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("mae", scikit.mean_absolute_error),
        ("mse", scikit.mean_squared_error),
        ("rmse", scikit.root_mean_squared_error),
    ],
)
def test_values(name: str, reference: Any) -> None:
    x, y = np.random.default_rng(5).normal(size=(2, SAMPLES, 4))
    expected = reference(y.reshape(-1), x.reshape(-1))
    totals = check(name, losses.huber(), x, y, expected)
    assert metrics.get(name).combine(totals) == pytest.approx(expected, rel=1e-12)


def test_the_coefficient_of_determination() -> None:
    """Of targets far from 0 too; a value that is the same in all samples has none."""
    rng = np.random.default_rng(7)
    y = rng.normal(size=(SAMPLES, 3)) * [1, 50, 1000] + [0, 1e6, -3]
    x = y + rng.normal(size=y.shape) * [0.5, 20, 2000]
    expected = scikit.r2_score(y, x)
    totals = check("r2", losses.huber(), x, y, expected, rel=1e-7)
    assert metrics.r2().combine(totals) == pytest.approx(expected, rel=1e-7)
    y[:, 1] = 7e5
    totals = check("r2", losses.huber(), x, y, scikit.r2_score(y[:, [0, 2]], x[:, [0, 2]]), rel=1e-7)
    assert np.isnan(metrics.r2().combine({name: total[1] for name, total in totals.items()}))


@pytest.mark.parametrize("name", ["mae", "mse", "rmse", "f1", "auc", "perplexity"])
def test_sixteen_bits_add_up_in_thirty_two(name: str) -> None:
    rng = np.random.default_rng(6)
    loss = {"perplexity": losses.cross_entropy(), "f1": losses.bce_with_logits(), "auc": losses.bce_with_logits()}.get(
        name, losses.huber()
    )
    x = rng.normal(size=(70_000, 2)).astype(np.float16)
    label = rng.integers(0, 2, 70_000 if name == "perplexity" else x.shape)
    label = label if name == "perplexity" else label.astype(np.float16)
    wide = metric_graph(name, loss, ("batch", 2)).run(
        x=x.astype(np.float64), label=label.astype(np.float64) if label.ndim > 1 else label
    )
    narrow = metric_graph(name, loss, ("batch", 2), "float16").run(x=x, label=label)
    assert narrow[FIGURE].dtype == np.float16
    assert narrow[FIGURE] == pytest.approx(wide[FIGURE], rel=1e-3)
    assert all(total.dtype in (np.int64, np.float32) for part, total in narrow.items() if part != FIGURE)
