"""Running statistics of rank 0, beside PyTorch: each group normalizes by itself, and the first one's statistics are all workers'.

That is what ``DistributedDataParallel`` does, which broadcasts the buffers of its first worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

import burnish
from burnish.errors import ConfigurationError
from oracles.several_workers import in_array_threads, in_threads, part_of

FEATURES, HIDDEN, CLASSES, SAMPLES, RATE, MOMENTUM = 6, 5, 3, 12, 0.5, 0.1
WORKERS = 4
EPSILON = float(np.float32(1e-5))  # an attribute of ONNX has the digits of float32
SIZES = [[3, 3, 3, 3], [0, 5, 4, 3], [2, 4, 0, 6], [0, 0, 7, 5], [12, 0, 0, 0], [2, 2, 2, 6]]
"""Rank 0 has nothing in one step, and its group of two nothing in another."""
NAMES = ("mean1", "variance1", "mean2", "variance2")


@cache
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"first": (FEATURES, HIDDEN), "second": (HIDDEN, HIDDEN), "head": (HIDDEN, CLASSES)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    for layer in "12":
        arrays |= {f"scale{layer}": rng.uniform(0.5, 1.5, HIDDEN), f"bias{layer}": rng.normal(size=HIDDEN)}
        arrays |= {f"mean{layer}": rng.normal(size=HIDDEN), f"variance{layer}": rng.uniform(1, 2, HIDDEN)}
    return arrays


@cache
def program(**norm: str) -> burnish.Program:
    declared = ", ".join(f"double[{', '.join(map(str, array.shape))}] {name}" for name, array in weights().items())
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
g (double[batch, {FEATURES}] x) => (double[batch, {CLASSES}] logits) <{declared}> {{
    h1 = MatMul (x, first)
    n1 = BatchNormalization (h1, scale1, bias1, mean1, variance1)
    a1 = Relu (n1)
    h2 = MatMul (a1, second)
    n2 = BatchNormalization (h2, scale2, bias2, mean2, variance2)
    a2 = Relu (n2)
    logits = MatMul (a2, head)
}}""")
    del model.graph.initializer[:]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights().items())
    return burnish.compile(model, optimizer=f"sgd:lr={RATE}", norm=norm or "train", running_variance="pytorch")


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(SAMPLES, FEATURES)), "labels": rng.integers(0, CLASSES, SAMPLES)} for _ in range(len(SIZES))]


def by_pytorch(group: int) -> list[dict[str, np.ndarray]]:
    """The state after each step, where every ``group`` workers normalize by statistics of their parts together."""
    tensors = {name: torch.tensor(array) for name, array in weights().items()}
    trained = [tensor.requires_grad_() for name, tensor in tensors.items() if name not in NAMES]
    states = []
    for batch, sizes in zip(batches(), SIZES, strict=True):
        for first in range(0, WORKERS, group):
            start, count = sum(sizes[:first]), sum(sizes[first : first + group])
            if not count:
                continue
            y = torch.tensor(batch["x"][start : start + count])
            for layer, weight in (("1", "first"), ("2", "second")):
                # The first group's batches alone get to the running statistics.
                running = (tensors[f"mean{layer}"], tensors[f"variance{layer}"]) if first == 0 else (None, None)
                scale, bias = tensors[f"scale{layer}"], tensors[f"bias{layer}"]
                y = torch.nn.functional.batch_norm(y @ tensors[weight], *running, scale, bias, True, MOMENTUM, EPSILON).relu()
            labels = torch.tensor(batch["labels"][start : start + count])
            loss = torch.nn.functional.cross_entropy(y @ tensors["head"], labels, reduction="sum") / SAMPLES
            loss.backward()
        with torch.no_grad():
            for tensor in trained:
                tensor -= RATE * tensor.grad
                tensor.grad = None
        states.append({name: tensor.detach().numpy().copy() for name, tensor in tensors.items()})
    return states


def trained(
    engine: str = "torch",
    compiled: burnish.Program | None = None,
    steps: int = len(SIZES),
    connect: Callable[[int, Callable], list] = in_threads,
    **options,
) -> list[list[dict[str, np.ndarray]]]:
    """By rank, the states after each step; in rounds of several steps that after the last."""

    def work(communicator):
        parallel = burnish.DataParallel(communicator=communicator, **options)
        states = []
        with burnish.Session(compiled or program(), engine=engine, threads=1, parallel=parallel) as session:
            for step, (batch, sizes) in enumerate(zip(batches()[:steps], SIZES[:steps], strict=True), 1):
                session.step(part_of(batch, communicator.rank, sizes))
                if step % options.get("synchronize_every", 1) == 0:
                    states.append(session.state())
        return states

    return connect(WORKERS, work)


def entry(name: str) -> str:
    return f"stat/{name}" if name in NAMES else f"param/{name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "connect"),
    [("torch", in_threads), ("onnxruntime", in_threads), ("onnxruntime", in_array_threads)],
    ids=["torch", "onnxruntime", "arrays"],
)
@pytest.mark.parametrize(("norm", "group"), [("local", 1), ("sync:2", 2), ("sync", WORKERS)])
def test_running_statistics_of_rank_0_are_those_of_its_own_group(norm, group, engine, connect):
    expected = by_pytorch(group)
    outcomes = trained(engine, connect=connect, norm=norm, statistics="rank0")
    for states in outcomes:
        for state, after in zip(states, expected, strict=True):
            for name, array in after.items():
                np.testing.assert_allclose(state[entry(name)], array, rtol=0, atol=1e-12, err_msg=name)
        for state, first in zip(states, outcomes[0], strict=True):
            assert all(state[name].tobytes() == first[name].tobytes() for name in first)


@pytest.mark.slow
def test_each_layer_keeps_its_statistics_in_steps_that_have_nothing_for_it():
    """In one layer groups of two normalize together, in the other rank 0 by itself."""
    outcomes = trained(compiled=program(BatchNormalization="sync:2", BatchNormalization_1="local"), statistics="rank0")
    for states in outcomes:
        present = {name: weights()[name] for name in NAMES}
        for state, sizes in zip(states, SIZES, strict=True):
            has_none = {"1": not sum(sizes[:2]), "2": not sizes[0]}
            for name in NAMES:
                assert (state[entry(name)].tobytes() == present[name].tobytes()) == has_none[name[-1]], name
            present = {name: state[entry(name)] for name in NAMES}
    expected = by_pytorch(2)[0]
    for name in NAMES[:2]:
        np.testing.assert_allclose(outcomes[3][0][entry(name)], expected[name], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
def test_workers_that_step_alone_take_those_of_rank_0(engine):
    every = 3

    def work(rank: int) -> dict[str, np.ndarray]:
        """What a worker comes to by itself in the first round."""
        with burnish.Session(program(), engine=engine, threads=1) as session:
            for batch, sizes in zip(batches()[:every], SIZES[:every], strict=True):
                if sizes[rank]:
                    session.step(part_of(batch, rank, sizes))
            return session.state()

    alone = [work(rank) for rank in range(WORKERS)]
    samples = np.sum(SIZES[:every], axis=0)
    for states in trained(engine, statistics="rank0", synchronize_every=every, steps=every):
        for name, array in states[-1].items():
            if name.startswith("stat/"):
                assert array.tobytes() == alone[0][name].tobytes(), name
            elif name.startswith("param/"):
                mean = sum(n * state[name] for n, state in zip(samples, alone, strict=True)) / samples.sum()
                np.testing.assert_allclose(array, mean, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("options", [{}, {"synchronize_every": 2}], ids=["each step", "rounds"])
def test_workers_that_differ_are_refused(options):
    def work(communicator):
        statistics = "rank0" if communicator.rank else "mean"
        parallel = burnish.DataParallel(communicator=communicator, norm="local", statistics=statistics, **options)
        burnish.Session(program(), engine="torch", threads=1, parallel=parallel)

    with pytest.raises(ConfigurationError, match=r"the exchanges of rank 0 has .* that of rank 1 .*DataParallel options"):
        in_threads(2, work)


def test_a_model_that_reads_them_is_refused():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
g (float[batch, 3] x) => (float[batch, 3] logits)
<float[3] s = {1, 1, 1}, float[3] b = {0, 0, 0}, float[3] mean = {0, 0, 0}, float[3] variance = {1, 1, 1}> {
    y, new_mean, new_variance = BatchNormalization <training_mode = 1> (x, s, b, mean, variance)
    logits = Add (y, new_mean)
}""")
    compiled = burnish.compile(model, optimizer="sgd:lr=0.1")
    message = r"statistics='rank0': the running statistics of 'BatchNormalization' are read in the step .* take statistics='mean'"
    with pytest.raises(ConfigurationError, match=message):
        trained(compiled=compiled, norm="local", statistics="rank0")


def test_another_kind_is_refused():
    message = r"DataParallel: statistics='rank1': give 'mean', the average .* over the workers, or 'rank0', those of the first"
    with pytest.raises(ConfigurationError, match=message):
        burnish.DataParallel(statistics="rank1")
