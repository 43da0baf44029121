"""Normalized entropy against its closed form, of logits and of probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from burnish import losses, metrics
from burnish.errors import ConfigurationError
from oracles.metric_graphs import added, metric_graph

METRIC = metrics.normalized_entropy()


def expected(logits: np.ndarray, targets: np.ndarray) -> float:
    q, p = 1 / (1 + np.exp(-logits)), targets.mean()
    loss = -(targets * np.log(q) + (1 - targets) * np.log(1 - q)).mean()
    return float(loss / -(p * np.log(p) + (1 - p) * np.log(1 - p)))


@pytest.mark.parametrize(
    "loss", [losses.bce_with_logits(pos_weight=3.0), losses.binary_cross_entropy()], ids=lambda loss: loss.name
)
@pytest.mark.parametrize("shape", [(40, 1), (7, 3)], ids=str)
def test_it_is_the_loss_beside_that_of_the_mean(loss: losses.Loss, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=shape)
    targets = (rng.random(shape) < 0.25).astype(np.float64)
    x = logits if loss.name == "bce_with_logits" else 1 / (1 + np.exp(-logits))
    graph = metric_graph(METRIC, loss, ("batch", *shape[1:]))
    whole = graph.run(x=x, label=targets)
    assert whole["figure"] == pytest.approx(expected(logits, targets), rel=1e-12)
    parts = added([graph.run(x=x[:3], label=targets[:3]), graph.run(x=x[3:], label=targets[3:])])
    assert METRIC.combine(parts) == pytest.approx(expected(logits, targets), rel=1e-12)


def test_a_model_of_the_mean_alone_has_one() -> None:
    targets = np.array([[1.0], [0.0], [0.0], [0.0]])
    results = metric_graph(METRIC, losses.bce_with_logits(), ("batch", 1)).run(x=np.full((4, 1), np.log(1 / 3)), label=targets)
    assert results["figure"] == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("answer", [0.0, 1.0])
def test_answers_that_are_all_the_same_have_none(answer: float) -> None:
    results = metric_graph(METRIC, losses.bce_with_logits(), ("batch", 1)).run(x=np.ones((4, 1)), label=np.full((4, 1), answer))
    assert np.isnan(results.pop("figure"))
    assert np.isnan(METRIC.combine(results))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            losses.cross_entropy(),
            "normalized_entropy compares answers of yes or no, and the loss cross_entropy compares class",
        ),
        (losses.mean_squared_error(), "normalized_entropy: the loss mean_squared_error reads no answers of yes or no"),
        (losses.hinge(), "normalized_entropy: the loss hinge reads no answers of yes or no"),
    ],
    ids=["classes", "values", "scores"],
)
def test_losses_that_it_does_not_fit(loss: losses.Loss, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        metric_graph(METRIC, loss, ("batch", 3))
