"""Digits that clients have few kinds of, or that look different at each: how well a network becomes that all of them train."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish import federated
from burnish.errors import WorkerError
from burnish.federated import ProcessClient, Round, Server, Sharing, Update, run_rounds
from burnish.federated.rounds import evaluate
from oracles.same_state import assert_same_state

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "federated_digits"))

from federated_digits.in_processes import accuracy, clients_of
from federated_digits.task import arrays, batches, partition, program

EXAMPLE = Path(__file__).parents[2] / "examples" / "federated_digits"
CLIENTS = 10
SHIFTS = (lambda x: x, lambda x: 0.3 * x + 0.5, lambda x: 3 * x - 1.5, lambda x: 0.1 * x)
"""What the pixels of each client look like."""


KILLED, KILLED_IN = 4, 3
"""A client, and the round in the middle of which it is killed."""

KILL = """
import json, os, signal, subprocess, sys
from safetensors import safe_open

command, (what, given) = sys.argv[1:], sys.argv[-3:-1]
with safe_open(given, "numpy") as file:
    number = json.loads(file.metadata()["extra"])["round"]
if number != int(os.environ["KILLED_IN"]):
    os.execv(command[0], command)
process = subprocess.Popen(command, stdout=subprocess.PIPE)
assert process.stdout.readline().startswith(b"epoch")
process.kill()
process.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Runs a command; in one round until it has trained for an epoch, and then kills it."""


def client(number: int, train, test) -> federated.Client:
    evaluation = [test] if len(test["labels"]) else None
    return federated.client(
        program(), lambda epoch: batches(train, epoch), evaluation, number=number, engine="onnxruntime", threads=1
    )


@pytest.mark.slow
def test_ten_clients_with_few_kinds_of_digits_each_reach_95_percent():
    parts = [[partition(number, CLIENTS, split) for split in ("train", "test")] for number in range(CLIENTS)]
    kinds = [len(np.unique(train["labels"])) for train, _ in parts]
    counts = np.stack([np.bincount(train["labels"], minlength=10) for train, _ in parts])
    assert sum(counts.sum(1)) == len(arrays("train")["labels"])
    assert np.mean(counts.max(1) / counts.sum(1)) > 0.25  # a tenth each, were they alike
    assert min(kinds) < 9
    server = Server(program())
    clients = [client(number, *part) for number, part in enumerate(parts)]
    run_rounds(server, clients, 10, epochs=5)
    with burnish.Session(program(), engine="onnxruntime", state=server.state(), threads=1) as session:
        central = session.evaluate(arrays("test"))["accuracy"]
    assert central >= 0.95
    assert evaluate(server, clients)["accuracy"] == pytest.approx(central, abs=1e-6)


@pytest.mark.slow
def test_normalization_that_stays_suits_clients_whose_images_look_different():
    accuracies = {}
    for norm in ("shared", "local"):
        clients = []
        for number, shift in enumerate(SHIFTS):
            split = [arrays(part) for part in ("train", "test")]
            own = [{name: array[number :: len(SHIFTS)] for name, array in part.items()} for part in split]
            clients.append(client(number, *({**part, "x": shift(part["x"]).astype(np.float32)} for part in own)))
        server = Server(program(), sharing=Sharing(norm=norm))
        run_rounds(server, clients, 3, epochs=4)
        accuracies[norm] = evaluate(server, clients)["accuracy"]
    assert accuracies["local"] > accuracies["shared"] + 0.2, accuracies


class Absent(federated.Client):
    """A client here that fails in the round in which one in a process is killed."""

    def fit(self, round: Round) -> Update:
        if round.number == KILLED_IN:
            raise WorkerError("killed")
        return super().fit(round)


def run(server: Server, clients: list[federated.Client], **options) -> list[federated.RoundReport]:
    """Five rounds, and two at a lower rate, after which the accuracy does not swing from round to round."""
    return run_rounds(server, clients, 5, epochs=5, **options) + run_rounds(server, clients, 2, epochs=5, lr=0.01, **options)


@pytest.mark.campaign
def test_ten_clients_in_processes_one_of_them_killed_in_a_round_reach_95_percent(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("KILLED_IN", str(KILLED_IN))
    clients = clients_of(tmp_path, CLIENTS)
    command = [sys.executable, "-m", "federated_digits.process_client", str(tmp_path / str(KILLED))]
    clients[KILLED] = ProcessClient(program(), [sys.executable, "-c", KILL, *command], number=KILLED)
    server, here = Server(program()), Server(program())
    reports = run(server, clients, concurrency=2, progress=print)
    for number, report in enumerate(reports, 1):
        expected = [client for client in range(CLIENTS) if (client, number) != (KILLED, KILLED_IN)]
        assert list(report.joined) == expected
    assert "was killed by signal 9" in reports[KILLED_IN - 1].refused[KILLED]
    print(f"{accuracy(server):.1%} of the test images")
    assert accuracy(server) >= 0.95

    same = []
    for number in range(CLIENTS):
        train = partition(number, CLIENTS, "train")
        kind = Absent if number == KILLED else federated.Client
        own = functools.partial(batches, train)
        same.append(kind(program(), own, number=number, engine="onnxruntime", threads=1))
    run(here, same)
    assert_same_state(server.state(), here.state())


@pytest.mark.slow
def test_the_example_in_processes_says_what_its_rounds_come_to():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "federated_digits.in_processes", "--clients", "2", "--rounds", "2", "--epochs", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert re.match(r"round 1: 2 clients, \d+ samples, loss \d", first)
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in (first, second)]
    assert losses[1] < losses[0]
