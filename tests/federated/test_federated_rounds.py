"""Federated rounds beside what they come to: central training, one large batch, and the formulas of what is joined."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import burnish
from burnish import federated, optim, surgery
from burnish.data import ArrayDataset, Loader
from burnish.errors import CheckpointError, ConfigurationError
from burnish.federated import Round, Server, Sharing, Update, run_rounds
from burnish.federated.rounds import evaluate
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles.combinations import spread
from oracles.normalized_networks import image_batches, inverted_residual
from oracles.same_state import assert_same_state
from oracles.small_networks import CLASSES, Network, perceptron

FEATURES = 6


@functools.cache
def linear(optimizer: str = "sgd:lr=0.1") -> burnish.Program:
    network = Network("linear", [FEATURES])
    logits = network.dense("head", network.input, FEATURES, CLASSES)
    return burnish.compile(compute_in_float64(network.model(logits)), optimizer=optimizer)


@functools.cache
def convolutional() -> burnish.Program:
    """Batch normalization, dropout, Adam and a schedule."""
    rate = optim.schedules.cosine(0.01, steps=12)
    return burnish.compile(inverted_residual(double=False, dropout=True), optimizer=optim.adam(lr=rate))


def samples(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((count, FEATURES)), "labels": rng.integers(0, CLASSES, count)}


def part(batch, begin, end):
    return {name: array[begin:end] for name, array in batch.items()}


def largest_difference(state, other):
    return max(float(np.abs(state[name].astype(np.float64) - other[name].astype(np.float64)).max()) for name in state)


@pytest.mark.slow
def test_one_client_alone_trains_as_if_there_were_no_rounds():
    program = convolutional()
    images = image_batches(1, 24, np.float32)[0]
    loader = Loader(ArrayDataset(images), 6, seed=3)
    with burnish.Session(program, seed=7) as session:
        for epoch in range(3):
            for batch in loader.epoch(epoch):
                session.step(batch)
        central = session.state()
    server = Server(program, seed=7)
    reports = run_rounds(server, [federated.client(program, loader)], 3)
    assert [report.samples for report in reports] == [24, 24, 24]
    assert_same_state(server.state(), central)


def test_one_step_of_everybody_is_one_step_of_one_large_batch():
    program, batch = linear(), samples(24)
    with burnish.Session(program) as session:
        loss = session.step(batch)["loss"]
        central = session.state()
    clients = [
        federated.client(program, [part(batch, begin, end)], number=number)
        for number, (begin, end) in enumerate([(0, 5), (5, 16), (16, 24)])
    ]
    server = Server(program)
    (report,) = run_rounds(server, clients, 1)
    assert report.joined == (0, 1, 2)
    assert abs(report.metrics["loss"] - loss) < 1e-12
    assert largest_difference(server.state(), central) < 1e-12


def test_figures_over_clients_are_those_of_all_their_samples():
    program, batch = linear(), samples(23)
    bounds = [(0, 2), (2, 17), (17, 23)]
    clients = [
        federated.client(program, [batch], [part(batch, *bound)], number=number) for number, bound in enumerate(bounds)
    ] + [federated.client(program, [batch], number=3)]
    server = Server(program)
    with burnish.Session(program, state=server.state()) as session:
        expected = session.evaluate(batch)
    assert evaluate(server, clients) == pytest.approx(expected, abs=1e-14)


def test_statistics_are_joined_as_those_of_one_set_of_samples():
    program = convolutional()
    rng = np.random.default_rng(0)
    server = Server(program)
    rules = server._rules
    mean, variance = rules.moments[0]
    sets = [rng.normal(shift, 1 + shift, (count, 4)) for shift, count in ((0.0, 50), (2.0, 150), (-1.0, 9))]
    updates = []
    for number, values in enumerate(sets):
        state = dict(server.begin().state)
        state[mean], state[variance] = values.mean(0).astype(np.float32), values.var(0).astype(np.float32)
        updates.append(Update(1, number, len(values), 1, state))
    server.join(updates[::-1])
    everything = np.concatenate(sets)
    np.testing.assert_allclose(server.state()[mean], everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(server.state()[variance], everything.var(0), rtol=1e-5)


@pytest.mark.slow
def test_the_order_in_which_updates_come_does_not_matter():
    program = convolutional()
    batches = image_batches(3, 6, np.float32)
    states = []
    for order in ([0, 1, 2], [2, 0, 1]):
        server = Server(program)
        clients = [federated.client(program, [batches[number]], number=number) for number in order]
        server.join([client.fit(server.begin()) for client in clients])
        states.append(server.state())
    assert_same_state(*states)


@pytest.mark.slow
def test_clients_have_random_numbers_of_their_own():
    program = convolutional()
    batch = image_batches(1, 8, np.float32)[0]
    server = Server(program)
    updates = [federated.client(program, [batch], number=number).fit(server.begin()) for number in (0, 0, 1)]
    weights = [update.state["param/head.weight"] for update in updates]
    assert (weights[0] == weights[1]).all()
    assert (weights[0] != weights[2]).any()
    np.testing.assert_array_equal(updates[0].state["rng/key"], updates[2].state["rng/key"])


def test_normalization_may_stay_with_the_clients():
    program = convolutional()
    batches = image_batches(2, 8, np.float32)
    server = Server(program, sharing=Sharing(norm="local"))
    first = server.state()
    clients = [federated.client(program, [batch], number=number) for number, batch in enumerate(batches)]
    run_rounds(server, clients, 2)
    own = [set(client.local_state) for client in clients]
    assert own[0] == own[1]
    assert {"param/stem.norm.scale", "stat/stem.norm.mean", "opt/first_moment/stem.norm.scale"} <= own[0]
    assert not any("conv" in name or "head" in name for name in own[0])
    assert_same_state({name: server.state()[name] for name in own[0]}, {name: first[name] for name in own[0]})
    assert any((clients[0].local_state[name] != clients[1].local_state[name]).any() for name in own[0])


def test_a_head_may_stay_with_each_client():
    program = burnish.compile(perceptron(), optimizer="sgd:lr=0.1,momentum=0.9")
    server = Server(program, sharing=Sharing(local=("head.*",)))
    assert not any("head" in name for name in server.begin().state)
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((8, 12)).astype(np.float32), "labels": rng.integers(0, CLASSES, 8)}
    client = federated.client(program, [batch])
    run_rounds(server, [client], 1)
    assert sorted(client.local_state) == [
        "opt/momentum/head.bias",
        "opt/momentum/head.weight",
        "param/head.bias",
        "param/head.weight",
    ]


@pytest.mark.parametrize("slots", ["average", "reset", "local"])
def test_what_becomes_of_the_optimizers_state(slots):
    program, batch = linear("adam:lr=0.05"), samples(8)
    server = Server(program, sharing=Sharing(slots=slots))
    client = federated.client(program, [batch])
    run_rounds(server, [client], 2)
    expected = burnish.Session(program)
    expected.step(batch)
    if slots == "reset":
        expected.load_state({**program.initial_state(), **{k: v for k, v in expected.state().items() if k.startswith("param/")}})
    expected.step(batch)
    weights = {name: array for name, array in expected.state().items() if name.startswith("param/")}
    assert_same_state({name: server.state()[name] for name in weights}, weights)
    travelling = set(server.begin().state)
    assert ("step" in travelling) is ("opt/first_moment/head.bias" in travelling) is (slots == "average")


def test_frozen_parameters_do_not_travel():
    program = burnish.compile(perceptron(), optimizer="sgd:lr=0.1", trainable=["head.*"])
    assert {name for name in Server(program).begin().state if name.startswith("param/")} == {
        "param/head.weight",
        "param/head.bias",
    }


def test_fedprox_holds_clients_near_the_rounds_beginning():
    """Beside the formula: the gradient of mu / 2 times the squared distance from the round's beginning is added."""
    mu, rate, batch = 0.7, 0.1, samples(8)
    network = Network("linear", [FEATURES])
    model = compute_in_float64(network.model(network.dense("head", network.input, FEATURES, CLASSES)))
    program = burnish.compile(model, optimizer=optim.proximal(optim.sgd(lr=rate), mu=mu))
    server = Server(program)
    assert not any("anchor" in name for name in server.begin().state)
    weights = {name: array for name, array in server.state().items() if name.startswith("param/")}
    run_rounds(server, [federated.client(program, [batch, batch])], 2)
    with burnish.Session(linear()) as plain:
        for _ in range(2):
            anchors = weights
            for _ in range(2):
                plain.load_state({**plain.state(), **weights})
                plain.step(batch)
                stepped = plain.state()
                weights = {name: stepped[name] - rate * mu * (weights[name] - anchors[name]) for name in weights}
    for name, array in weights.items():
        np.testing.assert_allclose(server.state()[name], array, atol=1e-14)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("fedavgm:lr=0.5,momentum=0.9", lambda gradient, velocity: 0.5 * (0.9 * velocity + gradient)),
        (optim.sgd(lr=2.0), lambda gradient, velocity: 2.0 * gradient),
    ],
)
def test_the_servers_optimizer_takes_the_distance_for_a_gradient(optimizer, expected):
    program, batch = linear(), samples(8)
    server = Server(program, optimizer)
    client = federated.client(program, [batch])
    velocity = 0.0
    for _ in range(3):
        before, update = server.state()["param/head.weight"], client.fit(server.begin())
        gradient = before - update.state["param/head.weight"]
        server.join([update])
        np.testing.assert_allclose(server.state()["param/head.weight"], before - expected(gradient, velocity), atol=1e-15)
        velocity = 0.9 * velocity + gradient


def test_fedadam_steps_by_the_rate_where_all_clients_agree():
    program, batch = linear(), samples(8)
    server = Server(program, "fedadam:lr=0.02")
    before = server.state()["param/head.weight"]
    run_rounds(server, [federated.client(program, [batch])], 1, steps=1)
    moved = server.state()["param/head.weight"] - before
    gradient = before - federated.client(program, [batch]).fit(Server(program).begin()).state["param/head.weight"]
    np.testing.assert_allclose(moved, -0.02 * gradient / (np.abs(gradient) + 1e-3), rtol=1e-9)


@spread("optimizer", ["fedavg", "fedadam"], test=1)
def test_a_run_that_was_saved_goes_on_bit_for_bit(tmp_path, optimizer):
    program = linear()
    clients = [federated.client(program, [samples(8, seed=number)], number=number) for number in range(2)]
    server = Server(program, optimizer)
    run_rounds(server, clients, 2)
    server.save(tmp_path)
    again = Server(program, optimizer, seed=5)
    again.restore(tmp_path)
    for run in (server, again):
        run_rounds(run, clients, 2, fraction=0.5, seed=1)
    assert again.number == 4
    assert_same_state(again.state(), server.state())
    with burnish.Session(program) as session:
        assert session.restore(tmp_path / "state.safetensors")["round"] == 2
    with pytest.raises(ConfigurationError, match="was saved with another optimizer of the server"):
        Server(program, "fedavgm" if optimizer == "fedavg" else "fedavg").restore(tmp_path)
    with pytest.raises(ConfigurationError, match="was saved with the sharing"):
        Server(program, optimizer, sharing=Sharing(slots="local")).restore(tmp_path)


def test_rounds_and_updates_as_files(tmp_path):
    program = linear()
    server = Server(program)
    given = server.begin(epochs=2, lr=0.05)
    given.save(tmp_path / "round.safetensors")
    read = Round.load(tmp_path / "round.safetensors")
    assert read.options() == given.options()
    update = federated.client(program, [samples(4)]).fit(read)
    update.save(tmp_path / "update.safetensors")
    again = Update.load(tmp_path / "update.safetensors")
    assert (again.samples, again.steps, again.metrics) == (8, 2, update.metrics)
    assert_same_state(again.state, update.state)
    with pytest.raises(CheckpointError, match="no federated round"):
        Round.load(tmp_path / "update.safetensors")
    content = bytearray((tmp_path / "update.safetensors").read_bytes())
    (tmp_path / "update.safetensors").write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="not a whole federated update"):
        Update.load(tmp_path / "update.safetensors")


def test_what_cannot_be_joined_is_left_out_and_named():
    program, batch = linear(), samples(8)
    server = Server(program)
    good = federated.client(program, [batch]).fit(server.begin())
    damaged = {**good.state, "param/head.bias": np.full_like(good.state["param/head.bias"], np.nan)}
    misshapen = {**good.state, "param/head.bias": np.zeros(3)}
    report = server.join(
        [
            good,
            Update(1, 1, 8, 1, damaged),
            Update(1, 2, 8, 1, misshapen),
            Update(7, 3, 8, 1, good.state),
            Update(1, 4, 0, 0, good.state),
        ]
    )
    assert report.joined == (0,)
    assert report.refused == {
        1: "'param/head.bias' holds NaN or infinite values",
        2: "its state does not fit: 'param/head.bias' has shape [3], expected [5]",
        3: "it is of round 7, and this is round 1",
    }
    assert_same_state({name: server.state()[name] for name in good.state}, good.state)


def test_a_round_of_too_few_is_lost():
    program = linear()
    server = Server(program, minimum=2)
    before = server.state()
    (report,) = run_rounds(server, [federated.client(program, [samples(8)])], 1)
    assert report.is_lost
    assert_same_state(server.state(), before)
    assert server.begin().number == 2


def test_a_client_that_fails_costs_its_update_only():
    program = linear()
    broken = {**samples(8), "labels": np.full(8, CLASSES)}
    clients = [federated.client(program, [batch], number=number) for number, batch in enumerate([samples(8), broken])]
    server = Server(program)
    (report,) = run_rounds(server, clients, 1)
    assert report.joined == (0,)
    assert "labels" in report.refused[1]


MISTAKES = {
    "no such sharing": (lambda program: Sharing(norm="frozen"), "norm='frozen': choose among 'shared', 'local'"),
    "a text": (lambda program: Sharing(local="head.*"), "give a list of patterns of initializers"),
    "nothing matches": (lambda program: Server(program, sharing=Sharing(local=("tail",))), "'tail' matches no initializer"),
    "nothing is shared": (lambda program: Server(program, sharing=Sharing(local=("*",))), "every parameter that trains stays"),
    "no such method": (lambda program: Server(program, "fedsgd"), "server optimizer 'fedsgd' is unknown: choose among 'fedavg'"),
    "an iterator": (lambda program: federated.client(program, iter([samples(2)])), "data can be gone through once only"),
    "one batch": (lambda program: federated.client(program, samples(2)), "data is one batch"),
    "no hyperparameter": (lambda program: Server(program).begin(momentum=0.5), "'momentum' is no hyperparameter"),
    "no epochs": (lambda program: Server(program).begin(epochs=0), "epochs=0"),
    "another program": (
        lambda program: federated.client(linear("adam"), [samples(2)]).fit(Server(program).begin()),
        "give the server and all clients the same saved program",
    ),
    "no data to evaluate on": (
        lambda program: federated.client(program, [samples(2)]).evaluate(Server(program).begin()),
        "has nothing to evaluate on",
    ),
    "clients of one number": (
        lambda program: run_rounds(Server(program), [federated.client(program, [samples(2)]) for _ in range(2)], 1),
        "each with a number of its own",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(ConfigurationError, match=message):
        make(linear())


def test_what_the_optimizer_rules_out():
    accumulating = burnish.compile(perceptron(), optimizer=optim.accumulate(optim.sgd(lr=0.1), 2))
    with pytest.raises(ConfigurationError, match="clients may end a round at different micro-batches"):
        Server(accumulating)
    Server(accumulating, sharing=Sharing(slots="local"))
    with pytest.raises(ConfigurationError, match="would begin the learning-rate schedule anew"):
        Server(convolutional(), sharing=Sharing(slots="reset"))


def test_masks_that_a_schedule_changes_stay_masks():
    network = Network("linear", [FEATURES])
    logits = network.dense("head", network.input, FEATURES, CLASSES)
    program = burnish.compile(surgery.prune(network.model(logits), 0.5, end=2), optimizer="sgd:lr=5")
    batches = [[part(samples(24, seed), 8 * i, 8 * i + 8) for i in range(3)] for seed in range(2)]
    for each in batches[0] + batches[1]:
        each["x"] = each["x"].astype(np.float32)
    clients = [federated.client(program, data, number=number) for number, data in enumerate(batches)]
    server = Server(program)
    (report,) = run_rounds(server, clients, 1, epochs=1)
    assert not report.refused
    (mask,) = (array for name, array in server.state().items() if name.endswith("_mask"))
    assert {*np.unique(mask)} == {0, 1}
    assert np.mean(mask) == pytest.approx(0.5, abs=0.02)


def test_a_client_computes_cached_features():
    network = Network("two", [FEATURES])
    hidden = network.dense("first", network.input, FEATURES, FEATURES)
    model = network.model(network.dense("head", hidden, FEATURES, CLASSES))
    options = {"trainable": ["head*"], "optimizer": "sgd:lr=0.1"}
    batch = {name: array.astype(np.float32) if name == "x" else array for name, array in samples(8).items()}
    reports, states = [], []
    for cached in (None, "auto"):
        program = burnish.compile(model, cached_features=cached, **options)
        clients = [federated.client(program, [batch], [batch], number=number) for number in range(2)]
        server = Server(program)
        (report,) = run_rounds(server, clients, 1, epochs=2)
        reports.append((report.samples, report.metrics["loss"], evaluate(server, clients)["loss"]))
        states.append(server.state())
    assert reports[1] == pytest.approx(reports[0], rel=1e-6)
    for name in ("param/head.weight", "param/head.bias"):
        np.testing.assert_allclose(states[1][name], states[0][name], rtol=1e-5, atol=1e-7)
