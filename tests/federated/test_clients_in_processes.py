"""Clients that are commands: the same update as in this process, and what a command that fails costs."""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish import federated, optim
from burnish.errors import ConfigurationError, WorkerError
from burnish.federated import ProcessClient, Round, Server, Update, run_rounds
from burnish.federated.rounds import evaluate
from oracles.combinations import spread
from oracles.normalized_networks import image_batches, inverted_residual
from oracles.same_state import assert_same_state

CLIENT = '''
"""A client as another language writes it: restore, step, save."""
import json, sys
import numpy as np
import burnish

program, data, what, given, *taken = sys.argv[1:]
batch = dict(np.load(data))
session = burnish.Session(burnish.Program.load(program))
extra = session.restore(given)
if what == "train":
    for _ in range(extra["epochs"]):
        report = session.step(batch, **extra["hyperparameters"])
    session.save_checkpoint(taken[0])
    print("trained")
    print(json.dumps({"samples": extra["epochs"] * len(batch["labels"]), "metrics": {"loss": report["loss"]}}))
else:
    totals = {name: total.tolist() for name, total in session.evaluate_totals(batch).items()}
    print(json.dumps({"samples": len(batch["labels"]), "totals": totals}))
'''


@functools.cache
def program() -> burnish.Program:
    return burnish.compile(inverted_residual(double=False, dropout=True), optimizer=optim.adam(lr=0.01))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("client")
    program().save(folder / "program")
    np.savez(folder / "data.npz", **image_batches(1, 8, np.float32)[0])
    (folder / "client.py").write_text(CLIENT)
    return folder / "client.py", folder / "program", folder / "data.npz"


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.slow
def test_a_command_trains_and_evaluates_as_a_client_here_does(files):
    script, saved, data = files
    batch = image_batches(1, 8, np.float32)[0]
    server = Server(program())
    round = server.begin(epochs=2, lr=0.02)
    other = ProcessClient(program(), [sys.executable, script, saved, data], number=3, evaluates=True)
    here = federated.client(program(), [batch], [batch], number=3)
    update, expected = other.fit(round), here.fit(round)
    assert (update.samples, update.steps, update.client) == (16, 2, 3)
    assert_same_state(update.state, expected.state)
    server.join([update])
    assert evaluate(server, [other]) == evaluate(server, [here])


@spread(
    ("code", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9"),
        ("import sys; sys.exit('the disk is full')", "ended with status 1: the disk is full"),
        ("import time; time.sleep(60)", "took longer than 0.5 s"),
        ("print('done')", "printed no JSON as its last line"),
        ("print('{}')", "There is no checkpoint"),
    ],
    test=1,
)
def test_a_command_that_fails_costs_its_update_only(code, message):
    batch = image_batches(1, 8, np.float32)[0]
    timeout = 0.5 if "sleep" in code else None
    clients = [
        federated.client(program(), [batch], number=0),
        ProcessClient(program(), command(code), number=1, timeout=timeout),
    ]
    server = Server(program())
    (report,) = run_rounds(server, clients, 1)
    assert report.joined == (0,)
    assert message in report.refused[1]
    assert server.begin().number == 2


def test_a_command_that_is_not_there_is_named():
    client = ProcessClient(program(), ["no-such-command"], number=1)
    with pytest.raises(WorkerError, match=r"Client 1 .no-such-command train. cannot be started"):
        client.fit(Server(program()).begin())


class Meets(federated.Client):
    """A client that waits in each round until all have come to it."""

    def fit(self, round: Round) -> Update:
        self.meeting.wait(600)
        return super().fit(round)


@pytest.mark.slow
def test_clients_that_train_at_the_same_time_come_to_the_same_bits():
    batches = image_batches(3, 8, np.float32)
    states = []
    for concurrency in (1, 3):
        kind = federated.Client if concurrency == 1 else Meets
        clients = [kind(program(), [batch], number=number, threads=1) for number, batch in enumerate(batches)]
        meeting = threading.Barrier(3)
        for client in clients:
            client.meeting = meeting
        server = Server(program())
        (report,) = run_rounds(server, clients, 1, concurrency=concurrency)
        assert report.joined == (0, 1, 2)
        states.append(server.state())
    assert_same_state(*states)
    for wrong in (0, True, 1.5):
        with pytest.raises(ConfigurationError, match=rf"concurrency={wrong}: give a whole number of at least one"):
            run_rounds(Server(program()), clients, 1, concurrency=wrong)
