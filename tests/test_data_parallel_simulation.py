"""The simulation of data-parallel training: its formulas, its clocks, and what it records of a real step."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

import burnish
from burnish.models import residual_network
from data_parallel_simulation import (
    Event,
    Exchange,
    Network,
    Recording,
    RecordingCommunicator,
    fit_network,
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
    ],
)
def test_an_exchange_takes_what_the_model_says(kind, algorithm, workers, seconds):
    assert Network("test", 0.5, 10.0, algorithm).seconds(kind, 20, workers) == pytest.approx(seconds)


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
    assert simulate(apart, 2, NETWORK) == pytest.approx(1.0 + 3.0)


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


@pytest.mark.parametrize("share", [True, False])
def test_a_step_is_recorded(share):
    pytest.importorskip("torch")
    program = burnish.compile(residual_network(width=8), optimizer="sgd:lr=0.1")
    communicator = RecordingCommunicator()
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((4, 1, 8, 8), dtype=np.float32), "labels": rng.integers(0, 10, 4)}
    parallel = burnish.DataParallel(share=share, communicator=communicator)
    with burnish.Session(program, engine="torch", parallel=parallel) as session:
        for _ in range(3):
            communicator.start_step()
            session.step(batch)
            communicator.end_step()
    recorded = communicator.recording()
    assert [event.action for event in recorded.events].count("begin") == len(recorded.exchanges)
    assert recorded.events[-1].action == "end"
    assert all(len(event.seconds) == 2 and min(event.seconds) >= 0 for event in recorded.events)
    parameters = sum(array.nbytes for name, array in program.initial_state().items() if name.startswith("param/"))
    gradients = sum(e.size for e in recorded.exchanges if e.kind == "all_reduce")
    assert parameters / 2 < gradients < 2 * parameters
    assert recording_of(json.loads(json.dumps(asdict(recorded)))) == recorded


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


def test_steps_that_differ_are_no_recording():
    communicator = RecordingCommunicator()
    with pytest.raises(ValueError, match="none, or differ"):
        communicator.recording()
