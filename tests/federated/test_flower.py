"""Clients and strategy under Flower's own classes. Its requirements want an environment of their own: ``make test-flower``."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import pytest

import burnish
from burnish import federated, optim
from burnish.errors import ConfigurationError
from burnish.federated import Server, Sharing, run_rounds
from burnish.federated.rounds import evaluate
from oracles.normalized_networks import image_batches, inverted_residual
from oracles.same_state import assert_same_state

flwr = pytest.importorskip("flwr", reason="Flower is not installed here: make test-flower has it")

from burnish.federated.flower import Strategy, client_app  # noqa: E402

CLIENTS = 3


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    """Flower's messages ask which run their process belongs to."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Flower's transport without a network: what a node's app raises comes back as an error, as from a SuperNode."""

    def __init__(self, app, lost: Iterable[int] = ()):
        from flwr.app import Context, RecordDict

        self.app, self.lost = app, set(lost)
        self.contexts = {
            number + 1: Context(
                run_id=1, node_id=number + 1, node_config={"partition-id": number}, state=RecordDict(), run_config={}
            )
            for number in range(CLIENTS)
        }

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        from flwr.app import Error, Message

        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node - 1 in self.lost:
                continue
            try:
                replies.append(self.app(message, self.contexts[node]))
            except Exception as error:
                replies.append(Message(Error(code=0, reason=str(error)), reply_to=message))
        return replies


@functools.cache
def program() -> burnish.Program:
    return burnish.compile(inverted_residual(double=False, dropout=True), optimizer=optim.adam(lr=0.01))


def client(number: int) -> federated.Client:
    batches = image_batches(2, 4 + number, np.float32, seed=number)
    return federated.client(program(), batches[:1], batches[1:], number=number)


def app(**options):
    return client_app(lambda context: client(context.node_config["partition-id"]), **options)


@pytest.mark.parametrize("sharing", [Sharing(), Sharing(norm="local", slots="local")])
@pytest.mark.parametrize("method", ["fedavg", "fedadam"])
def test_rounds_under_flower_are_rounds_here(sharing, method):
    strategy = Strategy(Server(program(), method, sharing=sharing), {"epochs": 2, "lr": 0.02}, min_available_nodes=CLIENTS)
    result = strategy.start(grid=Grid(app()), num_rounds=2)
    server, clients = Server(program(), method, sharing=sharing), [client(number) for number in range(CLIENTS)]
    reports = run_rounds(server, clients, 2, epochs=2, lr=0.02)
    assert_same_state(strategy.server.state(), server.state())
    assert [strategy.reports[number].metrics for number in (1, 2)] == [report.metrics for report in reports]
    figures = dict(result.evaluate_metrics_clientapp[2])
    assert figures.pop("num-examples") == sum(4 + number for number in range(CLIENTS))
    assert figures == evaluate(server, clients)


def test_a_client_that_does_not_answer_costs_its_update_only():
    strategy = Strategy(Server(program()), min_available_nodes=CLIENTS)
    strategy.start(grid=Grid(app(), lost={1}), num_rounds=1)
    server = Server(program())
    run_rounds(server, [client(0), client(2)], 1)
    assert strategy.reports[1].joined == (0, 2)
    assert_same_state(strategy.server.state(), server.state())


def test_a_client_that_fails_is_left_out():
    def make(context):
        number = context.node_config["partition-id"]
        return client(number) if number else federated.client(program(), [{"x": np.zeros(3)}], number=number)

    strategy = Strategy(Server(program()), min_available_nodes=CLIENTS)
    strategy.start(grid=Grid(client_app(make)), num_rounds=1)
    assert strategy.reports[1].joined == (1, 2)


def test_flowers_differential_privacy_adds_its_noise_to_parameters_alone():
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

    sharing = Sharing(norm="local", slots="local")
    inner = Strategy(Server(program(), sharing=sharing), min_available_nodes=CLIENTS)
    plain = Server(program(), sharing=sharing)
    private = DifferentialPrivacyServerSideFixedClipping(inner, 0.01, clipping_norm=100.0, num_sampled_clients=CLIENTS)
    arrays = inner.initial_arrays()
    assert all(name.startswith("param/") for name in arrays)
    result = private.start(grid=Grid(app()), initial_arrays=arrays, num_rounds=1)
    run_rounds(plain, [client(number) for number in range(CLIENTS)], 1)
    noise = np.concatenate([(array.numpy() - plain.state()[name]).reshape(-1) for name, array in result.arrays.items()])
    assert 0.5 < noise.std() / (0.01 * 100.0 / CLIENTS) < 2


def test_flowers_own_strategy_takes_our_clients():
    from flwr.serverapp.strategy import FedAvg

    sharing = Sharing(norm="local", slots="local")
    server = Server(program(), sharing=sharing)
    arrays = Strategy(server).initial_arrays()
    from flwr.app import ConfigRecord

    config = ConfigRecord({"norm": "local", "slots": "local", "lr": 0.02})
    result = FedAvg(min_available_nodes=CLIENTS, fraction_evaluate=0.0).start(
        grid=Grid(app()), initial_arrays=arrays, num_rounds=1, train_config=config
    )
    run_rounds(server, [client(number) for number in range(CLIENTS)], 1, lr=0.02)
    for name, array in result.arrays.items():
        np.testing.assert_allclose(array.numpy(), server.state()[name], rtol=1e-5, atol=1e-7)


def test_what_is_no_client_is_named():
    grid = Grid(client_app(lambda context: None))
    strategy = Strategy(Server(program()), min_available_nodes=CLIENTS)
    strategy.start(grid=grid, num_rounds=1)
    assert strategy.reports[1].is_lost
    with pytest.raises(ConfigurationError, match=r"return what burnish\.federated\.client returns"):
        grid.app(next(iter(strategy.configure_train(2, strategy.initial_arrays(), _config(), grid))), grid.contexts[1])


def _config():
    from flwr.app import ConfigRecord

    return ConfigRecord()
