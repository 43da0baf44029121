"""Whole runs of ``burnish train``, on one machine and as on two: nothing is unpickled, and on one machine nothing listens."""

from __future__ import annotations

import csv
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oracles.combinations import spread

COMMAND = (sys.executable, "-m", "burnish")
LOOPBACK = "0100007F"
"""127.0.0.1 in the system's tables of sockets."""

NO_PICKLES = '''
"""Imported by every Python process of a run before all else: whatever would unpickle fails, and leaves a note."""

import os
import pathlib
import pickle
import sys
import traceback

import _pickle

notes = pathlib.Path(os.environ["NOTES"])


def forbidden(*arguments, **options):
    (notes / f"unpickled-{os.getpid()}").write_text("".join(traceback.format_stack()))
    raise RuntimeError("something was to be unpickled")


class Unpickler(pickle.Unpickler):
    """To be inherited from, and of no use."""

    def __init__(self, *arguments, **options):
        forbidden()

    load = forbidden


for module in (pickle, _pickle):
    module.load = module.loads = forbidden
    module.Unpickler = Unpickler
pickle._load = pickle._loads = forbidden
pickle._Unpickler = Unpickler


class AfterTorch:
    """Takes the doors of PyTorch away when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed" and "torch" in sys.modules and hasattr(sys.modules["torch"], "load"):
            sys.modules["torch"].load = forbidden
        return None


sys.meta_path.insert(0, AfterTorch())
(notes / f"started-{os.getpid()}").touch()
'''


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def arguments(folder: str, *options: str) -> list[str]:
    course = f"--data many.npz --eval-data data.npz --engine torch --threads 1 --batch-size 8 --lr 0.01 -o {folder}"
    return ["train", "model.onnx", *course.split(), *options]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def of_machine(rank: int, port: str, *options: str) -> list[str]:
    place = f"--nodes 2 --node-rank {rank} --master-address 127.0.0.1 --master-port {port} --worker-timeout 120"
    return [*arguments("run", *options), *place.split()]


def started(*commands: list[str], **more: str) -> list[subprocess.Popen]:
    return [
        subprocess.Popen([*COMMAND, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more))
        for command in commands
    ]


def last_row(folder: Path) -> dict[str, str]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))[-1]


@pytest.fixture
def data(folder: Path) -> Path:
    generator = np.random.default_rng(1)
    np.savez("many.npz", x=generator.normal(size=(101, 4, 4)).astype(np.float32), y=generator.integers(0, 3, 101))
    return folder


@pytest.fixture
def no_pickles(tmp_path_factory) -> dict[str, str]:
    notes, path = tmp_path_factory.mktemp("notes"), tmp_path_factory.mktemp("path")
    (path / "sitecustomize.py").write_text(NO_PICKLES)
    paths = [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"NOTES": str(notes), "PYTHONPATH": os.pathsep.join(paths)}


def notes(environment: dict[str, str], kind: str) -> list[str]:
    return [path.read_text() for path in Path(environment["NOTES"]).glob(f"{kind}-*")]


@pytest.mark.parametrize(
    "share",
    # The two machines below have two workers each, which share their memory.
    [pytest.param("on", marks=pytest.mark.campaign), pytest.param("off", marks=pytest.mark.slow)],
)
def test_on_one_machine_nothing_is_unpickled(data, no_pickles, share):
    (process,) = started(arguments("run", "--workers", "2"), **no_pickles, BURNISH_SHARED_MEMORY=share)
    assert process.communicate(timeout=600)[1] == ""
    assert process.returncode == 0
    assert len(notes(no_pickles, "started")) >= 3
    assert notes(no_pickles, "unpickled") == []


@pytest.mark.slow
def test_on_two_machines_nothing_is_unpickled_and_the_figures_are_those_of_one(run, data, no_pickles):
    port = free_port()
    machines = started(*(of_machine(rank, port, "--workers", "2") for rank in (1, 0)), **no_pickles)
    for process in machines:
        assert process.communicate(timeout=600)[1] == ""
        assert process.returncode == 0
    assert len(notes(no_pickles, "started")) >= 6
    assert notes(no_pickles, "unpickled") == []
    run(*arguments("alone"))
    together, alone = last_row(data / "run"), last_row(data / "alone")
    assert together["step"] == alone["step"]
    assert float(together["loss"]) == pytest.approx(float(alone["loss"]), rel=2e-2)


@pytest.mark.slow
def test_where_something_is_unpickled_it_is_noted(no_pickles):
    code = """
import copyreg, io, pickle, _pickle, multiprocessing.reduction, torch
content = pickle.dumps(1)
for unpickle in (
    pickle.loads, _pickle.loads, lambda content: pickle.load(io.BytesIO(content)), lambda content: pickle._loads(content),
    lambda content: pickle.Unpickler(io.BytesIO(content)).load(), lambda content: torch.load(io.BytesIO(content)),
):
    try:
        unpickle(content)
    except RuntimeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(**no_pickles), check=True)
    assert done.stdout.splitlines() == ["something was to be unpickled"] * 6
    assert len(notes(no_pickles, "unpickled")) == 1


def sockets_of(pid: int) -> list[str]:
    """The lines of the system's tables of network sockets that are of a process."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    tables = [Path(f"/proc/{pid}/net/{kind}") for kind in ("tcp", "tcp6", "udp", "udp6")]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return [line for line in lines if line.split()[9] in inodes]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux lists the sockets of a process")
@spread("share", ["on", "off"], test_all=1)
def test_on_one_machine_no_process_of_a_run_is_reached_by_a_network(data, share):
    """Workers that share memory have no address; Gloo, which serves those that cannot, has one of the loopback."""
    (process,) = started(arguments("run", "--workers", "2", "--epochs", "100000"), BURNISH_SHARED_MEMORY=share)
    assert any(line.startswith("epoch ") for line in process.stdout)
    workers = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    environments = [Path(f"/proc/{worker}/environ").read_bytes() for worker in workers]
    folders = {folder.decode() for each in environments for folder in re.findall(rb"BURNISH_MEETING=([^\0]+)", each)}
    modes = [Path(folder).stat() for folder in folders]
    sockets = {pid: sockets_of(pid) for pid in (process.pid, *workers)}
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    addresses = {line.split()[1].partition(":")[0] for lines in sockets.values() for line in lines}
    assert addresses == (set() if share == "on" else {LOOPBACK})
    assert sockets[process.pid] == []
    assert len(workers) == 2
    ((folder,), (status,)) = map(Path, folders), modes
    assert (status.st_mode & 0o777, status.st_uid) == (0o700, os.geteuid())
    assert not folder.exists()


@pytest.mark.slow
def test_a_killed_worker_restarts_the_run_on_both_machines(data):
    port = free_port()
    options = ("--max-restarts", "1", "--checkpoint-every", "3", "--epochs", "40")
    first, second = started(*(of_machine(rank, port, *options) for rank in (0, 1)))
    assert any(line.startswith("epoch ") for line in first.stdout)
    (worker,) = map(int, Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split())
    os.kill(worker, signal.SIGKILL)
    for process in (first, second):
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    assert last_row(data / "run")["epoch"] == "40"


@pytest.mark.slow
def test_ctrl_c_on_one_machine_stops_both_behind_the_same_step_and_saves(data):
    port = free_port()
    machines = started(*(of_machine(rank, port, "--epochs", "100000", "--max-restarts", "1") for rank in (0, 1)))
    assert any(line.startswith("epoch ") for line in machines[0].stdout)
    machines[1].send_signal(signal.SIGINT)
    first, second = [process.communicate(timeout=600)[1] for process in machines]
    assert [process.returncode for process in machines] == [130, 130]
    assert "is saved in" in first
    assert second == ""
    assert (data / "run" / "checkpoints" / "latest.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "2"), "--nodes 2: --node-rank is missing: give every machine its own --node-rank, from 0 to 1"),
        (("--nodes", "2", "--node-rank", "0"), "--nodes 2: --master-address is missing"),
        (("--nodes", "2", "--node-rank", "2", "--master-address", "a"), "--node-rank 2 is not below --nodes 2"),
        (("--node-rank", "0"), "--node-rank is for workers on several machines: give their number too (--nodes)"),
        (("--master-port", "1"), "--master-port is for workers on several machines: give their number too (--nodes)"),
    ],
)
def test_options_of_machines_that_are_refused(run, data, options, message):
    result = run(*arguments("run", *options), code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
