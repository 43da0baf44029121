"""Which epoch of a run is the best."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from burnish.training.cursor import Position


def taken(watched: str, epochs: list[tuple[float, float]]) -> list[bool]:
    """Whether each epoch, of a metric and a loss, is the best so far; the position is written and read between them."""
    position, results = Position(), []
    for metric, loss in epochs:
        position = Position.from_dict(asdict(position))
        position.metrics = {"loss": loss, "coco_map": metric, "mae": metric}
        position.end_epoch()
        results.append(position.take_best(watched))
    return results


def test_while_a_metric_finds_nothing_the_loss_decides():
    assert taken("coco_map", [(0, 3.0), (0, 2.0), (0, 2.5), (0, math.nan), (0.1, 9.0), (0.1, 1.0), (0, 0.5)]) == [
        True,
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert taken("mae", [(0, 3.0), (0, 2.0)]) == [True, False]


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="best_loss is 'low'"):
        Position.from_dict({**asdict(Position()), "best_loss": "low"})
