"""Rounds of a federated run in this process, one client after the other or several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from burnish.errors import BurnishError, ConfigurationError
from burnish.federated.client import Client
from burnish.federated.messages import Evaluation, Round, Update
from burnish.federated.server import RoundReport, Server
from burnish.validation import is_number, is_whole


def run_rounds(
    server: Server,
    clients: Sequence[Client],
    rounds: int,
    *,
    fraction: float = 1.0,
    seed: int = 0,
    concurrency: int = 1,
    progress: Callable[[RoundReport], None] | None = None,
    **settings: Any,
) -> list[RoundReport]:
    """Run rounds, and return a report of each.

    A client that fails, with an error of ``burnish.errors``, costs its update only, and the report says why.

    Args:
        server: what to go on with.
        clients: all there are, each of a number of its own.
        rounds: how many.
        fraction: of the clients, drawn anew for each round; one at least.
        seed: of the draw, which depends on the number of the round, and not on where a run began.
        concurrency: how many clients train at the same time, each in a thread that waits for it: for clients that are processes.
            It changes no bit.
        progress: called with each report.
        settings: as ``Server.begin`` takes them.

    Raises:
        ConfigurationError: a number that does not fit, or clients of one number.
    """
    if not is_whole(rounds) or rounds < 1:
        raise ConfigurationError(f"rounds={rounds!r}: give a whole number of at least one")
    if not is_number(fraction) or not 0 < fraction <= 1:
        raise ConfigurationError(f"fraction={fraction!r}: give a number above 0, up to 1")
    if not is_whole(concurrency) or concurrency < 1:
        raise ConfigurationError(f"concurrency={concurrency!r}: give a whole number of at least one")
    if len({client.number for client in clients}) < len(clients) or not clients:
        raise ConfigurationError("clients: give one or more, each with a number of its own")
    reports = []
    for _ in range(rounds):
        round = server.begin(**settings)
        count = max(1, int(len(clients) * fraction + 0.5))
        drawn = np.random.default_rng((seed, round.number)).permutation(len(clients))[:count]
        updates, lost = _fitted([clients[index] for index in sorted(drawn)], round, concurrency)
        report = server.join(updates)
        report = RoundReport(**{**vars(report), "refused": {**report.refused, **lost}})
        reports.append(report)
        if progress is not None:
            progress(report)
    return reports


def _fitted(clients: Sequence[Client], round: Round, concurrency: int) -> tuple[list[Update], dict[int, str]]:
    """The updates of a round, and why each of the other clients has none, by its number."""

    def fit(client: Client) -> Update | BurnishError:
        try:
            return client.fit(round)
        except BurnishError as error:
            return error

    if concurrency == 1:
        results = [fit(client) for client in clients]
    else:
        with ThreadPoolExecutor(concurrency, thread_name_prefix="burnish-client") as pool:
            results = list(pool.map(fit, clients))
    updates = [result for result in results if isinstance(result, Update)]
    return updates, {
        client.number: str(result) for client, result in zip(clients, results, strict=True) if not isinstance(result, Update)
    }


def evaluate(server: Server, clients: Sequence[Client]) -> dict[str, float]:
    """Return the loss and the metrics of the server's state over the data of all clients that have some to evaluate on."""
    round = server.begin()
    evaluations: list[Evaluation] = [client.evaluate(round) for client in clients if client.evaluates]
    return server.evaluated(evaluations)
