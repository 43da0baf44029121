"""What a run came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.training.reports import Row


@dataclass(frozen=True)
class TrainingResult:
    """What a run came to.

    Attributes:
        metrics: loss and metrics after the last epoch: on the evaluation data where there are any, else the averages over
            the training batches of that epoch; of a loss with ``reduction="sum"``, the sum over them.
        history: the rows of ``metrics.csv``; of several workers, the first alone has them.
        best: ``epoch`` (from 1), ``metric``, ``value`` of the best epoch, whose state ``checkpoints/best.safetensors`` holds.
        steps: steps since the run first started.
        seconds: time spent in training since the run first started.
        waiting: the share of the time of its steps in which the run waited for data, 0 to 1.
        run_directory: where reports and checkpoints are.
        stopped: why a callback stopped the run before its last epoch; None where none did.
    """

    metrics: dict[str, float]
    history: list[Row]
    best: dict[str, Any] | None
    steps: int
    seconds: float
    run_directory: Path
    waiting: float = 0.0
    stopped: str | None = None
