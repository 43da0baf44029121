"""The simulation of data-parallel training: its formulas, its clocks, and what it records of a real step."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

import burnish
from burnish.engines.communicator import Communicator
from burnish.models import residual_network
from data_parallel_networks import calm
from data_parallel_simulation import (
    PREDICTED_WORKERS,
    Event,
    Exchange,
    Machines,
    Network,
    Recording,
    RecordingCommunicator,
    fit_network,
    measured_network,
    predict,
    recording_of,
    simulate,
)

NETWORK = Network("test", latency=0.5, bandwidth=10.0)


@pytest.mark.parametrize(
    ("kind", "algorithm", "workers", "seconds"),
    [
        ("all_reduce", "ring", 1, 0.0),
        ("all_reduce", "ring", 2, 2 * 0.5 + 20 / 10),
        ("all_reduce", "ring", 4, 6 * 0.5 + 2 * 0.75 * 20 / 10),
        ("all_reduce", "tree", 8, 6 * 0.5 + 2 * 7 / 8 * 20 / 10),
        ("all_gather", "ring", 4, 3 * 0.5 + 3 * 20 / 10),
        ("all_gather", "tree", 5, 3 * 0.5 + 4 * 20 / 10),
        ("all_to_all", "ring", 4, 3 * 0.5 + 0.75 * 20 / 10),
        ("all_to_all", "tree", 4, 3 * 0.5 + 0.75 * 20 / 10),
        ("gather_parts", "ring", 4, 3 * 0.5 + 0.75 * 20 / 10),
    ],
)
def test_an_exchange_takes_what_the_model_says(kind, algorithm, workers, seconds):
    assert Network("test", 0.5, 10.0, algorithm).seconds(kind, 20, workers) == pytest.approx(seconds)


MEASURED = {"all_reduce": [(10, 2.0), (20, 1.0), (40, 3.0)], "all_to_all": [(20, 1.5), (40, 2.5)]}


def test_between_two_workers_an_exchange_takes_what_was_measured():
    network = measured_network("measured", MEASURED)
    assert network.seconds("all_reduce", 40, 2) == pytest.approx(3.0)
    assert network.seconds("all_reduce", 30, 2) == pytest.approx(2.0)
    assert network.seconds("all_reduce", 80, 2) == pytest.approx(6.0)
    assert network.seconds("all_to_all", 40, 2) == pytest.approx(2.5)


def test_a_smaller_exchange_does_not_take_longer_than_a_larger_one():
    assert measured_network("measured", MEASURED).seconds("all_reduce", 10, 2) == pytest.approx(1.0)


def test_more_workers_need_more_messages_and_carry_more_than_was_measured():
    network = measured_network("measured", MEASURED)
    assert (network.latency, network.bandwidth) == (0.5, 20.0)
    assert network.seconds("all_to_all", 40, 4) == pytest.approx(2 * 0.5 + 2.5 * 30 / 20)
    assert network.seconds("all_reduce", 20, 4) == pytest.approx(4 * 0.5 + 2.0)


INSIDE = Network("inside", latency=0.01, bandwidth=1000.0)


@pytest.mark.parametrize(
    ("kind", "levels", "seconds"),
    [
        # Two machines of 4: 20 bytes of each worker.
        ("all_reduce", 2, 6 * 0.01 + 1.5 * 20 / 1000 + 2 * 0.5 + 20 / 10 + 0.01 + 20 / 1000),
        ("all_reduce", 1, 14 * 0.5 + 2 * 7 / 8 * 20 / 10),
        ("all_gather", 2, 3 * 0.01 + 3 * 20 / 1000 + 0.5 + 80 / 10 + 0.01 + 160 / 1000),
        ("all_gather", 1, 7 * 0.5 + 7 * 20 / 10),
        ("all_to_all", 2, 6 * 0.01 + 1.5 * 40 / 1000 + 0.5 + 0.5 * 20 / 10),
        ("all_to_all", 1, 7 * 0.5 + 4 * 4 / 8 * 20 / 10),
        ("gather_parts", 2, 0.5 + 0.5 * 20 / 10 + 0.01 + 40 / 1000),
        ("gather_parts", 1, 7 * 0.5 + 7 / 8 * 20 / 10),
    ],
)
def test_machines_add_up_inside_first(kind, levels, seconds):
    assert sum(Machines(INSIDE, NETWORK, 4, levels).cost(kind, 20, 8)) == pytest.approx(seconds)


def test_one_machine_needs_no_network():
    assert Machines(INSIDE, NETWORK, 4).cost("all_reduce", 20, 4) == INSIDE.cost("all_reduce", 20, 4)


ALL_REDUCE = Exchange("all_reduce", 20)


def recording(*events, exchanges=(ALL_REDUCE,)):
    return Recording(tuple(exchanges), tuple(Event(*event) for event in events))


def test_a_worker_that_waits_at_once_pays_the_whole_exchange():
    step = recording(("begin", 0, (1.0,)), ("wait", 0, (0.0,)), ("end", -1, (2.0,)))
    assert simulate(step, 1, NETWORK) == pytest.approx(3.0)
    assert simulate(step, 2, NETWORK) == pytest.approx(1.0 + 3.0 + 2.0)


def test_computation_hides_an_exchange():
    step = recording(("begin", 0, (1.0,)), ("wait", 0, (2.0,)), ("end", -1, (0.0,)))
    assert simulate(step, 2, NETWORK) == pytest.approx(1.0 + 3.0)
    assert simulate(step.slowed(2), 2, NETWORK) == pytest.approx(2.0 + 4.0)


def test_an_exchange_without_a_processor_of_its_own_is_not_hidden():
    step = recording(("begin", 0, (1.0,)), ("wait", 0, (5.0,)), ("end", -1, (0.0,)))
    assert simulate(step, 2, NETWORK) == pytest.approx(6.0)
    assert simulate(step, 2, Network("test", 0.5, 10.0, overhead=1.0)) == pytest.approx(9.0)


def test_exchanges_of_one_channel_wait_for_each_other():
    exchanges = (Exchange("all_reduce", 20, "gradient"), Exchange("all_reduce", 20, "gradient"))
    step = recording(("begin", 0, (1.0,)), ("begin", 1, (0.0,)), ("wait", 1, (0.0,)), ("end", -1, (0.0,)), exchanges=exchanges)
    assert simulate(step, 2, NETWORK) == pytest.approx(1.0 + 3.0 + 3.0)
    apart = recording(
        *((e.action, e.exchange, e.seconds) for e in step.events), exchanges=(exchanges[0], Exchange("all_reduce", 20))
    )
    # Each has a latency of 1, and sends for 2, of which the other channel takes its half.
    assert simulate(apart, 2, NETWORK, steps=1) == pytest.approx(1.0 + 1.0 + 2.0 + 2.0)


def test_a_short_exchange_stands_in_line_while_a_long_one_is_under_way():
    exchanges = (Exchange("all_reduce", 1000, "gradients"), Exchange("all_gather", 0))
    events = (("begin", 0, (0.0,)), ("begin", 1, (1.0,)), ("wait", 1, (0.0,)), ("end", -1, (0.0,)))
    assert simulate(recording(*events, exchanges=exchanges), 2, NETWORK, steps=1) == pytest.approx(1.0 + 0.5)
    in_line = replace(NETWORK, queue=7.0)
    assert simulate(recording(*events, exchanges=exchanges), 2, in_line, steps=1) == pytest.approx(1.0 + 0.5 + 7.0)


def test_a_long_exchange_lasts_longer_by_what_a_short_one_sends():
    exchanges = (Exchange("all_reduce", 1000, "gradients"), Exchange("all_gather", 50))
    events = (("begin", 0, (0.0,)), ("begin", 1, (1.0,)), ("wait", 1, (0.0,)), ("wait", 0, (0.0,)), ("end", -1, (0.0,)))
    assert simulate(recording(*events, exchanges=exchanges), 2, NETWORK, steps=1) == pytest.approx(1.0 + 100.0 + 5.0)


def test_all_wait_for_the_slowest():
    step = recording(("begin", 0, (1.0, 2.0)), ("wait", 0, (0.0, 0.0)), ("end", -1, (0.0, 0.0)))
    free = Network("test", 0.0, float("inf"))
    alone, many = simulate(step, 1, free, steps=400), simulate(step, 64, free, steps=20)
    assert alone == pytest.approx(1.5, abs=0.1)
    assert many == pytest.approx(2.0, abs=1e-9)


def test_a_network_is_found_again_from_what_it_takes():
    network = Network("hidden", 3e-4, 2e9)
    measured = [(w, n, network.seconds("all_reduce", n, w)) for w in (2, 4) for n in (1024, 2**20, 2**24)]
    found = fit_network("found", measured)
    assert found.latency == pytest.approx(3e-4)
    assert found.bandwidth == pytest.approx(2e9)


def recorded_step(size=2, steps=3, **options):
    program = burnish.compile(residual_network(width=8), optimizer="sgd:lr=0.1,momentum=0.9")
    communicator = RecordingCommunicator(size)
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((4, 1, 8, 8), dtype=np.float32), "labels": rng.integers(0, 10, 4)}
    parallel = burnish.DataParallel(communicator=communicator, **options)
    with burnish.Session(program, engine="torch", parallel=parallel) as session:
        for _ in range(steps):
            communicator.start_step()
            for _ in range(options.get("synchronize_every", 1)):
                session.step(batch)
            communicator.end_step()
    parameters = sum(array.nbytes for name, array in program.initial_state().items() if name.startswith("param/"))
    return communicator, parameters


def sizes_of(recorded, kind):
    return sum(exchange.size for exchange in recorded.exchanges if exchange.kind == kind)


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
def test_a_step_is_recorded(share):
    pytest.importorskip("torch")
    communicator, parameters = recorded_step(share=share)
    recorded = communicator.recording()
    assert [event.action for event in recorded.events].count("begin") == len(recorded.exchanges)
    assert recorded.events[-1].action == "end"
    assert all(len(event.seconds) == 2 and min(event.seconds) >= 0 for event in recorded.events)
    assert parameters / 2 < sizes_of(recorded, "all_reduce") < 2 * parameters
    assert recording_of(json.loads(json.dumps(asdict(recorded)))) == recorded
    assert len(communicator.recording(1, 0.3).events[0].seconds) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_16_bits_are_recorded_as_parts(size):
    pytest.importorskip("torch")
    communicator, parameters = recorded_step(size, norm="local", compression="bfloat16")
    recorded = communicator.recording()
    for kind in ("all_to_all", "gather_parts"):
        assert sizes_of(recorded, kind) == pytest.approx(parameters / 2, rel=0.05)


@pytest.mark.slow
def test_a_sharded_optimizer_is_recorded():
    pytest.importorskip("torch")
    communicator, parameters = recorded_step(norm="local", shard_optimizer=True)
    recorded = communicator.recording()
    assert sizes_of(recorded, "all_to_all") == pytest.approx(parameters, rel=0.05)
    assert sizes_of(recorded, "all_gather") >= parameters / 2


@pytest.mark.slow
def test_a_round_of_local_steps_is_recorded():
    pytest.importorskip("torch")
    communicator, parameters = recorded_step(synchronize_every=3)
    recorded = communicator.recording()
    assert [exchange.kind for exchange in recorded.exchanges] == ["all_gather", "all_reduce"]
    assert recorded.exchanges[1].size == pytest.approx(2 * parameters, rel=0.1)


def test_it_stands_in_for_every_exchange():
    declared = {name for name, member in inspect.getmembers(Communicator, inspect.isfunction) if not name.startswith("_")}
    assert declared
    for name in declared:
        expected, found = (inspect.signature(getattr(kind, name)).parameters for kind in (Communicator, RecordingCommunicator))
        assert [(each.name, each.kind) for each in found.values()] == [(each.name, each.kind) for each in expected.values()]


@pytest.mark.slow
def test_sharing_makes_fewer_exchanges():
    pytest.importorskip("torch")
    program = burnish.compile(residual_network(width=8), optimizer="sgd:lr=0.1")
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((4, 1, 8, 8), dtype=np.float32), "labels": rng.integers(0, 10, 4)}
    counts = {}
    for share in (True, False):
        communicator = RecordingCommunicator()
        with burnish.Session(
            program, engine="torch", parallel=burnish.DataParallel(share=share, communicator=communicator)
        ) as session:
            communicator.start_step()
            session.step(batch)
            communicator.end_step()
        counts[share] = len(communicator.recording(skip=0).exchanges)
    assert counts[True] < counts[False]


def test_what_is_exchanged_between_steps_is_not_recorded():
    communicator = RecordingCommunicator()
    for count in (1, 2):
        communicator.all_reduce(np.zeros(9)).wait()
        communicator.start_step()
        communicator.all_reduce(np.zeros(4)).wait()
        communicator.end_step()
        communicator.all_reduce(np.zeros(count)).wait()
    assert communicator.recording(0).exchanges == (Exchange("all_reduce", 32),)


def test_steps_that_differ_are_no_recording():
    communicator = RecordingCommunicator()
    with pytest.raises(ValueError, match="none, or differ"):
        communicator.recording()


def test_the_fastest_tenth_counts():
    assert calm([4.0, 1.0, 9.0, 8.0]) == 1.0
    assert calm([float(value) for value in range(30, 0, -1)]) == 2.0


def test_the_clock_of_a_recording_can_be_chosen():
    times = iter((1.0, 3.0, 4.0, 7.0, 8.0, 10.0, 11.0))
    communicator = RecordingCommunicator(clock=lambda: next(times))
    communicator.start_step()
    communicator.all_reduce(np.zeros(1)).wait()
    communicator.end_step()
    assert [event.seconds for event in communicator.recording(0).events] == [(2.0,), (3.0,), (2.0,)]


def test_what_pays_is_what_is_predicted_to_save_time():
    """One long exchange; 16 bits carry half of it, and a round of 8 steps exchanges once."""
    long, short = Exchange("all_reduce", 10_000), Exchange("all_reduce", 5_000)

    def step(exchange, seconds):
        return recording(("begin", 0, (seconds,)), ("wait", 0, (0.0,)), ("end", -1, (0.0,)), exchanges=(exchange,))

    steps = {
        "residual, synchronized": (step(long, 1.0), 1),
        "residual, local": (step(long, 1.0), 1),
        "residual, local, bfloat16": (step(short, 1.0), 1),
        "residual, 8 local steps": (step(long, 8.0), 8),
        "transformer, buckets of 1 MiB": (step(long, 1.0), 1),
        "transformer, float16": (step(short, 800.0), 1),
        "transformer, 8 steps, DiLoCo": (step(long, 8.0), 8),
    }
    predicted = predict(
        {
            "networks": {"test": asdict(NETWORK)},
            "memory": asdict(INSIDE),
            "recordings": {name: asdict(recorded) for name, (recorded, _) in steps.items()},
            "steps": {name: count for name, (_, count) in steps.items()},
        }
    )
    rows = {(row["case"], row["levels"], row["workers"]): row["seconds"] for row in predicted["rows"]}
    assert rows["residual, 8 local steps", 0, 2] == pytest.approx(1.0 + 1001.0 / 8)
    pays = {option: by_network["test"] for option, by_network in predicted["pays"].items()}
    assert pays["statistics of each worker (residual)"] == []
    assert pays["bfloat16 (residual)"] == list(PREDICTED_WORKERS)
    assert pays["8 local steps (residual)"] == list(PREDICTED_WORKERS)
    assert pays["float16 (transformer)"] == [workers for workers in PREDICTED_WORKERS if workers > 8]
    assert pays["sums within machines of 8 first (residual, local)"] == [16, 32, 64, 128, 256]
