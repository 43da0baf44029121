"""A run of the trainer that workers and one process take alike, and how two runs are compared."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import numpy as np
import pytest
from worker_processes import tell

import burnish
from burnish.data import ArrayDataset, shift_images
from burnish.distributed.connection.joining import join
from burnish.training import Trainer
from burnish.training.checkpoint import read_checkpoint
from oracles.normalized_networks import residual

SAMPLES, BATCH, EPOCHS = 34, 8, 3  # the last batch has 2 samples: a third worker has none of it


def dataset(samples: int = SAMPLES, seed: int = 0) -> ArrayDataset:
    generator = np.random.default_rng(seed)
    return ArrayDataset(
        {"x": generator.standard_normal((samples, 3, 8, 8)), "labels": generator.integers(0, 5, samples, dtype=np.int64)}
    )


def trainer(saved: str, folder: str, parallel: bool, epochs: int = EPOCHS, timeout: float = 600, **options) -> Trainer:
    exchange = options.pop("exchange", {})
    return Trainer(
        burnish.Program.load(saved),
        options.pop("data", dataset()),
        dataset(13, seed=1),
        epochs=epochs,
        batch_size=BATCH,
        seed=3,
        run_directory=folder,
        engine="torch",
        threads=1,
        augment=shift_images("x"),
        progress=False,
        parallel=burnish.DataParallel(group=join(timeout=timeout, first_contact=600), **exchange) if parallel else None,
        **options,
    )


def train(rank: int, saved: str, folder: str, options: dict):
    made = trainer(saved, folder, parallel=True, **options)
    result = made.run()
    made.group.close()
    return result.metrics, made.session.state()


def wait_at_step(made: Trainer, step: int, rank: int) -> None:
    """Run a trainer that says when it is at a step; there one of its workers waits, to be killed."""
    steps = made.session.step

    def counted(*arguments, **options):
        if made.session.step_count == step:
            tell(f"at step {step}")
            time.sleep(3600 if rank == 1 else 0)
        return steps(*arguments, **options)

    made.session.step = counted
    made.run()


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: text for name, text in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def assert_same_run(folder: Path, other: Path) -> None:
    for row, expected in zip(rows(folder), rows(other), strict=True):
        assert row.keys() == expected.keys()
        for name, text in expected.items():
            assert (row[name] == "") == (text == "")
            if text:
                assert float(row[name]) == pytest.approx(float(text), rel=1e-9, abs=1e-12), name
    state, expected = (read_checkpoint(path / "checkpoints" / "latest.safetensors").state for path in (folder, other))
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-9, atol=1e-10, err_msg=name)


def save_program(folder: Path) -> str:
    program = burnish.compile(residual(), optimizer="sgd:lr=0.05,momentum=0.9", metrics=("accuracy",))
    return str(program.save(folder / "residual"))
