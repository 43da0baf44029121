"""A large state is updated where it lies, by ``grad`` and ``apply``: the same bits, half the memory, and no step half done."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish import optim
from burnish.engines.onnxruntime import OnnxRuntimeEngine, measured_step
from burnish.engines.onnxruntime.bound_graph import BoundGraph
from burnish.engines.onnxruntime.engine import SPINS_NO_LONGER
from burnish.engines.onnxruntime.optimizations import OpenedGraph
from burnish.engines.profiling import record_steps
from burnish.errors import EngineError, NonFiniteLossError
from burnish.kernels.compiling import find_compiler
from burnish.program import signature as signatures
from burnish.program.signature import Entry, GraphSignature, Role, is_updated_in_place
from burnish.program.state import EntriesOnRequest
from oracles.same_state import assert_same_state
from oracles.small_networks import CLASSES, Network

WIDTH, INNER = 12, 64

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda: optim.sgd(lr=0.1, momentum=0.9),
    "adamw": lambda: optim.adamw(lr=0.01),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(lr=0.01)),
    "averaged": lambda: optim.ema(optim.sgd(lr=0.1), 0.9),
    "accumulated": lambda: optim.accumulate(optim.adamw(lr=0.01), 2),
    "lion": lambda: optim.lion(lr=0.01),
    "muon": lambda: optim.muon(lr=0.01),
}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every state count as large."""
    monkeypatch.setattr(signatures, "LEAST_SAVED", -1 << 40)


@functools.cache
def program(name: str = "adamw") -> burnish.Program:
    network = Network("normalized", [WIDTH])
    hidden = network.builder.op("Relu", network.normalized("n", network.dense("in", network.input, WIDTH, INNER), INNER))
    return burnish.compile(network.model(network.dense("out", hidden, INNER, CLASSES)), optimizer=OPTIMIZERS[name]())


def batches(count: int = 3) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    for _ in range(count):
        yield {"x": random.standard_normal((6, WIDTH)).astype(np.float32), "labels": random.integers(0, CLASSES, 6)}


def session_of(name: str = "adamw", kernels: bool = False) -> burnish.Session:
    return burnish.Session(program(name), engine=OnnxRuntimeEngine(kernels=kernels), threads=1)


def trained(name: str, kernels: bool) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    with session_of(name, kernels) as session:
        return [session.step(batch) for batch in batches(4)], session.state()


with_and_without_kernels = pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"))]
)


@pytest.mark.slow
@with_and_without_kernels
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_place_have_the_bits_of_two_buffers(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reports, state = trained(name, kernels)
    monkeypatch.setattr(signatures, "LEAST_SAVED", -1 << 40)
    reports_in_place, state_in_place = trained(name, kernels)
    assert reports_in_place == reports
    assert_same_state(state_in_place, state)


@with_and_without_kernels
@pytest.mark.usefixtures("large")
def test_parameters_and_slots_have_one_buffer_that_steps_leave_where_it_is(kernels: bool) -> None:
    session = session_of(kernels=kernels)
    runner: Any = session._runner
    places = []
    for batch in batches():
        session.step(batch)
        places.append([{name: buffer.array.ctypes.data for name, buffer in held.items()} for held in runner._sets])
    assert places[0] == places[1] == places[2]
    two = {name for name, place in places[0][0].items() if place != places[0][1][name]}
    assert two == {"rng/key", "step", "stat/n.mean", "stat/n.variance"}


@pytest.mark.usefixtures("large")
def test_no_gradient_is_held_between_two_steps() -> None:
    session = session_of()
    session.step(next(batches()))
    runner: Any = session._runner
    grad, _ = runner.load_step()
    values = [value for binding in grad._bindings for value in binding.get_outputs()]
    held = [value for value in values if value.has_value() and value.shape() == [INNER, CLASSES]]
    assert held == []


@pytest.mark.usefixtures("large")
def test_a_loss_that_is_not_finite_leaves_the_state() -> None:
    session = session_of()
    first, second, third = batches()
    session.step(first)
    before = session.state()
    with pytest.raises(NonFiniteLossError, match="The state is kept as it was before this step"):
        session.step(second | {"x": np.full_like(second["x"], np.nan)})
    assert_same_state(session.state(), before)
    other = session_of()
    other.load_state(before)
    assert session.step(third) == other.step(third)
    assert_same_state(session.state(), other.state())


@pytest.mark.usefixtures("large")
def test_an_update_that_fails_is_said_until_a_state_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of()
    first, second, third = batches()
    session.step(first)
    before = session.state()
    run = BoundGraph._run

    def fails(graph: BoundGraph, *arguments: Any) -> Any:
        if graph._graph == "apply":
            raise RuntimeError("Failed to allocate memory for requested buffer of size 8")
        return run(graph, *arguments)

    monkeypatch.setattr(BoundGraph, "_run", fails)
    lost = r"The state is lost: its update failed \(Failed to allocate.* Load a state .*restore a checkpoint; if memory ran out"
    with pytest.raises(EngineError, match=lost):
        session.step(second)
    monkeypatch.undo()
    monkeypatch.setattr(signatures, "LEAST_SAVED", -1 << 40)
    calls = (session.state, lambda: session.step(third), lambda: session.evaluate(third), lambda: session.predict(third))
    for call in calls:
        with pytest.raises(EngineError, match=lost):
            call()
    session.load_state(before)
    other = session_of()
    other.load_state(before)
    assert session.step(third) == other.step(third)
    assert_same_state(session.state(), other.state())


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_that_cannot_be_read_to_its_end_changes_nothing(steps: int) -> None:
    session = session_of()
    for batch in batches(steps):
        session.step(batch)
    runner: Any = session._runner
    before, missing = session.state(), runner.state()
    session.predict(next(batches()))

    def read(name: str) -> np.ndarray:
        if name == list(missing)[-1]:
            raise OSError("the file ends")
        return missing[name] + 1

    with pytest.raises(OSError, match="the file ends"):
        runner.load_state(EntriesOnRequest(program().signature.state, read))
    assert_same_state(session.state(), before)
    whole = {name: array + np.asarray(1, array.dtype) for name, array in before.items()}
    runner.load_state(EntriesOnRequest(program().signature.state, whole.__getitem__))
    assert_same_state(session.state(), whole)
    other = session_of()
    other.load_state(whole)
    batch = next(batches())
    for name, array in other.predict(batch).items():
        np.testing.assert_array_equal(session.predict(batch)[name], array)
    assert session.step(batch) == other.step(batch)


@pytest.mark.usefixtures("large")
def test_a_profile_has_both_graphs_of_a_step_one_after_the_other() -> None:

    engine = OnnxRuntimeEngine(kernels=False)
    graphs = program().graphs.lowered_to(engine.target)
    inputs = next(batches()) | {"lr": np.float32(0.01)}
    recording = record_steps(engine, graphs, program().initial_state(0), inputs, threads=1, steps=2)
    assert len(recording.steps) == 2
    for step in (0, 1):
        runs = [run for run in recording.runs if run.step == step]
        products = [number for number, run in enumerate(runs) if "MatMul" in run.operator or "Gemm" in run.operator]
        updates = [number for number, run in enumerate(runs) if "param/in.weight" in run.entries]
        assert len(products) == 5
        assert max(products) < min(updates)
        assert [run.start for run in runs] == sorted(run.start for run in runs)
    assert {entry for run in recording.runs for entry in run.entries} >= {"param/in.weight", "param/out.weight"}


@pytest.mark.parametrize(
    ("slots", "extent", "expected"), [(1, 2897, True), (1, 2896, False), (0, 8192, False), (2, 2049, True), (2, 2047, False)]
)
def test_a_state_is_updated_in_place_where_that_saves_enough(slots: int, extent: int, expected: bool) -> None:
    def entry(name: str, role: Role, **fields: Any) -> Entry:
        return Entry(name, role, ir.DataType.FLOAT, (extent, extent), **fields)

    updated = ["param/w", *(f"opt/slot{number}/w" for number in range(slots))]
    outputs = tuple(entry(f"next:{name}", Role.OPTIMIZER, updates=name) for name in updated)
    assert is_updated_in_place(GraphSignature((entry("grad:w", Role.GRADIENT),), outputs)) == expected
    by_rows = tuple(replace(output, by_rows=True) for output in outputs)
    assert not is_updated_in_place(GraphSignature((entry("rows:w", Role.ROWS),), by_rows))


def spins_on(opened: OpenedGraph) -> bool:
    """Whether the threads of a graph wait actively when a run has ended."""
    try:
        return opened.session.get_session_options().get_session_config_entry(SPINS_NO_LONGER) != "1"
    except RuntimeError:  # nobody has set it
        return True


@pytest.mark.slow
def test_threads_of_two_graphs_leave_the_cores_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph has threads of its own: those of ``grad`` would wait actively where those of ``apply`` are to run."""
    runner = OnnxRuntimeEngine(kernels=False).open(
        program().graphs.lowered_to(OnnxRuntimeEngine(kernels=False).target), program().initial_state(0)
    )
    assert [spins_on(opened) for opened in runner.graphs_of_step()] == [True]
    monkeypatch.setattr(signatures, "LEAST_SAVED", -1 << 40)
    runner = OnnxRuntimeEngine(kernels=False).open(
        program().graphs.lowered_to(OnnxRuntimeEngine(kernels=False).target), program().initial_state(0)
    )
    assert [spins_on(opened) for opened in runner.graphs_of_step()] == [False, False]


@pytest.mark.slow
@pytest.mark.skipif(not measured_step.CLEAR.exists(), reason="only Linux tells the peak of a process")
def test_a_step_of_a_large_state_takes_what_is_planned() -> None:
    layers, width = 7, 1024
    network = Network("deep", [width])
    x = network.input
    for number in range(layers):
        x = network.builder.op("Relu", network.dense(f"layer{number}", x, width, width))
    deep = burnish.compile(network.model(network.dense("out", x, width, CLASSES)), optimizer="adamw")
    parameters = sum(entry.bytes for entry in deep.signature.state if entry.name.startswith("param/"))
    planned, measured = deep.planned_peak(64).bytes, deep.measured_peak(64)
    assert measured is not None
    # Parameters, two moments, gradients, and what an update of one layer computes; two sets would be six times the parameters.
    assert 4 * parameters < planned < 4.5 * parameters
    assert 0.9 * planned < measured < 1.1 * planned + 20e6, (planned, measured)
