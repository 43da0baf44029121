"""Losses of detectors and a teacher among two workers: their steps are those of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worker_processes import run

import burnish
from burnish import losses
from burnish.distributed.connection.joining import join
from oracles.scaled_model import scaled_outputs

N, CLASSES = 5, 3


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 0.5, (N, 3, 2))
    boxes = np.concatenate([rng.uniform(0.3, 0.7, (N, 6, 2)), rng.uniform(0.1, 0.5, (N, 6, 2))], 2)
    return {
        "in:places": boxes,
        "in:scores": rng.standard_normal((N, 6, CLASSES + 1)),
        "labels": rng.integers(-1, CLASSES, (N, 3)),
        "boxes": np.concatenate([corner, corner + rng.uniform(0.1, 0.5, (N, 3, 2))], 2),
    }


def programs(folder: Path) -> list[str]:
    samples = {"places": batch()["in:places"], "scores": batch()["in:scores"]}
    anchors = np.random.default_rng(4).uniform(0.2, 0.8, (6, 4))
    optimizer = burnish.optim.sgd(lr=0.0625, momentum=0)
    saved = []
    for loss in (losses.ssd(anchors=anchors), losses.detr()):
        program = burnish.compile(scaled_outputs(samples), loss=loss, outputs=["places", "scores"], optimizer=optimizer)
        saved.append(str(program.save(folder / loss.name)))
    return saved


def steps(rank: int, saved: list[str], parts: list[slice]) -> list[list[float]]:
    figures = []
    group = join(timeout=600)
    for path in saved:
        session = burnish.Session(
            burnish.Program.load(path), engine="torch", threads=1, parallel=burnish.DataParallel(group=group)
        )
        own = {name: array[parts[rank]] for name, array in batch().items()}
        losses_of_steps = [session.step(own)["loss"] for _ in range(3)]
        figures.append([*losses_of_steps, *(float(np.abs(array).sum()) for array in session.state().values())])
        session.close()
    group.close()
    return figures


@pytest.mark.slow
def test_two_workers_take_the_steps_of_one(tmp_path: Path) -> None:
    saved = programs(tmp_path)
    both = run(steps, 2, saved, [slice(0, 2), slice(2, None)])
    for place, path in enumerate(saved):
        session = burnish.Session(burnish.Program.load(path), engine="torch", threads=1)
        alone = [session.step(batch())["loss"] for _ in range(3)]
        alone += [float(np.abs(array).sum()) for array in session.state().values()]
        for figures in both:
            np.testing.assert_allclose(figures[place], alone, rtol=1e-10)
