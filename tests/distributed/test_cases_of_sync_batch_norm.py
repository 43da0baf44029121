"""What PyTorch's own tests ask of ``torch.nn.SyncBatchNorm`` on GPUs, asked of workers on CPUs, which it refuses.

The cases, their shapes and what is claimed of them are those of ``torch/testing/_internal/distributed/distributed_test.py`` and
of ``test/distributed/test_c10d_common.py``; ``docs/data-parallel.md`` lists them. What workers come to is compared with PyTorch
in one process with the whole batch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import pytest
import torch
from worker_processes import run

import burnish
from burnish.distributed.connection.communicators import GroupCommunicator
from burnish.distributed.connection.joining import join
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles.normalized_networks import image_batches, residual
from oracles.several_workers import Batch, Outcome, largest_difference, part_of, train_alone, train_in_threads, train_part
from oracles.small_networks import Network

STEPS, RATE = 5, 0.125
EPSILON = float(np.float32(1e-5))  # attributes have the digits of float32
Weights = dict[str, torch.Tensor]


def layer(shape: Sequence[int | str], channels: int, momentum: float, double: bool = True) -> ir.Model:
    """Batch normalization by itself; ``momentum`` is the part of the running statistics that stays."""
    network = Network("layer", shape)
    arrays = {"scale": np.ones(channels), "bias": np.zeros(channels), "mean": np.zeros(channels), "variance": np.ones(channels)}
    weights = [network.weight(f"norm.{name}", array) for name, array in arrays.items()]
    y = network.builder.op("BatchNormalization", network.input, *weights, epsilon=EPSILON, momentum=momentum)
    model = network.model(y)
    return compute_in_float64(model) if double else model


def between_layers() -> ir.Model:
    """Batch normalization of [batch, 4, 10] between two linear layers, and a softmax."""
    network = Network("between", [2])
    builder = network.builder
    y = builder.op("MatMul", network.input, network.drawn("first", 2, 40, fan_in=2))
    y = builder.op("Reshape", y, builder.integers([-1, 4, 10]))
    y = network.normalized("norm", y, 4)
    y.value.producer().attributes["momentum"] = ir.AttrFloat32("momentum", 0.875)
    y = builder.op("Reshape", y, builder.integers([-1, 40]))
    y = builder.op("MatMul", y, network.drawn("second", 40, 4, fan_in=40))
    return compute_in_float64(network.model(builder.op("Softmax", y, axis=1)))


def torch_layer(x: torch.Tensor, weights: Weights, part: float) -> torch.Tensor:
    return torch.nn.functional.batch_norm(
        x, weights["norm.mean"], weights["norm.variance"], weights["norm.scale"], weights["norm.bias"], True, part, EPSILON
    )


def torch_between_layers(x: torch.Tensor, weights: Weights, part: float) -> torch.Tensor:
    y = torch_layer((x @ weights["first"]).reshape(-1, 4, 10), weights, part)
    return torch.softmax(y.reshape(-1, 40) @ weights["second"], dim=1)


@dataclass(frozen=True)
class Case:
    """What is trained, and on what.

    Attributes:
        model: makes it.
        forward: the same in PyTorch, of the batch, the weights and the part of a batch in the running statistics.
        sizes: how many samples each worker has.
        sample, target: shapes of one.
        part: of a batch in the running statistics; None: those of all batches so far.
        frozen: what does not train.
    """

    model: Callable[[], ir.Model]
    forward: Callable[[torch.Tensor, Weights, float], torch.Tensor]
    sizes: tuple[int, ...]
    sample: tuple[int, ...]
    target: tuple[int, ...]
    part: float | None = 0.125
    frozen: frozenset[str] = field(default_factory=frozenset)

    def program(self) -> burnish.Program:
        model = self.model()
        statistics = ("norm.mean", "norm.variance")
        trainable = [name for name in model.graph.initializers if name not in self.frozen and name not in statistics]
        return burnish.compile(
            model,
            loss="mse",
            optimizer=f"sgd:lr={RATE}",
            trainable=trainable,
            norm="train:momentum=cumulative" if self.part is None else "train",
            running_variance="pytorch",
        )

    def batches(self) -> list[Batch]:
        rng = np.random.default_rng(1)
        samples = sum(self.sizes)
        return [
            {"x": rng.standard_normal((samples, *self.sample)), "targets": rng.standard_normal((samples, *self.target))}
            for _ in range(STEPS)
        ]

    def in_torch(self, state: dict[str, np.ndarray], batches: list[Batch]) -> tuple[list[float], dict[str, np.ndarray]]:
        """The loss of every step, and the weights and statistics behind the last."""
        kept = {name: array for name, array in state.items() if name.startswith(("param/", "stat/"))}
        named = {name.partition("/")[2]: torch.from_numpy(array.copy()) for name, array in kept.items()}
        trained = [name for name in named if name not in self.frozen and name not in ("norm.mean", "norm.variance")]
        losses = []
        for step, batch in enumerate(batches, start=1):
            for name in trained:
                named[name] = named[name].detach().requires_grad_()
            y = self.forward(torch.from_numpy(batch["x"]), named, 1 / step if self.part is None else self.part)
            loss = torch.nn.functional.mse_loss(y, torch.from_numpy(batch["targets"]))
            loss.backward()
            losses.append(loss.item())
            for name in trained:
                named[name] = named[name].detach() - RATE * named[name].grad
        return losses, {name: tensor.numpy() for name, tensor in named.items()}


def alone(momentum: float, *shape: int) -> Callable[[], ir.Model]:
    return lambda: layer(shape, 2, momentum)


AFFINE = frozenset({"norm.scale", "norm.bias"})
CASES = {
    "between linear layers": Case(between_layers, torch_between_layers, (2, 2, 2), (2,), (4,)),
    "without scale and bias": Case(between_layers, torch_between_layers, (2, 2, 2), (2,), (4,), frozen=AFFINE),
    "parts of different sizes": Case(between_layers, torch_between_layers, (2, 3, 4, 5), (2,), (4,)),
    "of 2 axes": Case(alone(0.875, 2), torch_layer, (2, 2, 2), (2,), (2,)),
    "one sample per worker": Case(alone(0.875, 2), torch_layer, (1, 1, 1, 1), (2,), (2,)),
    "images": Case(alone(1 / 64, 2, 4, 4), torch_layer, (2, 2), (2, 4, 4), (2, 4, 4), part=63 / 64),
    "volumes": Case(alone(1 / 64, 2, 4, 4, 4), torch_layer, (2, 2), (2, 4, 4, 4), (2, 4, 4, 4), part=63 / 64),
    "a cumulative average": Case(alone(0.875, 2, 4, 4), torch_layer, (2, 2), (2, 4, 4), (2, 4, 4), part=None),
    "an empty part": Case(alone(0.875, 2, 11, 13), torch_layer, (0, 1), (2, 11, 13), (2, 11, 13)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_workers_come_to_what_pytorch_comes_to_with_the_whole_batch(pool, tmp_path, name):
    case = CASES[name]
    program, batches = case.program(), case.batches()
    losses, weights = case.in_torch(program.initial_state(), batches)
    saved = str(program.save(tmp_path / "program"))
    for reports, states in pool.run(len(case.sizes), train_part, saved, batches, [case.sizes] * STEPS, {}):
        assert [report["loss"] for report in reports] == pytest.approx(losses, rel=1e-10)
        for entry, array in states[-1].items():
            if (expected := weights.get(entry.partition("/")[2])) is not None:
                np.testing.assert_allclose(array, expected, rtol=1e-10, atol=1e-10, err_msg=entry)


LENGTHS = (10, 100, 1000)


def train_on_constants(communicator, saved: str, steps: int) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Two samples of two constant channels each; how long they are, and what they hold, differs between workers."""
    batch = {"x": constants(communicator.rank), "targets": np.zeros((2, 2, LENGTHS[communicator.rank]))}
    parallel = burnish.DataParallel(communicator=communicator)
    with burnish.Session(burnish.Program.load(saved), engine="torch", threads=1, parallel=parallel) as session:
        return [session.step(batch) for _ in range(steps)], session.state()


def constants(rank: int) -> np.ndarray:
    values = np.array([0.1, 0.3]) ** (rank - 1)
    return np.repeat(np.tile(values, (2, 1))[:, :, None], LENGTHS[rank], axis=2)


@pytest.mark.slow
def test_running_statistics_are_those_of_all_elements_where_samples_have_other_sizes(pool, tmp_path):
    program = burnish.compile(layer([2, "length"], 2, 0.01), loss="mse", optimizer="sgd:lr=0.0", running_variance="pytorch")
    elements = np.concatenate([constants(rank).swapaxes(0, 1).reshape(2, -1) for rank in range(3)], axis=1)
    variance = elements.var(axis=1)
    for reports, state in pool.run(3, train_on_constants, str(program.save(tmp_path / "program")), 10):
        np.testing.assert_allclose(state["stat/norm.mean"], elements.mean(axis=1), rtol=1e-10)
        np.testing.assert_allclose(state["stat/norm.variance"], elements.var(axis=1, ddof=1), rtol=1e-10)
        assert reports[-1]["loss"] == pytest.approx(np.mean(variance / (variance + EPSILON)), rel=1e-10)


@pytest.mark.slow
def test_half_precision(pool, tmp_path):
    model = residual(double=False)
    program = burnish.compile(model, loss="cross_entropy", optimizer="sgd:lr=0.05", precision="float16")
    batches = image_batches(2, 8, np.float32)
    saved = str(program.save(tmp_path / "program"))
    expected = train_alone(program, batches)
    for outcome in pool.run(2, train_part, saved, batches, [[4, 4], [3, 5]], {}):
        assert largest_difference(outcome, expected) < 5e-3
        for name, array in outcome[1][-1].items():
            assert array.dtype == np.float32 or not name.startswith(("param/", "stat/")), name


def train_joined(rank: int, saved: str, batches: list[Batch], sizes: list[list[int]], options: dict) -> Outcome:
    with join(first_contact=60) as group:
        return train_part(GroupCommunicator(group), saved, batches, sizes, options)


@pytest.mark.slow
def test_groups_of_workers(tmp_path):
    """A process group of its own for every two workers: each pair has its own statistics, the running ones are the averages."""
    batches, sizes = image_batches(3, 12), [[2, 4, 5, 1], [0, 6, 3, 3], [3, 3, 6, 0]]
    options = {"optimizer": "sgd:lr=0.125", "running_variance": "pytorch"}
    saved = str(burnish.compile(residual(), **options).save(tmp_path / "program"))
    expected = train_alone(burnish.compile(residual(), norm="ghost:6", **options), batches)
    for outcome in run(train_joined, 4, saved, batches, sizes, {"norm": "sync:2"}):
        assert largest_difference(outcome, expected) < 1e-10


def evaluate_on_one(communicator, saved: str, batches: list[Batch], sizes: tuple[int, ...]) -> dict[str, float] | None:
    parallel = burnish.DataParallel(communicator=communicator)
    parts = [part_of(batch, communicator.rank, sizes) for batch in batches]
    evaluated = None
    with burnish.Session(burnish.Program.load(saved), engine="torch", threads=1, parallel=parallel) as session:
        session.step(parts[0])
        if communicator.rank == 0:
            for _ in range(6):
                evaluated = session.evaluate(batches[1])
        session.step(parts[1])
    return evaluated


@pytest.mark.slow
def test_evaluation_on_one_worker_waits_for_no_other(pool, tmp_path):
    case = CASES["images"]
    program, batches = case.program(), case.batches()
    first, other = pool.run(2, evaluate_on_one, str(program.save(tmp_path / "program")), batches, case.sizes)
    with burnish.Session(program, engine="torch", threads=1) as session:
        session.step(batches[0])
        assert first["loss"] == pytest.approx(session.evaluate(batches[1])["loss"], rel=1e-10)
    assert other is None


def refused_by_pytorch(communicator) -> str:
    # It looks whether there is a group of its own library, be it of one process.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.nn.SyncBatchNorm(2)(torch.zeros(2, 2))
    except ValueError as error:
        return str(error)
    finally:
        torch.distributed.destroy_process_group()
    return ""


def test_pytorch_refuses_a_cpu(pool):
    for message in pool.run(2, refused_by_pytorch):
        assert "SyncBatchNorm expected input tensor to be on GPU" in message


@pytest.mark.slow
def test_a_batch_without_samples(pool, tmp_path):
    case = CASES["an empty part"]
    program = case.program()
    empty = [{name: array[:0] for name, array in batch.items()} for batch in case.batches()]
    for reports, states in pool.run(2, train_part, str(program.save(tmp_path / "program")), empty, [(0, 0)] * STEPS, {}):
        for values in (*reports, *states):
            assert all(np.isfinite(value).all() for value in values.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "norm"),
    [
        ("train", "sync"),
        ("train", "local"),
        ("train", "sync:2"),
        ("train:momentum=cumulative", "sync"),
        ("renorm", "sync"),
    ],
)
def test_a_batch_without_samples_leaves_the_running_statistics(policy, norm):
    program = burnish.compile(residual(), optimizer="sgd:lr=0.05", norm=policy)
    full = image_batches(2, 8)
    nothing = {name: array[:0] for name, array in full[0].items()}
    for _, (before, behind, later) in train_in_threads(
        program, [full[0], nothing, full[1]], [[2, 2, 4, 0], [0] * 4, [2] * 4], norm=norm
    ):
        names = [name for name in before if name.startswith("stat/")]
        assert names
        for name in names:
            assert behind[name].tobytes() == before[name].tobytes(), name
            assert later[name].tobytes() != before[name].tobytes(), name
        assert all(np.isfinite(value).all() for value in later.values())
