"""How workers meet: in a folder of one machine with no network address, at a port, or in a process group; and who is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from worker_processes import Workers, run

import burnish
from burnish.distributed import join
from burnish.distributed.connection import environment
from burnish.distributed.connection.environment import Place
from burnish.distributed.connection.store import FolderStore, check_folder
from burnish.engines.torch import native as kernels
from burnish.errors import ConfigurationError, WorkerError
from oracles.combinations import diagonal

NOBODY = 65534
LAUNCHERS = {name for names in environment.LAUNCHERS for name in names} | {"MASTER_ADDR", "MASTER_PORT", environment.FOLDER}


def _comes_as(rank, ranks, sizes, seconds):
    os.environ.update({"RANK": ranks[rank], "WORLD_SIZE": sizes[rank]})
    with pytest.raises(WorkerError) as raised:
        join(first_contact=seconds)
    return str(raised.value)


@pytest.mark.slow
@diagonal(
    (
        ("ranks", "sizes", "reason"),
        [
            (["0", "1", "1"], ["4"] * 3, r"another process has come as rank 1"),
            (["0", "1", "2"], ["4", "4", "3"], r"it is one of 3 workers, and rank 0 of 4"),
        ],
    ),
    ("meets_in_folder", [False, True]),
)
def test_workers_that_contradict_each_other_are_told(ranks, sizes, reason, meets_in_folder, tmp_path):
    own = {environment.FOLDER: str(tmp_path / "meeting")} if meets_in_folder else {}
    results = run(_comes_as, 3, ranks, sizes, 3.0, environment=own)
    (refused,) = [text for text in results if " is not let in at " in text]
    assert re.search(reason, refused)
    assert "Give every worker a rank of its own, and all the same number of workers" in refused
    assert all("in 3 s: " in text for text in results if text != refused)


def _meets(rank):
    sums = []
    for _ in range(2):
        with join(timeout=600, first_contact=600) as group:
            group.barrier()
            lines = [
                line
                for kind in ("tcp", "tcp6", "udp", "udp6")
                for line in own_sockets(Path(f"/proc/self/net/{kind}").read_text())
            ]
            sums.append(group.all_reduce(torch.ones(100_000)).sum().item())
    return [line.split()[1].partition(":")[0] for line in lines], sums


def own_sockets(table: str) -> list[str]:
    """The lines of a table of the system that are of sockets of this process."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    return [line for line in table.splitlines()[1:] if line.split()[9] in inodes]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux lists the sockets of a process")
@pytest.mark.skipif(not kernels.available("shared_memory"), reason="needs a C++ compiler")
@pytest.mark.parametrize("share", ["on", "off"])
def test_workers_that_meet_in_a_folder_are_reached_by_no_network(tmp_path, share):
    """Gloo, which serves those that share no memory, listens on the loopback."""
    folder = tmp_path / "meeting"
    for addresses, sums in run(_meets, 3, environment={environment.FOLDER: str(folder), "BURNISH_SHARED_MEMORY": share}):
        assert set(addresses) == (set() if share == "on" else {"0100007F"})
        assert sums == [300_000.0] * 2
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_what_earlier_runs_left_in_a_folder_is_of_no_account(tmp_path):
    variables = {environment.FOLDER: str(tmp_path / "meeting")}
    with Workers(_joins_alone, 1, environment={**variables, "WORLD_SIZE": "2"}) as workers:
        assert "Rank 1 of 2 has not come to" in workers.outcomes()[0].error
    for _ in range(2):
        assert run(_sums, 2, environment=variables) == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_ended_on_another_machine_are_of_no_account(tmp_path, workers):
    """Whether they have is not known here. Agents of torchrun count their own workers' starts, so that counts may differ."""
    folder = tmp_path / "meeting"
    folder.mkdir(mode=0o700)
    for rank in range(workers):
        FolderStore(folder).set(f"1/came/{rank}", json.dumps([f"old {rank}", ["elsewhere", 9, "another system"], workers]))
    assert run(_sums_after_other_starts, 2, environment={environment.FOLDER: str(folder)}) == [2.0, 2.0]


def _sums_after_other_starts(rank):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
    return _sums(rank)


def _joins_alone(rank):
    join(first_contact=0.1)


def _sums(rank):
    with join(timeout=600, first_contact=600) as group:
        return group.all_reduce(torch.ones(1)).item()


def _in_own_group(rank, share):
    """A script that has made its process groups itself; the second and third worker are of one of their own."""
    distributed = torch.distributed
    distributed.init_process_group("gloo")
    pair = distributed.new_group([1, 2])
    with join(timeout=600, first_contact=600, share_memory=share) as group:
        sums = [group.all_reduce(torch.ones(1)).item()]
        assert join() is group
    if rank:
        with join(group=pair, timeout=600, first_contact=600, share_memory=share) as group:
            sums += [group.all_reduce(torch.full((n,), float(rank)))[0].item() for n in (1, 10**5)]
            sums += [group.rank, burnish.DataParallel(group=pair)._workers("cpu") is group]
    else:
        with pytest.raises(ConfigurationError, match=r"group=.* is no process group of torch.distributed that this"):
            join(group=pair)
        with pytest.raises(ConfigurationError, match=r"DataParallel: group=.* is no group of workers that this process is of"):
            burnish.DataParallel(group=pair)
    total = torch.ones(1)
    distributed.all_reduce(total)  # the script's own group stays
    distributed.destroy_process_group()
    return [*sums, total.item()]


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
def test_the_process_groups_of_a_script_are_taken(share):
    assert run(_in_own_group, 3, share) == [[3.0, 3.0], [3.0, 3.0, 3.0, 0, True, 3.0], [3.0, 3.0, 3.0, 1, True, 3.0]]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, Place()),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Place()),
        (
            {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"},
            Place(3, 4, 1, host="a", port=5),
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"},
            Place(2, 4, 2, host="a", port=5),
        ),
        (
            {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "0", "MASTER_ADDR": "a", "MASTER_PORT": "5"},
            Place(2, 4, 0, host="a", port=5),
        ),
        (
            {
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_PROCID": "5",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_NODELIST": "node[03-04,9],b1",
                "SLURM_JOB_ID": "70001",
                "SLURM_STEP_ID": "2",
            },
            Place(5, 8, 1, host="node03", port=20018),
        ),
        (
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
            },
            Place(0, 2, 0, host="127.0.0.1", port=20112),
        ),
    ],
)
def test_every_launcher_says_who_a_worker_is(monkeypatch, variables, place):
    for name in LAUNCHERS | {"SLURM_STEP_NUM_NODES", "SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Place.of_environment() == place


def test_mpi_without_mpi4py_needs_an_address(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigurationError, match=r"mpi4py, .* cannot be used .*pip install.*, or set MASTER_ADDR"):
        join()


def test_a_folder_that_others_can_enter_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "meeting"
    check_folder(folder)
    check_folder(folder)
    for mode in (0o710, 0o701, 0o777):
        folder.chmod(mode)
        with pytest.raises(ConfigurationError, match=rf"which lets others in \(mode {mode:o}\): name a folder of your own"):
            check_folder(folder)
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", environment.FOLDER: str(folder)}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError, match=r"which lets others in \(mode 777\)"):
        join(first_contact=1)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigurationError, match=r"link', which is no folder"):
        check_folder(tmp_path / "link")
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(ConfigurationError, match=r"file' \(File exists\)"):
        check_folder(tmp_path / "file")
    with pytest.raises(ConfigurationError, match=r"No such file or directory"):
        check_folder(tmp_path / "missing" / "meeting")


root_alone = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as another user")


@root_alone
def test_the_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "meeting"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ConfigurationError, match=rf"which belongs to another user \({NOBODY}\)"):
        check_folder(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder of this user alone, in one that everybody can enter, as the launcher makes it."""
    with tempfile.TemporaryDirectory(prefix="burnish-") as name:
        yield Path(name)


STRANGER = """
import os
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
for attempt in (os.listdir, lambda folder: open(folder + "/key-cause").read()):
    try:
        attempt({folder!r})
    except PermissionError:
        print("kept out")
"""


@root_alone
def test_another_user_cannot_enter_the_folder(folder):
    FolderStore(folder).set("cause", "none")
    code = STRANGER.format(nobody=NOBODY, folder=str(folder))
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["kept out"] * 2


def test_a_folder_holds_what_is_entered(folder):
    store = FolderStore(folder)
    assert store.get("life/1") is None
    store.set("life/1", "[1]")
    store.set("life/1", "[2]")
    assert (store.get("life/1"), store.again().get("life/1")) == ("[2]", "[2]")
    assert [store.add("barrier/run:1", amount) for amount in (1, 2, 0)] == [1, 3, 3]
    for text in ("first", "second"):
        store.compare_set("cause", "", text)
    assert store.get("cause") == "first"
    with pytest.raises(FileNotFoundError):
        FolderStore(folder / "gone").get("cause")
