"""``compile(memory=...)``: what a step takes when it is run is within the limit, or an error says what is missing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.compiler import memory_limit
from burnish.engines.onnxruntime import measured_step
from burnish.errors import ConfigurationError
from burnish.program import Program
from oracles.same_state import assert_same_state
from oracles.small_networks import CLASSES, Network
from oracles.standard_operators import STANDARD

BATCH, WIDTH, INNER = 2048, 32, 128

measured_here = pytest.mark.skipif(not measured_step.CLEAR.exists(), reason="only Linux tells the peak of a process")


def blocks(count: int = 6, width: int = WIDTH, inner: int = INNER) -> ir.Model:
    """Residual blocks of two dense layers: narrow between, wide within."""
    network = Network("blocks", [width])
    x = network.input
    for number in range(count):
        hidden = network.builder.op("Sigmoid", network.dense(f"{number}.in", x, width, inner))
        hidden = network.builder.op("Tanh", network.dense(f"{number}.mid", hidden, inner, inner))
        x = x + network.dense(f"{number}.out", hidden, inner, width)
    return network.model(network.dense("head", x, width, CLASSES))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Program, int], int | None]], None]:
    """Lets a function tell what a step takes."""

    def told(measure: Callable[[Program, int], int | None]) -> None:
        monkeypatch.setattr(measured_step, "measure", measure)

    return told


@pytest.mark.slow
@measured_here
def test_what_a_step_takes_is_within_the_limit() -> None:
    model = blocks()
    plain = burnish.compile(model, optimizer="adamw")
    taken = plain.measured_peak(BATCH)
    assert taken is not None
    limit = int(0.7 * taken)
    program = burnish.compile(model, optimizer="adamw", memory=f"{limit}:batch={BATCH}")
    again = program.measured_peak(BATCH)
    assert again is not None
    assert again <= limit < taken
    assert program.options["memory"]["measured"] <= limit
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((16, WIDTH)).astype(np.float32), "labels": rng.integers(0, CLASSES, 16)}
    sessions = [burnish.Session(item, engine=STANDARD, threads=1) for item in (plain, program)]
    assert sessions[0].step(batch) == sessions[1].step(batch)
    assert_same_state(sessions[0].state(), sessions[1].state())


@pytest.mark.slow
def test_a_plan_that_fits_is_kept_as_it_is(unmeasured, tmp_path) -> None:
    unmeasured(lambda program, batch: program.planned_peak(batch).bytes)
    program = burnish.compile(blocks(2), memory="1GB:batch=64")
    assert program.options["recompute"] is None
    program.save(tmp_path / "program")
    assert Program.load(tmp_path / "program").options["memory"]["limit"] == 10**9


@pytest.mark.slow
def test_a_plan_is_made_smaller_where_the_runtime_takes_more(unmeasured) -> None:
    measured = []

    def measure(program: Program, batch: int) -> int:
        measured.append(program.planned_peak(batch).bytes)
        return int(1.3 * measured[-1])

    unmeasured(measure)
    model = blocks(4)
    whole = burnish.compile(model).planned_peak(512).bytes
    limit = int(1.05 * whole)
    program = burnish.compile(model, memory=f"{limit}:batch=512")
    assert measured[0] == whole
    assert measured[-1] == program.planned_peak(512).bytes
    assert 1.3 * measured[-1] <= limit < 1.3 * whole
    assert len(measured) <= memory_limit.ATTEMPTS


@pytest.mark.slow
def test_where_nothing_is_measured_the_plan_counts(unmeasured) -> None:
    unmeasured(lambda program, batch: None)
    model = blocks(4)
    limit = int(0.8 * burnish.compile(model).planned_peak(512).bytes)
    program = burnish.compile(model, memory=f"{limit}:batch=512")
    assert program.planned_peak(512).bytes <= limit
    assert "measured" not in program.options["memory"]


@pytest.mark.slow
def test_what_is_missing_is_said(unmeasured) -> None:
    unmeasured(lambda program, batch: None)
    model = blocks(4)
    least = burnish.compile(model, optimizer="adamw", recompute="layers").planned_peak(4096)
    limit = int(0.8 * (least.bytes - least.inputs) + least.inputs)
    with pytest.raises(ConfigurationError) as raised:
        burnish.compile(model, optimizer="adamw", memory=f"{limit}:batch=4096")
    message = str(raised.value)
    assert f"memory: a step does not fit {limit / 1e6:,.1f} MB at batch 4096: planned are" in message
    assert "Parameters take" in message
    assert "the largest activations are '" in message
    assert "A batch of 2048 is planned to fit with recompute='layers': gradients of 2 such batches can be added up" in message
    assert "SGD keeps less than this optimizer" in message
    assert burnish.compile(model, optimizer="adamw", recompute="layers").planned_peak(2048).bytes <= limit
    with pytest.raises(ConfigurationError, match=r"No smaller batch fits: give a limit of .* or more\. Freezing layers"):
        burnish.compile(model, memory="1KB:batch=4")


@pytest.mark.parametrize("requested", ["much", "layers", 0, ["a*"], "0MB", True])
def test_what_is_no_limit_is_an_error(requested) -> None:
    with pytest.raises(ConfigurationError, match=r"memory=.* is no limit: give a number of bytes, or a text such as '64MB'"):
        burnish.compile(blocks(1), memory=requested)


def test_a_limit_beside_recompute_or_an_open_extent_is_an_error(unmeasured) -> None:
    unmeasured(lambda program, batch: None)
    with pytest.raises(ConfigurationError, match="memory and recompute are both given: memory chooses"):
        burnish.compile(blocks(1), memory="1MB", recompute="layers")
    network = Network("open", ["length"])
    mean = network.builder.op("ReduceMean", network.input, network.builder.integers([1]), keepdims=1)
    with pytest.raises(ConfigurationError, match="memory: the input 'x' has the open extent 'length' along axis 1"):
        burnish.compile(network.model(network.dense("head", mean, 1, CLASSES)), memory="1MB")


def test_a_limit_is_read() -> None:
    assert memory_limit.read_limit("64MB:batch=16") == memory_limit.MemoryLimit(64 * 10**6, 16)
    assert memory_limit.read_limit(1000) == memory_limit.MemoryLimit(1000, 1)
