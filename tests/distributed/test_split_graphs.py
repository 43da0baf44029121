"""Workers on an engine without exchanges: the training graph is cut at them, and what workers come to is what one does."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish import optim
from burnish.distributed import ArrayCommunicator
from burnish.engines.onnxruntime import OnnxRuntimeEngine, kernels
from burnish.engines.split_graph import SplitGraph
from burnish.errors import ConfigurationError, EngineError, WorkerError
from burnish.kernels.compiling import find_compiler
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles.combinations import diagonal, spread
from oracles.normalized_networks import image_batches, residual
from oracles.several_workers import in_array_threads, in_threads, part_of
from oracles.small_networks import CLASSES, Network, perceptron

FEATURES, SAMPLES, STEPS = 12, 12, 4
SPLITS = {
    "one": [[12]] * STEPS,
    "two": [[5, 7], [11, 1], [6, 6], [2, 10]],
    "four, some without samples": [[3, 0, 4, 5], [0, 0, 12, 0], [1, 1, 1, 9], [4, 4, 0, 4]],
}


def normalized() -> burnish.Program:
    network = Network("normalized", [FEATURES])
    y = network.builder.op("Relu", network.normalized("norm", network.dense("first", network.input, FEATURES, 8), 8))
    return compute_in_float64(network.model(network.dense("head", y, 8, CLASSES)))


PROGRAMS = {
    "batch normalization": lambda: burnish.compile(normalized(), optimizer="sgd:lr=0.1,momentum=0.9", metrics=("accuracy",)),
    "frozen normalization": lambda: burnish.compile(normalized(), optimizer="sgd:lr=0.1", norm="frozen"),
    "dropout": lambda: burnish.compile(compute_in_float64(perceptron(dropout=True)), optimizer=optim.adam(lr=0.01)),
    "clipping": lambda: burnish.compile(
        compute_in_float64(perceptron()), optimizer=optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(lr=0.5))
    ),
    "accumulation": lambda: burnish.compile(compute_in_float64(perceptron()), optimizer=optim.accumulate(optim.sgd(lr=0.1), 2)),
    "label smoothing": lambda: burnish.compile(
        compute_in_float64(perceptron()), loss="cross_entropy:label_smoothing=0.1", optimizer="sgd:lr=0.1"
    ),
}


@functools.cache
def program(name: str) -> burnish.Program:
    return PROGRAMS[name]()


def batches_of() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((SAMPLES, FEATURES)), "labels": rng.integers(0, CLASSES, SAMPLES)} for _ in range(STEPS)]


def stepped(program, batches, sizes, engine="onnxruntime", **options):
    """What each worker reported, and its state at the end."""

    def work(communicator):
        parallel = burnish.DataParallel(communicator=communicator, **options)
        with burnish.Session(program, engine=engine, threads=1, parallel=parallel) as session:
            parts = [part_of(batch, communicator.rank, split) for batch, split in zip(batches, sizes, strict=True)]
            return [session.step(part) for part in parts], session.state()

    return in_threads(len(sizes[0]), work)


def alone(program, batches):
    with burnish.Session(program, engine="onnxruntime", threads=1) as session:
        return [session.step(batch) for batch in batches], session.state()


def assert_close(results, expected, tolerance):
    reports, state = expected
    for worker_reports, worker_state in results:
        for report, one in zip(worker_reports, reports, strict=True):
            assert report == pytest.approx(one, abs=tolerance)
        for name, array in state.items():
            np.testing.assert_allclose(worker_state[name], array, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.slow
@diagonal(("name", PROGRAMS), ("split", SPLITS))
def test_workers_come_to_what_one_does(name, split):
    results = stepped(program(name), batches_of(), SPLITS[split])
    assert_close(results, alone(program(name), batches_of()), 1e-10)


@pytest.mark.slow
def test_convolutions_and_their_statistics():
    compiled = burnish.compile(residual(double=False), optimizer="sgd:lr=0.05,momentum=0.9")
    batches = image_batches(3, 12, np.float32)
    assert_close(stepped(compiled, batches, [[5, 7], [2, 10], [6, 6]]), alone(compiled, batches), 2e-5)


@pytest.mark.slow
def test_rows_of_a_table():
    network = Network("table", [3], ir.DataType.INT64, "tokens")
    builder = network.builder
    rows = builder.op("Gather", network.drawn("table", 50, 8, fan_in=8), network.input)
    pooled = builder.op("ReduceMean", rows, builder.integers([1]), keepdims=0)
    model = compute_in_float64(network.model(network.dense("head", pooled, 8, CLASSES)))
    compiled = burnish.compile(model, optimizer="sgd:lr=0.1", sparse="auto")
    rng = np.random.default_rng(0)
    batches = [{"tokens": rng.integers(0, 50, (12, 3)), "labels": rng.integers(0, CLASSES, 12)} for _ in range(STEPS)]
    for split in ("two", "four, some without samples"):
        assert_close(stepped(compiled, batches, SPLITS[split]), alone(compiled, batches), 1e-12)


@pytest.mark.slow
def test_a_graph_is_cut_where_values_wait_for_an_exchange(monkeypatch):
    """Where statistics, sums of their gradient, and gradients are exchanged; else where counts and gradients are."""
    cut: list[SplitGraph] = []

    def noted(*arguments):
        cut.append(SplitGraph(*arguments))
        return cut[-1]

    monkeypatch.setattr("burnish.engines.onnxruntime.engine.SplitGraph", noted)
    standard = OnnxRuntimeEngine(kernels=False)
    stepped(program("batch normalization"), batches_of()[:1], [[12]], standard)
    stepped(program("clipping"), batches_of()[:1], [[12]], standard)
    assert [sum(part.run is not None for part in graph._parts) for graph in cut] == [4, 3]


def test_a_forward_pass_stands_beside_its_gradients(monkeypatch):
    """The gradients wait for the number of samples, and kernels take both passes together."""
    loaded: list[list[str]] = []

    def noted(model, load, *arguments):
        def noting(part):
            loaded.append([node.op_type for node in part.graph])
            return load(part)

        return SplitGraph(model, noting, *arguments)

    monkeypatch.setattr("burnish.engines.onnxruntime.engine.SplitGraph", noted)
    stepped(program("clipping"), batches_of()[:1], [[12]], OnnxRuntimeEngine(kernels=False))
    assert [any(name in ("Gemm", "MatMul") for name in part) for part in loaded] == [False, True, False]


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")
def test_kernels_compute_what_lies_between_exchanges(monkeypatch):
    kernels.build_operators()  # the default is what is built
    network = Network("recurrent", [5, 4])
    builder = network.builder
    frames = builder.op("Transpose", network.input, perm=[1, 0, 2])
    weights = [network.drawn(name, 1, 4 * 6, extent, fan_in=6) for name, extent in (("w", 4), ("r", 6))]
    states = builder.op("LSTM", frames, *weights, hidden_size=6)
    last = builder.op("Squeeze", builder.op("Gather", states, builder.integers([-1]), axis=0), builder.integers([0, 1]))
    compiled = burnish.compile(network.model(network.dense("head", last, 6, CLASSES)), optimizer="sgd:lr=0.2,momentum=0.9")
    called: list[str] = []

    def call(model, threads=None):
        kernels.call_kernels(model, threads)
        called.extend(node.op_type for node in model.graph if node.domain == "burnish")

    monkeypatch.setattr("burnish.engines.onnxruntime.engine.call_kernels", call)
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(12, 5, 4)).astype(np.float32), "labels": rng.integers(0, CLASSES, 12)} for _ in range(2)]
    results = stepped(compiled, batches, [[5, 7], [1, 11]])
    assert {"FusedLstmSteps", "FusedLstmStepsGrad", "FusedElementwiseGroups"} <= {*called}
    assert_close(results, alone(compiled, batches), 2e-6)


@pytest.mark.slow
def test_any_library_that_adds_up_and_gathers_arrays():
    compiled, batches = program("batch normalization"), batches_of()

    def work(communicator):
        parallel = burnish.DataParallel(communicator=communicator)
        with burnish.Session(compiled, engine="onnxruntime", threads=1, parallel=parallel) as session:
            parts = [part_of(batch, communicator.rank, split) for batch, split in zip(batches, SPLITS["two"], strict=True)]
            return [session.step(part) for part in parts], session.state()

    assert_close(in_array_threads(2, work), alone(compiled, batches), 1e-10)


def test_groups_exchange_what_one_with_a_communicator_of_its_own_does():
    def work(communicator):
        own = np.arange(4.0) + 10 * communicator.rank
        total = own.copy()
        communicator.all_reduce(total, group=2).wait()
        rows, given = communicator.all_gather(own, group=2), communicator.all_to_all(own.reshape(2, 2), group=2)[0]
        uneven = communicator.all_to_all(own, sizes=[1, 3], group=2)[0]
        return [array.tolist() for array in (total, rows, given, uneven)]

    results = in_array_threads(4, work)
    assert results[0] == [[10, 12, 14, 16], [[0, 1, 2, 3], [10, 11, 12, 13]], [[0, 1], [10, 11]], [[0], [10]]]
    later = [[20, 21, 22, 23], [30, 31, 32, 33]]
    assert results[3] == [[50, 52, 54, 56], later, [[22, 23], [32, 33]], [[21, 22, 23], [31, 32, 33]]]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_accumulation_with_a_scaled_loss(engine):
    """Whether gradients are finite is an exchange of one number, and it stays one without dimensions."""
    precision = burnish.MixedPrecision("float16", loss_scale=64.0)
    compiled = burnish.compile(perceptron(), optimizer=optim.accumulate(optim.sgd(lr=0.1), 2), precision=precision)
    batches = [{"x": batch["x"].astype(np.float32), "labels": batch["labels"]} for batch in batches_of()]

    def work(communicator):
        parallel = burnish.DataParallel(communicator=communicator)
        with burnish.Session(compiled, engine=engine, threads=1, parallel=parallel) as session:
            for step, (batch, split) in enumerate(zip(batches, SPLITS["two"], strict=True)):
                session.step(part_of(batch, communicator.rank, split))
                if step == 2:
                    begun = session.state()
            return begun, session.state()

    with burnish.Session(compiled, engine=engine, threads=1) as session:
        for step, batch in enumerate(batches):
            session.step(batch)
            if step == 2:
                begun = session.state()
        wanted = begun, session.state()
    for states in in_array_threads(2, work):
        for state, expected in zip(states, wanted, strict=True):
            for name, array in expected.items():
                assert state[name].shape == array.shape, name
                np.testing.assert_allclose(state[name], array, rtol=2e-3, atol=2e-4, err_msg=name)


WITHOUT_TORCH = """
import sys
import threading
sys.modules["torch"] = None
import numpy as np
import burnish

program, folder = burnish.Program.load(sys.argv[1]), sys.argv[2]
batches = np.load(sys.argv[3])
barrier, slots, errors = threading.Barrier(2), [None, None], []


def work(rank):
    def gather(array):
        slots[rank] = array.copy()
        barrier.wait()
        rows = np.stack(slots)
        barrier.wait()
        return rows

    try:
        communicator = burnish.distributed.ArrayCommunicator(rank, 2, lambda array: gather(array).sum(0), gather)
        options = {"synchronize_every": 4} if sys.argv[4] == "local" else {}
        parallel = burnish.DataParallel(communicator=communicator, **options)
        own = slice(0, 5) if rank == 0 else slice(5, 12)
        with burnish.Session(program, engine="onnxruntime", threads=1, parallel=parallel) as session:
            for x, labels in zip(batches["x"][:3], batches["labels"][:3]):
                session.step({"x": x[own], "labels": labels[own]})
            state = session.state()
            if rank == 0:
                np.savez(folder + "/state.npz", **{name.replace("/", "|"): array for name, array in state.items()})
    except BaseException as error:
        errors.append(error)
        barrier.abort()


threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
if errors:
    raise errors[0]
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accumulating", "local"])
def test_the_state_in_the_middle_needs_no_pytorch(kind, tmp_path):
    """Of an accumulation, or of a round in which workers step alone: what the workers have is joined as arrays."""
    compiled, batches = program("accumulation" if kind == "accumulating" else "label smoothing"), batches_of()
    compiled.save(tmp_path / "program")
    np.savez(tmp_path / "batches.npz", **{name: np.stack([batch[name] for batch in batches]) for name in batches[0]})
    arguments = [str(tmp_path / "program"), str(tmp_path), str(tmp_path / "batches.npz"), kind]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    saved = np.load(tmp_path / "state.npz")
    if kind == "accumulating":
        _, state = alone(compiled, batches[:3])
        for name, array in state.items():
            np.testing.assert_allclose(saved[name.replace("/", "|")], array, rtol=0, atol=1e-10, err_msg=name)
    else:
        assert saved["step"] == 3


def test_every_exchange_of_arrays():
    def work(communicator):
        rank = communicator.rank
        own = np.arange(6.0) + 10 * rank
        total = own.copy()
        communicator.all_reduce(total).wait()
        tensor = torch.from_numpy(own.copy())
        communicator.all_reduce(tensor).wait()
        assert (tensor.numpy() == total).all()
        assert isinstance(communicator.all_gather(tensor), torch.Tensor)
        rows, pending = communicator.all_to_all(own.reshape(2, 3))
        pending.wait()
        parts, _ = communicator.all_to_all(own, sizes=[4, 2])
        uneven = communicator.all_to_all_uneven(own[: 3 + rank], [[1, 2], [3, 1]])
        share, _ = communicator.reduce_scatter(own.copy(), [4, 2])
        return total, rows, parts, uneven, share

    first, second = in_array_threads(2, work)
    assert first[0].tolist() == second[0].tolist() == [10, 12, 14, 16, 18, 20]
    assert first[1].tolist() == [[0, 1, 2], [10, 11, 12]]
    assert second[1].tolist() == [[3, 4, 5], [13, 14, 15]]
    assert first[2].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert second[2].tolist() == [[4, 5], [14, 15]]
    assert first[3].tolist() == [0, 10, 11, 12]
    assert second[3].tolist() == [1, 2, 13]
    assert first[4].tolist() == [10, 12, 14, 16]
    assert second[4].tolist() == [18, 20]


def one_of_arrays(**functions):
    given = {"all_reduce": lambda array: array, "all_gather": lambda array: array[None], **functions}
    return ArrayCommunicator(0, 1, **given)


def test_what_does_not_go_with_arrays():
    compiled = program("clipping")

    def opened(communicator=None, **options):
        parallel = burnish.DataParallel(communicator=communicator or one_of_arrays(), **options)
        return burnish.Session(compiled, engine="onnxruntime", parallel=parallel)

    for options in ({"deterministic": True}, {"compression": "float16"}):
        with pytest.raises(ConfigurationError, match=r"deterministic and compression are made of a process group of PyTorch"):
            opened(**options)
    with pytest.raises(WorkerError, match=r"float64 of shape \[\d+\] was expected|was expected: all_reduce returns what"):
        opened(one_of_arrays(all_gather=lambda array: array)).step(batches_of()[0])
    with pytest.raises(ConfigurationError, match=r"rank=2, size=2"):
        ArrayCommunicator(2, 2, lambda array: array, lambda array: array)


@pytest.mark.slow
def test_parts_of_the_state_are_refused_by_name():
    def work(communicator):
        parallel = burnish.DataParallel(communicator=communicator, shard_optimizer=True)
        with pytest.raises(EngineError, match=r"an exchange that this engine cannot make: leave out shard_optimizer"):
            burnish.Session(program("dropout"), engine="onnxruntime", parallel=parallel).step(batches_of()[0])

    in_threads(2, work)


SCRIPT = """
import sys
import numpy as np
import burnish
from burnish import distributed

communicator = distributed.mpi()
batches = np.load(sys.argv[2])
session = burnish.Session(
    burnish.Program.load(sys.argv[1]), engine="onnxruntime", threads=1,
    parallel=burnish.DataParallel(communicator=communicator),
)
bounds = np.linspace(0, 12, communicator.size + 1).astype(int)
own = slice(bounds[communicator.rank], bounds[communicator.rank + 1])
for x, labels in zip(batches["x"], batches["labels"]):
    session.step({"x": x[own], "labels": labels[own]})
assert "torch" not in sys.modules
if communicator.rank == 0:
    np.savez(sys.argv[3], **{name.replace("/", "|"): array for name, array in session.state().items()})
"""


@spread("ranks", [3, 2, 4], test_all=1)
@pytest.mark.slow
def test_ranks_of_mpi_equal_one_process_without_pytorch(tmp_path, ranks):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("mpich is not installed")
    compiled, batches = program("batch normalization"), batches_of()
    compiled.save(tmp_path / "program")
    np.savez(tmp_path / "batches.npz", **{name: np.stack([batch[name] for batch in batches]) for name in batches[0]})
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = [tmp_path / name for name in ("train.py", "program", "batches.npz", "state.npz")]
    done = subprocess.run(
        [mpiexec, "-n", str(ranks), sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    saved = np.load(tmp_path / "state.npz")
    _, state = alone(compiled, batches)
    for name, array in state.items():
        np.testing.assert_allclose(saved[name.replace("/", "|")], array, rtol=0, atol=1e-10, err_msg=name)
