"""Workers that step alone and meet every so many steps: what their states come to, beside formulas and beside single sessions."""

from __future__ import annotations

import numpy as np
import pytest
from runs_of_workers import save_program, train
from worker_processes import run

import burnish
from burnish import optim, surgery
from burnish.distributed.local_steps import offset_of
from burnish.errors import ConfigurationError, NonFiniteLossError
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles.combinations import diagonal, named
from oracles.normalized_networks import image_batches, residual
from oracles.several_workers import in_threads, part_of, train_alone
from oracles.small_networks import CLASSES, Network, perceptron

FEATURES, SAMPLES, STEPS = 6, 12, 8
TWO = [[5, 7], [11, 1], [6, 6], [2, 10], [7, 5], [12, 0], [3, 9], [8, 4]]
THREE = [[5, 0, 7], [1, 10, 1], [0, 0, 12], [4, 4, 4], [12, 0, 0], [3, 3, 6], [0, 6, 6], [2, 2, 8]]


def classifier(optimizer) -> burnish.Program:
    """A dense layer in float64: its gradient is a formula."""
    network = Network("linear", [FEATURES])
    return burnish.compile(
        compute_in_float64(network.model(network.dense("head", network.input, FEATURES, CLASSES))), optimizer=optimizer
    )


def batches_of(steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((SAMPLES, FEATURES)), "labels": rng.integers(0, CLASSES, SAMPLES)} for _ in range(steps)]


def stepped(program, batches, sizes, every, engine="torch", **options):
    """What each worker reported, and the states at the end, of which asking for one ends the round."""

    def work(communicator):
        parallel = burnish.DataParallel(communicator=communicator, synchronize_every=every, **options)
        with burnish.Session(program, engine=engine, threads=1, parallel=parallel) as session:
            parts = (part_of(batch, communicator.rank, split) for batch, split in zip(batches, sizes, strict=True))
            reports = [session.step(part) for part in parts]
            return reports, session.state()

    return in_threads(len(sizes[0]), work)


def gradients_of(weights, batch):
    """The loss's gradients by weight [features, classes] and bias, of a softmax regression."""
    weight, bias = weights
    logits = batch["x"] @ weight + bias
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    error = exponents / exponents.sum(1, keepdims=True)
    error[np.arange(len(error)), batch["labels"]] -= 1
    error /= len(error)
    return [batch["x"].T @ error, error.sum(0)]


def reference(start, batches, sizes, every, lr, momentum, outer=None):
    """Local SGD, or with ``outer`` (rate, momentum) DiLoCo, in numpy: the weights, and the averages of the momentum."""
    workers = len(sizes[0])
    weights, slots = [array.copy() for array in start], [np.zeros_like(array) for array in start]
    velocity = [np.zeros_like(array) for array in start]
    for first in range(0, len(batches), every):
        own, kept, seen = [], [], []
        for rank in range(workers):
            w, m, samples = [array.copy() for array in weights], [array.copy() for array in slots], 0
            for batch, split in list(zip(batches, sizes, strict=True))[first : first + every]:
                part = part_of(batch, rank, split)
                if len(part["x"]):
                    m = [momentum * old + g for old, g in zip(m, gradients_of(w, part), strict=True)]
                    w = [array - lr * moved for array, moved in zip(w, m, strict=True)]
                samples += len(part["x"])
            own.append(w)
            kept.append(m)
            seen.append(samples)
        average = [sum(n * w[i] for n, w in zip(seen, own, strict=True)) / sum(seen) for i in range(2)]
        slots = [sum(n * m[i] for n, m in zip(seen, kept, strict=True)) / sum(seen) for i in range(2)]
        if outer is None:
            weights = average
        else:
            change = [old - new for old, new in zip(weights, average, strict=True)]
            velocity = [outer[1] * v + g for v, g in zip(velocity, change, strict=True)]
            weights = [w - outer[0] * (g + outer[1] * v) for w, g, v in zip(weights, change, velocity, strict=True)]
    return weights, slots, velocity


@diagonal(
    ("engine", ["torch", "onnxruntime"]),
    ("sizes", named([TWO, THREE], ["2 workers", "3 workers"])),
    ("outer", named([None, (0.7, 0.9)], ["local SGD", "DiLoCo"])),
)
def test_rounds_of_four_steps_are_the_formula(outer, sizes, engine):
    inner = optim.sgd(lr=0.25, momentum=0.8)
    program, batches = classifier(inner if outer is None else optim.diloco(inner, *outer)), batches_of()
    initial = program.initial_state()
    start = [initial["param/head.weight"], initial["param/head.bias"]]
    weights, slots, velocity = reference(start, batches, sizes, 4, 0.25, 0.8, outer)
    for _, state in stepped(program, batches, sizes, 4, engine):
        assert int(state["step"]) == STEPS
        for index, name in enumerate(("head.weight", "head.bias")):
            np.testing.assert_allclose(state[f"param/{name}"], weights[index], rtol=0, atol=1e-12)
            np.testing.assert_allclose(state[f"opt/momentum/{name}"], slots[index], rtol=0, atol=1e-12)
            if outer is not None:
                np.testing.assert_allclose(state[f"opt/outer_momentum/{name}"], velocity[index], rtol=0, atol=1e-12)


def test_rounds_of_one_step_by_plain_descent_are_data_parallel_training():
    program, batches = classifier("sgd:lr=0.25"), batches_of()
    expected = train_alone(program, batches)[1][-1]
    for sizes in (TWO, THREE):
        for _, state in stepped(program, batches, sizes, 1):
            assert state.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_allclose(state[name], array, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_every_entry_is_the_average_of_sessions_of_their_own():
    """Running statistics and Adam's moments with the parameters; what is reported is of a worker's own part."""
    program = burnish.compile(residual(), optimizer="adam:lr=0.01,eps=1e-3")
    batches, sizes = image_batches(3, SAMPLES), TWO[:3]
    outcomes = stepped(program, batches, sizes, 3)
    single = []
    for rank in range(2):
        state = program.initial_state()
        with burnish.Session(program, engine="torch", threads=1, state=state) as session:
            reports = [session.step(part_of(batch, rank, split)) for batch, split in zip(batches, sizes, strict=True)]
            single.append(session.state())
        assert outcomes[rank][0] == reports
    seen = np.sum(sizes, axis=0)
    for _, state in outcomes:
        for name, array in state.items():
            mean = (
                single[0][name]
                if array.dtype.kind in "iu"
                else (seen[0] * single[0][name] + seen[1] * single[1][name]) / sum(seen)
            )
            np.testing.assert_allclose(array, mean, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_masks_differ_between_workers_and_the_key_is_that_of_one():
    program = burnish.compile(perceptron(dropout=True), optimizer="sgd:lr=0.1")
    rng = np.random.default_rng(0)
    half = {"x": rng.standard_normal((6, 12), np.float32), "labels": rng.integers(0, CLASSES, 6)}
    batch = {name: np.concatenate([array, array]) for name, array in half.items()}
    outcomes = stepped(program, [batch] * 3, [[6, 6]] * 3, 3)
    assert outcomes[0][0][0]["loss"] != outcomes[1][0][0]["loss"]
    with burnish.Session(program, engine="torch", threads=1) as session:
        reports = [session.step(half) for _ in range(3)]
        key = session.state()["rng/key"]
    assert outcomes[0][0] == reports  # the first worker's masks are those of one
    for _, state in outcomes:
        np.testing.assert_array_equal(state["rng/key"], key)
    assert len({tuple(offset_of(rank)) for rank in range(1000)}) == 1000


def test_there_is_one_exchange_for_a_round():
    program, batches = classifier("sgd:lr=0.25"), batches_of()

    def counted(communicator):
        calls: list[str] = []

        class Counting:
            rank, size = communicator.rank, communicator.size

            def all_reduce(self, buffer, **options):
                calls.append("sum")
                return communicator.all_reduce(buffer, **options)

            def all_gather(self, buffer, **options):
                calls.append("samples")
                return communicator.all_gather(buffer, **options)

        parallel = burnish.DataParallel(communicator=Counting(), synchronize_every=3)
        found = []
        with burnish.Session(program, engine="torch", parallel=parallel) as session:
            for batch, split in zip(batches, TWO, strict=True):
                calls.clear()
                assert session.meets == (len(found) % 3 == 2)
                session.step(part_of(batch, communicator.rank, split))
                found.append(list(calls))
        return found

    for found in in_threads(2, counted):
        assert found == [[], [], ["samples", "sum"]] * 2 + [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_a_checkpoint_ends_the_round_and_goes_on_with_any_number(workers, tmp_path):
    program, batches = classifier(optim.diloco(optim.adam(lr=0.05))), batches_of()
    path = tmp_path / "round.safetensors"

    def uninterrupted(communicator):
        parallel = burnish.DataParallel(communicator=communicator, synchronize_every=3)
        with burnish.Session(program, engine="torch", parallel=parallel) as session:
            for index, batch in enumerate(batches):
                session.step(part_of(batch, communicator.rank, THREE[index]))
                if index == 4:
                    if communicator.rank == 1:
                        session.save_checkpoint(path)
                    else:
                        session.take_part()
            return session.state()

    def resumed(communicator):
        parallel = burnish.DataParallel(communicator=communicator, synchronize_every=3)
        with burnish.Session(program, engine="torch", parallel=parallel) as session:
            session.restore(path)
            assert session.step_count == 5
            for index, batch in enumerate(batches[5:], 5):
                session.step(part_of(batch, communicator.rank, (THREE if workers == 3 else TWO)[index]))
            return session.state()

    expected = in_threads(3, uninterrupted)[0]
    for state in in_threads(workers, resumed):
        assert int(state["step"]) == STEPS
        for name, array in expected.items() if workers == 3 else ():
            np.testing.assert_array_equal(state[name], array, err_msg=name)


@pytest.mark.slow
def test_runs_of_the_trainer(tmp_path):
    """Epochs of five batches, the last of which leaves the third worker without samples; the run goes on to the same bits."""
    saved, exchange = save_program(tmp_path), {"exchange": {"synchronize_every": 3}}
    whole = run(train, 3, saved, str(tmp_path / "whole"), dict(exchange))
    run(train, 3, saved, str(tmp_path / "parts"), {**exchange, "epochs": 1})
    parts = run(train, 3, saved, str(tmp_path / "parts"), {**exchange, "resume": True})
    for outcome in (*whole, *parts):
        assert outcome[0] == whole[0][0]
        for name, array in whole[0][1].items():
            np.testing.assert_array_equal(outcome[1][name], array, err_msg=name)


def test_a_loss_that_is_not_finite_stops_its_worker():
    program, batches = classifier("sgd:lr=0.25"), batches_of(1)
    batches[0]["x"][-1] = np.nan
    with pytest.raises(NonFiniteLossError, match="The loss at step 0 is nan"):
        stepped(program, batches, TWO[:1], 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synchronize_every": 0}, r"DataParallel: synchronize_every=0: give a whole number of steps, 1 or more"),
        ({"synchronize_every": 4, "norm": "sync"}, r"norm='sync' does not go with synchronize_every, where workers step alone"),
        ({"synchronize_every": 4, "shard_optimizer": True}, r"shard_optimizer=True does not go with synchronize_every"),
        ({"synchronize_every": 4, "compression": "float16"}, r"compression='float16' does not go with synchronize_every"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        burnish.DataParallel(**options)


@pytest.mark.slow
def test_programs_that_are_refused():
    batches = batches_of(1)
    with pytest.raises(ConfigurationError, match=r"the optimizer accumulates gradients, .*: leave accumulate out"):
        stepped(classifier(optim.accumulate(optim.sgd(lr=0.1), 2)), batches, TWO[:1], 2)
    synchronized = burnish.compile(residual(), norm="sync", optimizer="sgd")
    with pytest.raises(ConfigurationError, match=r"was compiled with the policy 'sync', statistics of all workers in each step"):
        stepped(synchronized, batches, TWO[:1], 2)
    scaled = burnish.compile(perceptron(), optimizer="sgd", precision="float16")
    with pytest.raises(ConfigurationError, match=r"the loss is scaled, .*: compile with precision='bfloat16'"):
        stepped(scaled, batches, TWO[:1], 2)
    with pytest.raises(ConfigurationError, match=r"the optimizer is diloco, whose outer step is taken where workers meet"):
        in_threads(
            1,
            lambda communicator: burnish.Session(
                classifier(optim.diloco(optim.sgd(lr=0.1))),
                engine="torch",
                parallel=burnish.DataParallel(communicator=communicator),
            ),
        )


@pytest.mark.slow
def test_masks_that_a_schedule_changes_stay_masks():
    network = Network("linear", [FEATURES])
    model = surgery.prune(network.model(network.dense("head", network.input, FEATURES, CLASSES)), 0.5, end=2)
    program, batches = burnish.compile(model, optimizer="sgd:lr=5"), batches_of(4)
    mask = next(entry.name for entry in program.signature.state if entry.name.endswith("_mask"))
    parts = [part_of(batch, 0, split) for batch, split in zip(batches, TWO, strict=False)]
    alone = train_alone(program, parts)[1][-1][mask]
    for _, state in stepped(program, batches, TWO[:4], 4):
        assert {*np.unique(state[mask])} == {0, 1}
        np.testing.assert_array_equal(state[mask], alone)
        assert np.mean(state[mask]) == pytest.approx(0.5, abs=0.02)
