"""Updates of the state in place: what is updated so, what is not, and that a step that fails changes nothing."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.base import uninterrupted
from burnish.engines.torch import TorchEngine, state_updates
from burnish.engines.torch import native as kernels
from burnish.engines.torch.engine import TorchRunner
from burnish.engines.torch.state_updates import (
    StateUpdate,
    Update,
    copy_out_of,
    lying_in_exchange_buffers,
    lying_in_inputs,
    take_increments,
    take_updates,
)
from burnish.errors import EngineError, NonFiniteLossError
from burnish.kernels.elementwise.fusion import fuse_elementwise
from burnish.kernels.elementwise.programs import OPERATIONS

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the engine's kernels")

MOVING = (TorchRunner.step.__code__, TorchRunner._move_on.__code__, StateUpdate.run.__code__)

PERCEPTRON = """<ir_version: 10, opset_import: ["": 18]>
graph (float[batch, 8] x) => (float[batch, 3] logits) <float[64, 8] w, float[64] b, float[3, 64] v> {
    h = Gemm <transB = 1> (x, w, b)
    r = Tanh (h)
    logits = Gemm <transB = 1> (r, v)
}"""


def perceptron() -> ir.Model:
    proto = onnx.parser.parse_model(PERCEPTRON)
    generator = np.random.default_rng(0)
    for name, shape in {"w": (64, 8), "b": (64,), "v": (3, 64)}.items():
        array = generator.normal(scale=0.3, size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return burnish.load(proto)


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(6, 8)).astype(np.float32), "labels": generator.integers(0, 3, 6)}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_the_state_stays_where_it_lies_and_is_that_of_other_engines(threads):
    program = burnish.compile(perceptron(), optimizer="adamw")
    session = burnish.Session(program, engine="torch", threads=threads)
    other = burnish.Session(program, engine=TorchEngine(compile="none"), threads=threads)
    tensors = session._runner._state
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for seed in range(4):
        ours, theirs = session.step(batch(seed)), other.step(batch(seed))
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    expected = other.state()
    for name, array in session.state().items():
        # Adam's first steps divide what rounding left in a gradient by its own size.
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-5)
    kept = [name for name in places if tensors[name].data_ptr() == places[name]]
    assert {name for name in places if name.endswith(("/w", "/v"))} <= set(kept)


@pytest.mark.slow
def test_weights_that_are_cast_for_a_deep_network_are_updated_in_place():
    layers, width = 12, 40
    lines = ["h0 = Identity (x)", *(f"p{i} = MatMul (h{i}, w{i})\n h{i + 1} = Tanh (p{i})" for i in range(layers))]
    weights = ", ".join(f"float[{width}, {width}] w{i}" for i in range(layers))
    header = '<ir_version: 10, opset_import: ["": 18]>'
    body = "\n ".join([*lines, f"logits = Identity (h{layers})"])
    text = f"{header}\ngraph (float[batch, {width}] x) => (float[batch, {width}] logits) <{weights}> {{ {body} }}"
    proto = onnx.parser.parse_model(text)
    generator = np.random.default_rng(0)
    for index in range(layers):
        array = generator.normal(scale=width**-0.5, size=(width, width)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, f"w{index}"))
    program = burnish.compile(burnish.load(proto), loss="cross_entropy", optimizer="adamw", precision="bfloat16")
    session = burnish.Session(program, engine="torch")
    tensors = session._runner._state
    places = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel() == width * width}
    assert len(places) == 3 * layers
    for _ in range(2):
        session.step({"x": generator.normal(size=(6, width)).astype(np.float32), "labels": generator.integers(0, width, 6)})
    assert {name: tensors[name].data_ptr() for name in places} == places


@pytest.mark.slow
def test_a_state_that_was_read_does_not_change_with_the_next_step():
    session = burnish.Session(burnish.compile(perceptron(), optimizer="adamw"), engine="torch")
    given = session.state()
    loaded = {name: array.copy() for name, array in given.items()}
    session.load_state(loaded)
    session.step(batch())
    before = session.state()
    copies = {name: array.copy() for name, array in before.items()}
    session.step(batch(1))
    for name, array in before.items():
        np.testing.assert_array_equal(array, copies[name])
        np.testing.assert_array_equal(loaded[name], given[name])
    assert not np.array_equal(session.state()["param/w"], before["param/w"])


@pytest.mark.slow
def test_a_step_without_a_finite_loss_changes_nothing():
    session = burnish.Session(burnish.compile(perceptron(), optimizer="adamw"), engine="torch")
    session.step(batch())
    before = session.state()
    broken = batch(1)
    broken["x"][0, 0] = np.nan
    with pytest.raises(NonFiniteLossError, match="kept as it was"):
        session.step(broken)
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.slow
def test_an_update_that_fails_half_way_says_that_the_state_has_changed(monkeypatch):
    session = burnish.Session(burnish.compile(perceptron(), optimizer="adamw"), engine="torch")
    session.step(batch())

    def failing(self, state, results):
        raise RuntimeError("no memory left.")

    monkeypatch.setattr(StateUpdate, "run", failing)
    with pytest.raises(EngineError, match=r"updated the state at '.*': no memory left\. A part of the state .* restore the last"):
        session.step(batch())


class Interrupted(BaseException):
    """What a handler of a signal raises."""


@contextmanager
def interrupted_at(place: int) -> Iterator[None]:
    """Raise ``Interrupted`` before an instruction of Python where the state moves on: the one with this number, from 0."""
    count = -1

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code not in MOVING:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == place:
                sys.settrace(None)
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.slow
def test_an_interrupt_at_any_time_leaves_the_state_of_before_or_the_next_one():
    session = burnish.Session(burnish.compile(perceptron(), optimizer="adamw"), engine="torch")
    session.step(batch())
    before = session.state()
    session.step(batch(1))
    after = session.state()
    seen = set()
    for place in itertools.count():
        session.load_state(before)
        try:
            with interrupted_at(place):
                session.step(batch(1))
        except Interrupted:
            found = session.state()
            which = [all(np.array_equal(found[name], whole[name]) for name in whole) for whole in (before, after)]
            assert any(which), place
            seen.add(tuple(which))
        else:
            break
    assert seen == {(True, False), (False, True)}


@pytest.mark.slow
def test_an_interrupt_waits_where_two_calls_move_the_state_on(monkeypatch):
    monkeypatch.setattr(state_updates, "MOST_COPIED", 0)
    monkeypatch.setattr(state_updates, "COUNTERS", ())
    program = burnish.compile(perceptron(), optimizer="adamw")
    session, quiet = (burnish.Session(program, engine="torch") for _ in range(2))
    session.step(batch()), quiet.step(batch())
    assert {name for name, _ in session._runner._state_update[1]} == {"rng/key", "step"}
    run = StateUpdate.run

    def interrupted(self, state, results):
        signal.raise_signal(signal.SIGINT)
        run(self, state, results)

    monkeypatch.setattr(StateUpdate, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.step(batch(1))
    monkeypatch.undo()
    quiet.step(batch(1))
    expected = quiet.state()
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, expected[name])


def test_an_interrupt_is_not_held_up_elsewhere():
    with uninterrupted():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


TWO = """<ir_version: 10, opset_import: ["": 18]>
graph (float[40, 50] a, float[40, 50] b, float[40, 50] g) => (float[40, 50] p, float[40, 50] q, float[50, 40] old) {{
    s = {scaled}
    p = Sub (a, s)
    t = Mul ({read}, g)
    q = Add (b, t)
    old = Transpose <perm = [1, 0]> (a)
}}"""


def split(scaled: str, read: str) -> tuple[ir.Model, list[str], list[Update]]:
    text = TWO.format(scaled=scaled, read=read)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    fuse_elementwise(model.graph)
    names = ["p", "q", "old"]
    return model, names, take_updates(model.graph, names, {"a": "p", "b": "q"})


def test_what_an_update_reads_becomes_an_output():
    model, names, updates = split("Mul (g, g)", "b")
    assert [update.entries for update in updates] == [("a", "b")] or sorted(u.entries for u in updates) == [("a",), ("b",)]
    assert names == ["old", "operand:0"]
    assert [value.name for value in model.graph.outputs] == ["old", "g"]
    assert [node.op_type for node in model.graph] == ["Transpose"]
    a, b, g = (torch.randn(40, 50, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    expected = a - g * g, b + b * g
    results = {"operand:0": g, "old": a.t()}
    before = a.clone()
    assert lying_in_inputs(model.graph, names, ["b"]) == []
    shared = lying_in_inputs(model.graph, names, ["a", "b"])
    assert shared == ["old"]
    copy_out_of([a, b], results, shared)
    StateUpdate(updates).run({"a": a, "b": b}, results)
    assert torch.equal(a, expected[0])
    torch.testing.assert_close(b, expected[1])
    assert torch.equal(results["old"], before.t())


def test_what_reads_the_state_of_another_update_runs_before_it():
    _, _, updates = split("Mul (g, g)", "a")
    written = [entry for update in updates for entry in update.entries]
    owners = {entry: update for update in updates for entry in update.entries}
    for update in updates:
        for name in update.operands:
            assert name not in written or owners[name] is update


def update(
    groups: list[list[torch.Tensor]],
    program: list[int],
    targets: list[int],
    copies: dict[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Run a program without constants over groups of tensors, whose targets are written, and copy values over entries."""
    copies = copies or {}
    plan = torch.tensor([len(groups), len(groups[0]), len(targets), 0, len(program), *targets, *program])
    tensors = [tensor for group in groups for tensor in group]
    nothing = torch.empty(0, dtype=torch.float64)
    torch.ops.burnish.update_state_(tensors, plan, nothing, list(copies), list(copies.values()), [], [])


def read_behind_its_result() -> list[int]:
    """p' = p (m + g) and m' = (m + g) + m of tensors m, g, p: m is read when the place of its result has been computed once."""
    return [OPERATIONS["Add"], 3, 0, 1, -1, OPERATIONS["Mul"], 4, 2, 3, -1, OPERATIONS["Add"], 3, 3, 0, -1]


@pytest.mark.parametrize("shape", [(1,), (3,), (1025,), (40, 50), (7, 3, 5, 4)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_results_may_lie_where_operands_are_read(shape, channels_last):
    m, g, p = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    if channels_last and len(shape) == 4:
        m, p = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (m, p))
    strides = m.stride()
    expected = (m + g) + m, p * (m + g)
    update([[m, g, p]], read_behind_its_result(), [0, 2])
    assert torch.equal(m, expected[0])
    assert torch.equal(p, expected[1])
    assert m.stride() == strides


def test_what_cannot_be_written_over_is_refused():
    m, g = torch.zeros(4, 5), torch.zeros(4, 1)
    add = [OPERATIONS["Add"], 2, 0, 1, -1]
    with pytest.raises(RuntimeError, match="must have the shape of the result"):
        update([[m, g]], add, [1])
    with pytest.raises(RuntimeError, match="one order"):
        update([[m[:, ::2], g]], add, [0])
    with pytest.raises(RuntimeError, match="no tensor 2"):
        update([[m, g]], add, [2])
    with pytest.raises(RuntimeError, match="a value of the entry's shape and type, and a contiguous entry"):
        update([[m, g]], add, [0], {torch.zeros(3): torch.zeros(4)})
    with pytest.raises(RuntimeError, match="a value of the entry's shape and type, and a contiguous entry"):
        update([[m, g]], add, [0], {torch.zeros(3): torch.zeros(3, dtype=torch.int64)})


def test_a_plan_that_does_not_fit_its_operands_is_refused():
    m, g = torch.zeros(4, 5), torch.zeros(4, 5)
    add = [OPERATIONS["Add"], 2, 0, 1, -1]
    nothing = torch.empty(0, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="3 tensors are no 2 groups of 2"):
        torch.ops.burnish.update_state_([m, g, m], torch.tensor([2, 2, 1, 0, 5, 0, *add]), nothing, [], [], [], [])
    with pytest.raises(RuntimeError, match="more operands or constants than programs read"):
        torch.ops.burnish.update_state_([m, g, m], torch.tensor([1, 2, 1, 0, 5, 0, *add]), nothing, [], [], [], [])
    with pytest.raises(RuntimeError, match="5 numbers expected, and 4 are left"):
        torch.ops.burnish.update_state_([m, g], torch.tensor([1, 2, 1, 0, 5, 0, *add[:4]]), nothing, [], [], [], [])
    with pytest.raises(RuntimeError, match="a value for each entry"):
        torch.ops.burnish.update_state_([m, g], torch.tensor([1, 2, 1, 0, 5, 0, *add]), nothing, [m], [], [], [])


def test_integers_are_counted_on_modulo_their_range():
    count, key = torch.tensor(7), torch.tensor([4294967295, 3], dtype=torch.uint32)
    nothing, empty = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    by = [torch.tensor(1), torch.tensor([2, 4294967295], dtype=torch.uint32)]
    torch.ops.burnish.update_state_([], empty, nothing, [], [], [count, key], by)
    assert (count.item(), key.tolist()) == (8, [1, 2])
    with pytest.raises(RuntimeError, match="counters of 32 or 64 bits"):
        torch.ops.burnish.update_state_([], empty, nothing, [], [], [torch.tensor(True)], [torch.tensor(True)])
    with pytest.raises(RuntimeError, match="an increment for each counter"):
        torch.ops.burnish.update_state_([], empty, nothing, [], [], [count], [])
    whole = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="a contiguous increment"):
        torch.ops.burnish.update_state_([], empty, nothing, [], [], [whole], [whole.t()])


def test_what_adds_a_constant_to_integers_is_taken_out_of_the_graph():
    text = """<ir_version: 10, opset_import: ["": 18]>
graph (int64 step, uint32[2] key, int64 read, int64 turned, float[3] w) => (
    int64 s, uint32[2] k, int64 r, int64 more, int64 t, float[3] v
) <int64 one = {1}, uint32[2] by = {5, 6}, float[3] half = {0.5, 0.5, 0.5}> {
    s = Add (one, step)
    k = Add (key, by)
    r = Add (read, one)
    more = Mul (r, r)
    t = Sub (turned, one)
    v = Add (w, half)
}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    names = ["s", "k", "r", "more", "t", "v"]
    taken = take_increments(model.graph, names, {"step": "s", "key": "k", "read": "r", "turned": "t", "w": "v"})
    assert {name: tensor.tolist() for name, tensor in taken.items()} == {"step": 1, "key": [5, 6]}
    assert names == [value.name for value in model.graph.outputs] == ["r", "more", "t", "v"]
    assert [node.op_type for node in model.graph] == ["Add", "Mul", "Sub", "Add"]


def test_small_values_are_copied_behind_all_updates():
    m, count = torch.ones(3), torch.tensor(7)
    bits = torch.tensor([1, 2], dtype=torch.int32)
    scale = torch.tensor(4.0)
    product = [OPERATIONS["Mul"], 2, 0, 1, -1]
    copies = {count: torch.tensor(8), bits: torch.tensor([[3, 0], [4, 0]], dtype=torch.int32)[:, 0], scale: torch.tensor(0.5)}
    update([[m, scale]], product, [0], copies)  # the present value of the entry `scale` is read
    assert m.tolist() == [4.0, 4.0, 4.0]
    assert (count.item(), bits.tolist(), scale.item()) == (8, [3, 4], 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_one_call_updates_tensors_of_every_size_as_calls_of_their_own_do(threads, kind):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (0,), (255,), (256,), (1,), (257, 3), (2, 8, 5, 7), (130_001,), (16384,), (64, 1024), (2,)]
    groups = [[torch.randn(shape, generator=generator).to(kind) for _ in range(3)] for shape in shapes]
    groups[6] = [tensor.contiguous(memory_format=torch.channels_last) for tensor in groups[6]]
    groups[7][1][129_999] = torch.nan
    apart = [[tensor.clone() for tensor in group] for group in groups]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        update(groups, read_behind_its_result(), [0, 2])
        for group in apart:
            update([group], read_behind_its_result(), [0, 2])
    finally:
        torch.set_num_threads(before)
    for together, alone in zip(groups, apart, strict=True):
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_parameters_of_all_shapes_share_a_call():
    session = burnish.Session(burnish.compile(perceptron(), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9)), engine="torch")
    session.step(batch())
    (update,) = session._runner._updates
    assert set(session._runner._state_update[0].entries) == set(session.state())
    assert sorted(update.entries) == sorted(f"{kind}/{name}" for kind in ("param", "opt/momentum") for name in "wbv")


def test_what_may_lie_in_a_buffer_of_an_exchange_is_known():
    text = """<ir_version: 10, opset_import: ["": 21, "burnish": 1]>
graph (float[4, 2] a, float[4, 2] g) => (float[4, 2] sum, float[2, 4] view, float[4, 2] own, float[4, 2] other) {
    buffer = burnish.AllReduceStart (g)
    sum = burnish.AllReduceFinish (buffer, g)
    view = Transpose <perm = [1, 0]> (sum)
    own = Add (a, sum)
    other = Identity (a)
}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert lying_in_exchange_buffers(model.graph, ["sum", "view", "own", "other"]) == ["sum", "view"]
