"""Workers on ONNX Runtime whose exchanges are made within the training graph, by the engine's kernels."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine, exchanges, kernels
from burnish.errors import WorkerError
from burnish.kernels.compiling import find_compiler
from distributed.test_split_graphs import SPLITS, alone, assert_close, batches_of, program, stepped
from oracles.normalized_networks import image_batches, inverted_residual, residual
from oracles.several_workers import in_threads, part_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")


@pytest.fixture(autouse=True, scope="module")
def built():
    kernels.build_operators()  # the default is what is built


@pytest.fixture
def step_graphs(monkeypatch):
    """The graphs of the step that ONNX Runtime was given."""
    found: list[ir.Model] = []
    load = OnnxRuntimeEngine.inference_session

    def noted(engine, model, graph="model", *arguments):
        if graph == "step":
            found.append(model)
        return load(engine, model, graph, *arguments)

    monkeypatch.setattr(OnnxRuntimeEngine, "inference_session", noted)
    return found


def cut(monkeypatch):
    monkeypatch.setattr(OnnxRuntimeEngine, "_exchanges_inside", lambda *arguments: False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch normalization", "accumulation", "dropout"])
def test_exchanges_inside_give_the_bits_of_those_between_parts(name, monkeypatch, step_graphs):
    split = SPLITS["four, some without samples"]
    inside = stepped(program(name), batches_of(), split)
    assert any(exchanges.EXCHANGE.is_of(node) for node in step_graphs[0].graph)
    cut(monkeypatch)
    for (reports, state), (expected_reports, expected) in zip(inside, stepped(program(name), batches_of(), split), strict=True):
        assert reports == expected_reports
        for entry, array in expected.items():
            np.testing.assert_array_equal(state[entry], array, err_msg=entry)


@pytest.mark.slow
@pytest.mark.parametrize("make", [residual, inverted_residual])
@pytest.mark.parametrize("channels_last", [True, False])
def test_parts_of_batch_normalization_run_in_kernels(make, channels_last, monkeypatch, step_graphs):
    monkeypatch.setattr("burnish.kernels.convolution.channels_last.takes_most", lambda graph: channels_last)
    compiled = burnish.compile(make(double=False), optimizer="sgd:lr=0.05,momentum=0.9")
    batches = image_batches(3, 12, np.float32)
    results = stepped(compiled, batches, [[5, 7], [12, 0], [6, 6]])
    called = [node.op_type for node in step_graphs[0].graph]
    for part in ("Moments", "Merge", "Apply", "GradSums", "GradMerge", "GradApply"):
        assert f"FusedBatchNorm{part}" in called
    assert not {"Relu", "ReluGrad", "Clip", "ClipGrad", "BatchNormApply"} & set(called)
    assert_close(results, alone(compiled, batches), 2e-5)


@pytest.mark.slow
def test_a_state_that_is_written_in_place(monkeypatch):
    monkeypatch.setattr("burnish.program.signature.LEAST_SAVED", 0)
    compiled = program("batch normalization")
    routes = []

    def work(communicator):
        parallel = burnish.DataParallel(communicator=communicator)
        with burnish.Session(compiled, engine="onnxruntime", threads=1, parallel=parallel) as session:
            routes.append(session.describe()["route"])
            batches = zip(batches_of(), SPLITS["two"], strict=True)
            return [session.step(part_of(batch, communicator.rank, split)) for batch, split in batches], session.state()

    results = in_threads(2, work)
    assert routes == ["gradients, then updates in place"] * 2
    assert_close(results, alone(compiled, batches_of()), 1e-10)


@pytest.mark.slow
def test_every_worker_cuts_its_graph_where_one_has_no_kernels():
    compiled = program("batch normalization")

    def work(communicator):
        engine = OnnxRuntimeEngine(kernels=False if communicator.rank else None)
        parallel = burnish.DataParallel(communicator=communicator)
        with burnish.Session(compiled, engine=engine, threads=1, parallel=parallel) as session:
            assert session.describe()["route"] == "one graph, with the state in arrays"
            batches = zip(batches_of(), SPLITS["two"], strict=True)
            return [session.step(part_of(batch, communicator.rank, split)) for batch, split in batches], session.state()

    assert_close(in_threads(2, work), alone(compiled, batches_of()), 1e-10)


class Failing:
    """A communicator of one worker, whose exchange of a number raises."""

    takes_arrays = True
    rank, size = 0, 1

    def __init__(self, error: BaseException | None):
        self.error: BaseException | None = error
        self.made = itertools.count()
        self.fails_at = 0

    def all_gather(self, buffer, *, group=0):
        self._count()
        return buffer[None]

    def all_reduce(self, buffer, *, group=0, channel=""):
        self._count()
        return self

    def shared_buffer(self, dtype, count, *, group=0, channel=""):
        return None

    def wait(self):
        """It is done."""

    def _count(self):
        if next(self.made) == self.fails_at and self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [WorkerError("rank 3 is gone, and so is 4"), KeyboardInterrupt("stop"), ValueError("no sums")])
def test_what_an_exchange_raises_ends_the_step(error):
    communicator = Failing(None)
    parallel = burnish.DataParallel(communicator=communicator)
    with burnish.Session(program("batch normalization"), engine="onnxruntime", threads=1, parallel=parallel) as session:
        first, *others = batches_of()
        session.step(first)
        before = session.state()
        communicator.error, communicator.made = error, itertools.count()
        communicator.fails_at = 2
        with pytest.raises(type(error)) as raised:
            session.step(others[0])
        assert raised.value is error
        for name, array in session.state().items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)
        communicator.error = None
        reports = [session.step(batch) for batch in others]
    expected, _ = alone(program("batch normalization"), [first, *others])
    assert [report["loss"] for report in reports] == pytest.approx([report["loss"] for report in expected[1:]], abs=1e-10)


def test_gradients_are_waited_for_last(step_graphs, monkeypatch):
    begun: list[str] = []

    class Noted(exchanges._Started):
        def start(self, operands):
            begun.append("start")
            return super().start(operands)

        def finish(self, operands):
            begun.append("finish")
            return super().finish(operands)

    monkeypatch.setattr(exchanges, "_Started", Noted)
    stepped(program("batch normalization"), batches_of()[:1], [[12]], bucket_size=1)
    assert begun == ["start"] * (len(begun) // 2) + ["finish"] * (len(begun) // 2)
    assert len(begun) >= 4
    chained = [node for node in step_graphs[0].graph if exchanges.EXCHANGE.is_of(node) and node.attributes["chained"].value]
    before = {node.attributes["number"].value: node.inputs[-1].producer() for node in chained}
    numbers = sorted(before)
    assert [before[number].attributes["number"].value for number in numbers[1:]] == numbers[:-1]


@pytest.mark.slow
def test_exchanges_go_with_their_session():
    gc.collect()
    before = len(exchanges._open)
    stepped(program("clipping"), batches_of()[:1], [[12]])
    gc.collect()
    assert len(exchanges._open) == before


def test_graphs_that_are_verified_are_cut():
    """A run for comparison would make exchanges that the others do not."""
    compiled = program("clipping")
    results = stepped(compiled, batches_of(), SPLITS["two"], OnnxRuntimeEngine(verify=True))
    assert_close(results, alone(compiled, batches_of()), 1e-10)
