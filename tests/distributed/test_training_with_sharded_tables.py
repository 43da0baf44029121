"""A run of a trainer whose workers hold tables in parts is that of one process: figures, checkpoints, and where it goes on."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from runs_of_workers import assert_same_run, wait_at_step
from worker_processes import Workers, run

import burnish
from burnish import optim
from burnish.data import ArrayDataset
from burnish.distributed import join
from burnish.training import Trainer
from burnish.training.checkpoint import read_checkpoint
from oracles.embedding_tables import table_batches, tables_program

SAMPLES, BATCH, EPOCHS = 26, 6, 2  # of the last batch, of 2 samples, a third worker has none, and of 5 to evaluate one has fewer


def dataset(seed: int, samples: int) -> ArrayDataset:
    batch = table_batches(seed + 1, samples)[seed]
    return ArrayDataset(batch)


def trainer(saved: str, folder: str, parallel: bool, **options) -> Trainer:
    group = join(timeout=600, first_contact=600) if parallel else None
    return Trainer(
        burnish.Program.load(saved),
        dataset(0, SAMPLES),
        dataset(1, 26),
        epochs=options.pop("epochs", EPOCHS),
        batch_size=BATCH,
        seed=3,
        run_directory=folder,
        engine="torch",
        threads=1,
        progress=False,
        parallel=burnish.DataParallel(group=group, shard_tables="auto") if parallel else None,
        **options,
    )


def train(rank: int, saved: str, folder: str, options: dict, start: str | None = None):
    made = trainer(saved, folder, parallel=True, **options)
    if start is not None:
        made.start_from(Path(start))
    started = made.session.state()
    result = made.run()
    if rank:
        made.session.take_part()
    else:
        made.session.export(Path(folder) / "tuned.onnx")
    made.session.close()
    made.group.close()
    return result.metrics, started


def stop_early(rank: int, saved: str, folder: str):
    """Train with a checkpoint after each step, and be gone in the middle of the second epoch."""
    wait_at_step(trainer(saved, folder, parallel=True, checkpoint_every=1), 7, rank)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    program = tables_program(optim.adagrad(lr=0.25), metrics=("accuracy",))
    return str(program.save(tmp_path_factory.mktemp("program") / "tables"))


@pytest.fixture(scope="module")
def alone(saved, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    made = trainer(saved, str(folder), parallel=False)
    made.run()
    made.session.export(folder / "tuned.onnx")
    return folder


@pytest.mark.slow
def test_a_run_and_one_that_starts_from_its_checkpoint(saved, alone, tmp_path):
    """The second run is of another optimizer: of its state a part is the checkpoint's, and a part its own."""
    folder = tmp_path / "run"
    results = run(train, 3, saved, str(folder), {})
    assert all(metrics == results[0][0] for metrics, _ in results)
    assert_same_run(folder, alone)
    session = burnish.Session(burnish.Program.load(saved))
    batch = table_batches(1)[0]
    session.restore(alone / "checkpoints" / "latest.safetensors")
    expected = session.predict(batch)["logits"]
    inputs = {name: array for name, array in batch.items() if name != "labels"}
    (logits,) = burnish.engines.get("onnxruntime").run(burnish.load(folder / "tuned.onnx"), inputs).values()
    np.testing.assert_allclose(logits, expected, rtol=1e-9)


@pytest.mark.slow
def test_a_run_that_starts_from_the_checkpoint_of_another_optimizer(saved, alone, tmp_path):
    other = str(burnish.Program.load(saved).with_optimizer(optim.rowwise_adagrad(lr=0.1)).save(tmp_path / "other"))
    latest = alone / "checkpoints" / "latest.safetensors"
    for _, started in run(train, 2, other, str(tmp_path / "run"), {"epochs": 1}, str(latest)):
        for name, array in read_checkpoint(latest).state.items():
            if name.startswith("param/"):
                assert array.tobytes() == started[name].tobytes(), name


@pytest.mark.slow
def test_a_worker_that_dies_and_others_that_go_on(saved, alone, tmp_path):
    """The run goes on from the last checkpoint with another number of workers, and comes to the end of one process."""
    folder = tmp_path / "run"
    with Workers(stop_early, 3, saved, str(folder)) as workers:
        for rank in range(3):
            workers.message(rank)
        workers.processes[1].kill()
        outcomes = workers.outcomes()
    for rank in (0, 2):
        assert re.search(r"WorkerError: Rank 1 of 3 \(.+\) is gone\.", outcomes[rank].error), outcomes[rank].error
    assert read_checkpoint(folder / "checkpoints" / "latest.safetensors").step == 7
    run(train, 2, saved, str(folder), {"resume": True})
    assert_same_run(folder, alone)
