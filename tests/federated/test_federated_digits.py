"""Digits that clients have few kinds of, or that look different at each: how well a network becomes that all of them train."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish import federated
from burnish.federated import Server, Sharing, run_rounds
from burnish.federated.rounds import evaluate

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "federated_digits"))

from federated_digits.task import arrays, batches, partition, program

CLIENTS = 10
SHIFTS = (lambda x: x, lambda x: 0.3 * x + 0.5, lambda x: 3 * x - 1.5, lambda x: 0.1 * x)
"""What the pixels of each client look like."""


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
