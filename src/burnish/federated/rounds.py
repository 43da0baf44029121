"""Federated rounds in this process, with one or several clients at a time."""

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
    """Run rounds, and return their reports.

    If a client fails with an error of ``burnish.errors``, only its update is lost, and the report has the reason.

    Args:
        server: the server.
        clients: all clients, with different numbers.
        rounds: number of rounds.
        fraction: share of clients, drawn again for each round; at least one.
        seed: seed of the draw, which depends only on it and the round's number.
        concurrency: clients that train at the same time, in threads; useful for clients in other processes. Results do not depend
            on it.
        progress: called with each report.
        settings: settings for ``Server.begin``.

    Raises:
        ConfigurationError: a number is out of range, or two clients have one number.
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
    """Return loss and metrics of the server's state over the evaluation data of all clients."""
    round = server.begin()
    evaluations: list[Evaluation] = [client.evaluate(round) for client in clients if client.evaluates]
    return server.evaluated(evaluations)
