"""Which epoch of a run is the best."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from burnish.training.run_position import Position


def taken(watched: str, epochs: list[tuple[float, float]]) -> list[bool]:
    """Whether each epoch, of a metric and a loss, is the best so far; the position is written and read between them."""
    position, results = Position(), []
    for metric, loss in epochs:
        position = Position.from_dict(asdict(position))
        position.metrics = {"loss": loss, "coco_map": metric, "mae": metric}
        position.end_epoch()
        results.append(position.take_best(watched))
    return results


@pytest.mark.parametrize(
    ("metric", "epochs", "best"),
    [
        ("coco_map", [(0, 3.0), (0, 2.0), (0, 2.5), (0, math.nan), (0.1, 9.0), (0.1, 1.0), (0, 0.5)], [0, 1, 4, 5]),
        ("coco_map", [(1.0, 0.6), (0.9, 0.1), (1.0, 0.7), (1.0, 0.4)], [0, 3]),
        ("mae", [(0, 3.0), (0, 2.0), (0, 2.0), (0.1, 1.0)], [0, 1]),
        ("mae", [(0.5, math.nan), (0.5, 2.0), (0.5, math.nan)], [0, 1]),
        ("mae", [(math.nan, 3.0), (math.nan, 2.0), (7.0, 9.0)], [0, 1, 2]),
        ("loss", [(0, 3.0), (1, 3.0), (2, 2.0)], [0, 2]),
    ],
)
def test_of_epochs_with_the_same_figure_the_least_loss_decides(metric, epochs, best):
    assert [epoch for epoch, is_best in enumerate(taken(metric, epochs)) if is_best] == best


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="best_loss is 'low'"):
        Position.from_dict({**asdict(Position()), "best_loss": "low"})
