"""A run of several workers is that of one process: the same figures and checkpoints, however many there are."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs_of_workers import assert_same_run, dataset, save_program, train, trainer, wait_at_step
from worker_processes import Workers, run

from burnish.distributed.connection.joining import join
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.errors import CheckpointError, DataError, WorkerError
from burnish.training.callbacks import Callback
from burnish.training.checkpoint import read_checkpoint
from burnish.training.workers import agree, on_all, on_first, spread
from oracles import combinations


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    return save_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def alone(saved, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    trainer(saved, str(folder), parallel=False).run()
    return folder


@pytest.mark.slow
@combinations.spread("workers", [2, 3])
def test_a_run_of_workers_is_that_of_one_process(saved, alone, tmp_path, workers):
    folder = tmp_path / "run"
    results = run(train, workers, saved, str(folder), {})
    assert_same_run(folder, alone)
    for metrics, state in results[1:]:
        assert metrics == results[0][0]
        for name, array in state.items():
            assert array.tobytes() == results[0][1][name].tobytes(), f"{name} is not the same bits on all workers"


def train_sharded(rank: int, saved: str, folder: str):
    made = trainer(saved, folder, parallel=True, exchange={"shard_optimizer": True})
    result = made.run()
    made.session.close()
    made.group.close()
    return result.metrics


@pytest.mark.slow
def test_a_run_with_the_state_in_shares_writes_the_checkpoints_of_one_process(saved, alone, tmp_path):
    folder = tmp_path / "run"
    results = run(train_sharded, 2, saved, str(folder))
    assert results[0] == results[1]
    assert_same_run(folder, alone)


def stop_early(rank: int, saved: str, folder: str):
    """Train with a checkpoint after each step, and be gone in the middle of the second epoch."""
    wait_at_step(trainer(saved, folder, parallel=True, checkpoint_every=1), 7, rank)


@pytest.mark.slow
def test_a_run_goes_on_within_an_epoch_with_any_number_of_workers(saved, alone, tmp_path):
    folder = tmp_path / "run"
    with Workers(stop_early, 3, saved, str(folder)) as workers:
        for rank in range(3):
            workers.message(rank)
        workers.processes[1].kill()
        outcomes = workers.outcomes()
    for rank in (0, 2):
        assert re.search(r"WorkerError: Rank 1 of 3 \(.+\) is gone\.", outcomes[rank].error), outcomes[rank].error
        assert "Training stopped in epoch 2, batch 3; the state before it is saved in" in outcomes[rank].error or rank
    assert read_checkpoint(folder / "checkpoints" / "latest.safetensors").step == 7
    shutil.copytree(folder, tmp_path / "by one")
    run(train, 2, saved, str(folder), {"resume": True})
    assert_same_run(folder, alone)
    trainer(saved, str(tmp_path / "by one"), parallel=False, resume=True).run()
    assert_same_run(tmp_path / "by one", alone)


def fail_at_start(rank: int, saved: str, folder: str, kind: str):
    if kind == "data":
        trainer(saved, folder, parallel=True, data=dataset(seed=rank))
    elif kind == "epochs":
        trainer(saved, folder, parallel=True, epochs=2 + rank)
    elif kind == "folder":
        trainer(saved, folder, parallel=True, resume=True)
    else:
        trainer(saved, folder, parallel=True, state={} if rank else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "errors"),
    [
        ("data", [r"the training data is .* on rank 0, and .* on rank 1. Start all of them with the same command"] * 2),
        ("epochs", [r"WorkerError: The workers do not train the same: epochs is 2 on rank 0, and 3 on rank 1"] * 2),
        ("folder", [r"CheckpointError: There is nothing to resume", r"WorkerError: Rank 0 stopped: There is nothing to resume"]),
        ("state", [r"WorkerError: Rank 1 stopped: The state does not fit", r"ConfigurationError: The state does not fit"]),
    ],
)
def test_what_differs_or_fails_at_the_start_stops_all(saved, tmp_path, kind, errors):
    with Workers(fail_at_start, 2, saved, str(tmp_path / "run"), kind) as workers:
        outcomes = workers.outcomes()
    for outcome, error in zip(outcomes, errors, strict=True):
        assert outcome.error is not None
        with pytest.raises(AssertionError, match=error):
            raise AssertionError(outcome.error)


def nan_on_one(rank: int, saved: str, folder: str):
    data = dataset()
    data.arrays["x"][17] = np.nan
    trainer(saved, folder, parallel=True, data=data).run()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_all_at_the_same_step(saved, tmp_path):
    with Workers(nan_on_one, 2, saved, str(tmp_path / "run")) as workers:
        first, second = (outcome.error for outcome in workers.outcomes())
    assert first.startswith("NonFiniteLossError: The loss at step ")
    assert second.startswith(first[: first.index(" is ")])


def test_alone_nothing_is_exchanged():
    group = ProcessGroup(0, 1)
    agree(group, {"epochs": 3})
    assert on_first(group, lambda: 5, "a number") == 5
    state = {"param/w": np.ones(2)}
    assert spread(group, state) == state
    with pytest.raises(CheckpointError, match="damaged"):
        on_first(group, _raise, "the checkpoint")


def _raise() -> None:
    raise CheckpointError("it is damaged")


def read_on_all(rank: int, unreadable: tuple[int, ...], message: str):
    def read() -> int:
        if rank in unreadable:
            raise DataError(message.format(rank=rank))
        return rank

    with join(first_contact=60) as group:
        return on_all(group, read, "read the data")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unreadable", "message", "errors"),
    [
        ((), "", [None, None, None]),
        (
            (1,),
            "no such file",
            ["WorkerError: Rank 1 stopped: no such file", "DataError: no such file", "WorkerError: Rank 1 stopped: no such file"],
        ),
        (
            (0, 1, 2),
            "no such file",
            ["DataError: no such file", "WorkerError: Rank 0 stopped: no such file", "WorkerError: Rank 0 stopped: no such file"],
        ),
        (
            (0, 2),
            "{rank} is empty",
            ["DataError: 0 is empty", "WorkerError: Rank 0 stopped: 0 is empty", "DataError: 2 is empty"],
        ),
    ],
    ids=["none", "one", "all alike", "two"],
)
def test_what_fails_on_some_workers_stops_all_and_is_said_once(unreadable, message, errors):
    with Workers(read_on_all, 3, unreadable, message) as workers:
        outcomes = workers.outcomes()
    assert [outcome.error for outcome in outcomes] == errors
    assert [outcome.value for outcome in outcomes] == ([0, 1, 2] if not unreadable else [None] * 3)


def spread_kinds(rank: int):

    with join(first_contact=60) as group:
        state = {
            "a": np.full((2, 3), rank, np.float16),
            "b": np.array(rank),
            "c": np.zeros((0, 4)),
            "d": np.arange(6).reshape(2, 3).T + rank,
        }
        received = spread(group, state)
        with pytest.raises(WorkerError, match=r"the seed is 0 on rank 0, and 5 on ranks 1 and 2\. Start all"):
            agree(group, {"the version": "1", "the seed": 0 if rank == 0 else 5})
        return received


@pytest.mark.slow
def test_the_state_of_the_first_worker_is_spread_in_every_dtype_and_shape():
    for received in run(spread_kinds, 3):
        assert received["a"].dtype == np.float16
        assert received["a"].tolist() == [[0, 0, 0], [0, 0, 0]]
        assert received["b"].shape == ()
        assert received["b"] == 0
        assert received["c"].shape == (0, 4)
        assert received["d"].tolist() == [[0, 3], [1, 4], [2, 5]]


class StopsOnFirst(Callback):
    """Asks for the end in the second epoch; the first worker alone has callbacks."""

    def __init__(self):
        self.steps = 0

    def on_step_end(self, run, report):
        self.steps += 1
        if report.step == 7:
            run.stop("enough")


def stop_by_callback(rank: int, saved: str, folder: str):
    callback = StopsOnFirst()
    made = trainer(saved, folder, parallel=True, callbacks=[callback])
    result = made.run()
    made.group.close()
    return result.stopped, result.steps, callback.steps


@pytest.mark.slow
def test_a_callback_of_the_first_worker_stops_all_after_the_same_step(saved, alone, tmp_path):
    folder = tmp_path / "run"
    stopped = run(stop_by_callback, 2, saved, str(folder))
    # The wish is told to the others with the gradients of the step after.
    assert stopped == [("enough", 8, 8), ("a callback of the first worker asked for it", 8, 0)]
    run(train, 2, saved, str(folder), {"resume": True})
    assert_same_run(folder, alone)
