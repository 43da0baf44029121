"""Federated learning under Flower: clients as a ClientApp, and a server strategy that combines every kind of state.

It needs Flower (``pip install "flwr>=1.41"``), whose requirements may need a separate environment. Flower provides sampling,
failure handling, time limits, secure channels and differential privacy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from burnish.errors import BurnishError, ConfigurationError
from burnish.federated.client import Client
from burnish.federated.messages import Evaluation, Round, Update
from burnish.federated.server import RoundReport, Server
from burnish.federated.sharing import Sharing
from burnish.installing import install_command
from burnish.untrusted_files import UNREADABLE, read_json

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg
except ImportError as error:
    raise ConfigurationError(
        f"Flower is not installed, or cannot be imported here ({error}): {install_command('flwr')}, in an environment of its "
        "own where its requirements do not fit"
    ) from error

ARRAYS, CONFIG, METRICS, SAMPLES = "arrays", "config", "metrics", "num-examples"
LOCAL = "burnish"
"""Record of a client's local state in a node's state, and configuration entry of the round."""


def client_app(make: Callable[[Context], Client], **options: Any) -> ClientApp:
    """Return a ClientApp that trains and evaluates with the clients from ``make``.

    It also works with Flower's own strategies, but they average all arrays alike, including running variances and counters: give
    them ``Sharing(norm="local", slots="local")`` on the server, or use this module's strategy.

    Args:
        make: returns the client of a node; ``context.node_config`` has ``partition-id`` if Flower was given one. It is called for
            each message, and Flower keeps the local state.
        options: options of ``flwr.clientapp.ClientApp``, such as ``mods``.
    """
    app = ClientApp(**options)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        client = _client(make, context)
        try:
            update = client.fit(_round(message, client))
            context.state[LOCAL] = _record(client.local_state)
        finally:
            client.close()
        described = {SAMPLES: update.samples, "client": update.client, "steps": update.steps, "round": update.round}
        metrics = {f"train-{name}": float(value) for name, value in update.metrics.items()}
        content = RecordDict({ARRAYS: _record(update.state), METRICS: MetricRecord({**described, **metrics})})
        return Message(content=content, reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator]
    def evaluate(message: Message, context: Context) -> Message:
        client = _client(make, context)
        try:
            evaluation = client.evaluate(_round(message, client)) if client.evaluates else None
        finally:
            client.close()
        described: dict[str, Any] = {SAMPLES: 0 if evaluation is None else evaluation.samples, "client": client.number}
        for name, total in ({} if evaluation is None else evaluation.totals).items():
            described[name] = np.ravel(total).tolist()
        return Message(content=RecordDict({METRICS: MetricRecord(described)}), reply_to=message)

    return app


class Strategy(FedAvg):  # type: ignore[misc]  # Flower may not be there for the type checker
    """A strategy for Flower's server: samples clients like FedAvg, and combines their updates with ``server``.

    With Flower's differential privacy, give the server ``Sharing(norm="local", slots="local")``: noise is meant for parameters
    and could make a running variance negative.

    Args:
        server: holder of the state; after ``start`` it has that of the last round.
        settings: settings of each round for ``Server.begin``: ``{"epochs": 2, "lr": 0.05}``.
        options: options of ``flwr.serverapp.strategy.FedAvg``: ``fraction_train``, ``min_available_nodes``.

    Attributes:
        reports: report of each round, by its number.
    """

    def __init__(self, server: Server, settings: Mapping[str, Any] | None = None, **options: Any):
        super().__init__(**options)
        self.server, self.settings = server, dict(settings or {})
        self.reports: dict[int, RoundReport] = {}

    def start(self, grid: Any, initial_arrays: Any = None, **options: Any) -> Any:
        """Run the rounds with Flower; the initial arrays are the server's by default."""
        given = self.initial_arrays() if initial_arrays is None else initial_arrays
        result = super().start(grid=grid, initial_arrays=given, **options)
        if result.arrays:
            self.server.take(_arrays(result.arrays))
        return result

    def initial_arrays(self) -> ArrayRecord:
        """Return the server's shared state."""
        return _record(self.server.begin(**self.settings).state)

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        self.server.take(_arrays(arrays))
        config[LOCAL] = json.dumps(self.server.begin(**self.settings).options())
        messages: Iterable[Any] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        report = self.server.join([_update(reply.content) for reply in valid])
        self.reports[report.number] = report
        described = {SAMPLES: report.samples, "clients": len(report.joined), "refused": len(report.refused)}
        metrics = {name: float(value) for name, value in report.metrics.items()}
        return self.initial_arrays(), MetricRecord({**described, **metrics})

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        self.server.take(_arrays(arrays))
        config[LOCAL] = json.dumps(self.server.begin(**self.settings).options())
        messages: Iterable[Any] = super().configure_evaluate(server_round, arrays, config, grid)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        valid, _ = self._check_and_log_replies(replies, is_train=False, validate=False)
        evaluations = [evaluation for reply in valid if (evaluation := self._evaluation(reply.content)) is not None]
        if not evaluations:
            return None
        figures = self.server.evaluated(evaluations)
        return MetricRecord({SAMPLES: sum(evaluation.samples for evaluation in evaluations), **figures})

    def _evaluation(self, content: Any) -> Evaluation | None:
        metrics = dict(next(iter(content.metric_records.values())))
        totals: dict[str, np.ndarray] = {}
        for entry in self.server.program.signature["evaluate"].outputs:
            if entry.name in metrics and not isinstance(metrics[entry.name], int | float):
                is_count = entry.numpy_dtype.kind in "iub"
                total = np.array(metrics[entry.name], np.int64 if is_count else np.float64)
                totals[entry.name] = total.reshape([extent for extent in entry.extents if isinstance(extent, int)])
        samples = int(metrics[SAMPLES])
        return Evaluation(self.server.number, int(metrics["client"]), samples, totals) if samples else None


def _client(make: Callable[[Context], Client], context: Context) -> Client:
    client = make(context)
    if not isinstance(client, Client):
        raise ConfigurationError(f"client_app: make returned {client!r}: return what burnish.federated.client returns")
    if LOCAL in context.state:
        client.local_state = _arrays(context.state[LOCAL])
    return client


def _round(message: Message, client: Client) -> Round:
    state = _arrays(next(iter(message.content.array_records.values())))
    config = dict(next(iter(message.content.config_records.values()), ConfigRecord()))
    if LOCAL in config:
        try:
            return Round.of(read_json(str(config[LOCAL])), state)
        except (BurnishError, *UNREADABLE) as error:
            raise ConfigurationError(f"The server sent no round that can be read ({error}): is it of this burnish?") from error
    number = int(config.get("server-round", 1))
    epochs, steps = int(config.get("local-epochs", 1)), config.get("steps")
    rates = {"lr": float(config["lr"])} if "lr" in config else {}
    sharing = Sharing(norm=config.get("norm", "shared"), slots=config.get("slots", "average"))
    return Round(number, client.program_hash, state, sharing, epochs, None if steps is None else int(steps), rates)


def _update(content: Any) -> Update:
    metrics = dict(next(iter(content.metric_records.values())))
    reported = {name.removeprefix("train-"): float(value) for name, value in metrics.items() if name.startswith("train-")}
    round, client, samples, steps = (int(metrics[name]) for name in ("round", "client", SAMPLES, "steps"))
    return Update(round, client, samples, steps, _arrays(next(iter(content.array_records.values()))), reported)


def _record(state: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in state.items()})


def _arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}
