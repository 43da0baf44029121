"""Workers that only a network connects, as several machines are: in network namespaces, with a link that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_of_workers import assert_same_run, save_program, train, trainer
from worker_processes import Workers, tell

CLONE_NEWNET = 0x40000000
FIRST = "10.213.77.1"


def _command(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


class Link:
    """Two network namespaces and the cable between them."""

    def __init__(self) -> None:
        self.names = [f"burnish-{uuid.uuid4().hex[:6]}-{rank}" for rank in range(2)]

    def lay(self) -> bool:
        """Return whether this machine lets us."""
        if shutil.which("ip") is None or not all(_command("ip", "netns", "add", name) for name in self.names):
            return False
        first, second = self.names
        laid = _command("ip", "-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
        for rank, name in enumerate(self.names):
            laid = laid and _command("ip", "-n", name, "addr", "add", f"10.213.77.{rank + 1}/24", "dev", "wire")
            laid = laid and _command("ip", "-n", name, "link", "set", "wire", "up")
            laid = laid and _command("ip", "-n", name, "link", "set", "lo", "up")
        return laid

    def cut(self) -> None:
        assert _command("ip", "-n", self.names[1], "link", "set", "wire", "down")

    def mend(self) -> None:
        assert _command("ip", "-n", self.names[1], "link", "set", "wire", "up")

    def delay(self, milliseconds: int) -> bool:
        """Delay what goes in one direction; returns whether this machine can."""
        return _command(
            "ip",
            "netns",
            "exec",
            self.names[0],
            "tc",
            "qdisc",
            "add",
            "dev",
            "wire",
            "root",
            "netem",
            "delay",
            f"{milliseconds}ms",
        )

    def remove(self) -> None:
        for name in self.names:
            _command("ip", "netns", "delete", name)


@pytest.fixture
def link() -> Iterator[Link]:
    laid = Link()
    try:
        if not laid.lay():
            pytest.skip("this machine does not let us make network namespaces (ip netns add, as root)")
        yield laid
    finally:
        laid.remove()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    return save_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def alone(saved, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    trainer(saved, str(folder), parallel=False).run()
    return folder


def _enter(name: str) -> None:
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["MASTER_ADDR"] = FIRST


def _train_apart(rank: int, names: list[str], saved: str, folder: str):
    _enter(names[rank])
    return train(rank, saved, folder, {})


def _train_and_tell(rank: int, names: list[str], saved: str, folder: str, timeout: float, goes_on: Path):
    _enter(names[rank])
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
    with Workers(_train_apart, 2, link.names, saved, str(tmp_path / "run")) as workers:
        outcomes = workers.outcomes()
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert_same_run(tmp_path / "run", alone)


def test_a_link_that_is_cut_for_a_while_changes_nothing(link, saved, alone, tmp_path):
    goes_on = tmp_path / "goes on"
    with Workers(_train_and_tell, 2, link.names, saved, str(tmp_path / "run"), 600.0, goes_on) as workers:
        for rank in range(2):
            workers.message(rank)
        link.cut()
        goes_on.touch()
        time.sleep(4)
        link.mend()
        outcomes = workers.outcomes()
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert_same_run(tmp_path / "run", alone)


def test_a_link_that_stays_cut_ends_the_run_on_both_sides(link, saved, tmp_path):
    goes_on = tmp_path / "goes on"
    with Workers(_train_and_tell, 2, link.names, saved, str(tmp_path / "run"), 4.0, goes_on) as workers:
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
