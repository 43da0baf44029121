"""What server and clients agree on: the network, how it trains, and which digits a client has."""

from __future__ import annotations

import functools

import numpy as np

import burnish
from burnish import optim
from burnish.data.digits import digits_arrays
from burnish.models import residual_network

BATCH = 32
SAMPLES_ALIKE = 0.5
"""The less, the fewer kinds of digits a client has."""


@functools.cache
def program() -> burnish.Program:
    """A small residual network, compiled alike wherever it is compiled."""
    model = residual_network(input_shape=(1, 8, 8), classes=10, width=8, blocks=(1, 1))
    return burnish.compile(model, loss="cross_entropy", optimizer=optim.sgd(lr=0.05, momentum=0.9), metrics=("accuracy",))


def arrays(split: str) -> dict[str, np.ndarray]:
    """All images of a split, and their labels."""
    images, labels = digits_arrays(split)
    return {"x": images[:, None], "labels": labels}


def partition(number: int, clients: int, split: str) -> dict[str, np.ndarray]:
    """The images of one client: of each digit a share drawn from a Dirichlet distribution, so that clients differ."""
    every = arrays(split)
    generator = np.random.default_rng(0)  # the same shares for all clients, of both splits
    shares = generator.dirichlet([SAMPLES_ALIKE] * clients, size=10)
    own = []
    for digit in range(10):
        indices = np.flatnonzero(every["labels"] == digit)
        bounds = np.round(np.concatenate([[0.0], np.cumsum(shares[digit])]) * len(indices)).astype(int)
        own.append(indices[bounds[number] : bounds[number + 1]])
    chosen = np.concatenate(own)
    return {name: array[chosen] for name, array in every.items()}


def batches(data: dict[str, np.ndarray], epoch: int) -> list[dict[str, np.ndarray]]:
    """The batches of an epoch, in an order of its own."""
    order = np.random.default_rng(epoch).permutation(len(data["labels"]))
    parts = [order[begin : begin + BATCH] for begin in range(0, len(order), BATCH)]
    return [{name: array[part] for name, array in data.items()} for part in parts]
