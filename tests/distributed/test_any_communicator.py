"""Workers that are processes of their own, and that a library of two functions connects: all that burnish asks of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles.small_networks import CLASSES, Network

FEATURES, SAMPLES, STEPS, WORKERS = 6, 12, 3, 3

WORKER = '''
"""A worker, and the library that connects it: bytes go to the first worker over a pipe of the system, and come back."""
import sys
from multiprocessing.connection import Client, Listener

import numpy as np

import burnish

rank, size = int(sys.argv[1]), int(sys.argv[2])
program, batches, folder = sys.argv[3:]
if rank == 0:
    with Listener(folder + "/hub", "AF_UNIX") as listener:
        print("listening", flush=True)
        accepted = [listener.accept() for _ in range(size - 1)]
    others = [connection for _, connection in sorted((int(one.recv_bytes()), one) for one in accepted)]
else:
    hub = Client(folder + "/hub", "AF_UNIX")
    hub.send_bytes(str(rank).encode())


def all_gather(array):
    own = np.ascontiguousarray(array).tobytes()
    if rank == 0:
        rows = [own, *(other.recv_bytes() for other in others)]
        for other in others:
            other.send_bytes(b"".join(rows))
        gathered = b"".join(rows)
    else:
        hub.send_bytes(own)
        gathered = hub.recv_bytes()
    return np.frombuffer(gathered, array.dtype).reshape(size, *array.shape)


def all_reduce(array):
    return all_gather(array).sum(0, dtype=array.dtype)


communicator = burnish.distributed.ArrayCommunicator(rank, size, all_reduce, all_gather)
data = np.load(batches)
bounds = np.linspace(0, data["x"].shape[1], size + 1).astype(int)
own = slice(bounds[rank], bounds[rank + 1])
parallel = burnish.DataParallel(communicator=communicator)
with burnish.Session(burnish.Program.load(program), engine="onnxruntime", threads=1, parallel=parallel) as session:
    losses = [session.step({"x": x[own], "labels": labels[own]})["loss"] for x, labels in zip(data["x"], data["labels"])]
    state = session.state()
assert "torch" not in sys.modules
np.savez(f"{folder}/{rank}.npz", losses=losses, **{name.replace("/", "|"): array for name, array in state.items()})
'''


def normalized() -> burnish.Program:
    network = Network("normalized", [FEATURES])
    y = network.builder.op("Relu", network.normalized("norm", network.dense("first", network.input, FEATURES, 5), 5))
    model = compute_in_float64(network.model(network.dense("head", y, 5, CLASSES)))
    return burnish.compile(model, optimizer="sgd:lr=0.1,momentum=0.9")


@pytest.mark.slow
def test_two_functions_connect_workers_in_processes_of_their_own(tmp_path: Path):
    program = normalized()
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((STEPS, SAMPLES, FEATURES)), rng.integers(0, CLASSES, (STEPS, SAMPLES))
    program.save(tmp_path / "program")
    np.savez(tmp_path / "batches.npz", x=x, labels=labels)
    (tmp_path / "worker.py").write_text(WORKER)
    shared = (str(WORKERS), tmp_path / "program", tmp_path / "batches.npz", tmp_path)
    workers = []
    try:
        for rank in range(WORKERS):
            command = [sys.executable, tmp_path / "worker.py", str(rank), *shared]
            workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            if rank == 0:
                assert workers[0].stdout.readline() == "listening\n"
        for worker in workers:
            _, errors = worker.communicate(timeout=600)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
    with burnish.Session(program, engine="onnxruntime", threads=1) as session:
        losses = [session.step({"x": x[step], "labels": labels[step]})["loss"] for step in range(STEPS)]
        state = session.state()
    for rank in range(WORKERS):
        saved = np.load(tmp_path / f"{rank}.npz")
        np.testing.assert_allclose(saved["losses"], losses, rtol=0, atol=1e-10)
        for name, array in state.items():
            np.testing.assert_allclose(saved[name.replace("/", "|")], array, rtol=0, atol=1e-10, err_msg=name)
