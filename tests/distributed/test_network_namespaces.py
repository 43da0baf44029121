"""Workers that only a network connects, as several machines are: in network namespaces, with a link that can be cut."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from network_namespaces import FIRST, enter
from runs_of_workers import assert_same_run, save_program, train, trainer
from worker_processes import Workers, tell


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    return save_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def alone(saved, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    trainer(saved, str(folder), parallel=False).run()
    return folder


def _train_apart(rank: int, names: list[str], saved: str, folder: str):
    enter(names[rank])
    return train(rank, saved, folder, {})


def _train_and_tell(rank: int, names: list[str], saved: str, folder: str, timeout: float, goes_on: Path):
    enter(names[rank])
    made = trainer(saved, folder, parallel=True, timeout=timeout)
    steps = made.session.step

    def counted(*arguments, **options):
        if made.session.step_count == 5:
            tell("at step 5")
            while not goes_on.exists():
                time.sleep(0.01)
        return steps(*arguments, **options)

    made.session.step = counted
    try:
        made.run()
    finally:
        made.group.close()


@pytest.mark.slow
def test_machines_of_their_own_train_over_a_slow_network(link, saved, alone, tmp_path):
    link.delay(5)
    with Workers(_train_apart, 2, link.machines, saved, str(tmp_path / "run")) as workers:
        outcomes = workers.outcomes()
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_link_that_is_cut_for_a_while_changes_nothing(link, saved, alone, tmp_path):
    goes_on = tmp_path / "goes on"
    with Workers(_train_and_tell, 2, link.machines, saved, str(tmp_path / "run"), 600.0, goes_on) as workers:
        for rank in range(2):
            workers.message(rank)
        link.cut()
        goes_on.touch()
        time.sleep(4)
        link.mend()
        outcomes = workers.outcomes()
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_link_that_stays_cut_ends_the_run_on_both_sides(link, saved, tmp_path):
    goes_on = tmp_path / "goes on"
    with Workers(_train_and_tell, 2, link.machines, saved, str(tmp_path / "run"), 4.0, goes_on) as workers:
        for rank in range(2):
            workers.message(rank)
        link.cut()
        goes_on.touch()
        outcomes = workers.outcomes()
    first, second = (outcome.error for outcome in outcomes)
    assert first.startswith("WorkerError: ")
    assert "ank 1" in first
    assert "no sign of life" in first
    assert second.startswith("WorkerError: ")
    assert f"store at {FIRST}:" in second
    assert "cut" in second
