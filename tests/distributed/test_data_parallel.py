"""Several workers as threads of one process: what each policy, loss and option comes to, and what is refused."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.distributed.derivation import derive
from burnish.distributed.exchanges import is_exchange
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.fusion import fuse
from burnish.errors import ConfigurationError, EngineError
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.normalization.fusion import SYNCHRONIZED
from burnish.norms import get
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles.kernel_graphs import without_semantic_graphs
from oracles.normalized_networks import image_batches, inverted_residual, residual
from oracles.several_workers import Outcome, in_threads, largest_difference, train_alone, train_in_threads
from oracles.small_networks import CLASSES, Network
from oracles.thread_communicator import ThreadCommunicator

STEPS = 3
UNEVEN = [[5, 0, 7], [1, 10, 1], [0, 0, 12]]
EVEN = [[4, 4, 4]] * STEPS


@cache
def compiled(norm: str = "train", loss: str | burnish.losses.Loss = "cross_entropy", **options) -> burnish.Program:
    settings = {"optimizer": "sgd:lr=0.1,momentum=0.9", "running_variance": "pytorch", **options}
    return burnish.compile(residual(), norm=norm, loss=loss, **settings)


@cache
def in_one_process(norm: str) -> Outcome:
    return train_alone(compiled(norm), image_batches(STEPS, 12))


def exchanges(program: burnish.Program, workers: int = 2, **options) -> list[ir.Node]:
    settings = {"bucket_size": 2**20, "share": True, **options}
    derived = derive(program.graphs.lowered_to(TorchEngine().target.among_workers()), workers, get("sync"), **settings)
    return [node for node in derived.semantic["grad"].graph if is_exchange(node)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm",
    ["sync", "train:momentum=cumulative", "renorm:start=0,r_max_step=0,d_max_step=0,r_max=1.2,d_max=0.1", "frozen"],
)
def test_policies_of_the_whole_batch(norm):
    alone = in_one_process(norm)
    for outcome in train_in_threads(compiled(norm), image_batches(STEPS, 12), UNEVEN):
        assert largest_difference(outcome, alone) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "meaning", "sizes", "alone"),
    [
        ("train", "local", EVEN, "ghost:4"),
        ("local", "sync", EVEN, "ghost:4"),
        ("ghost:2", "sync", EVEN, "ghost:2"),
        ("sync:2", "sync", [[3, 3, 3, 3]] * STEPS, "ghost:6"),
        pytest.param("train", "sync:2", [[1, 5, 4, 2]] * STEPS, "ghost:6", marks=pytest.mark.slow),
    ],
)
def test_policies_of_parts_are_groups_of_one_batch(norm, meaning, sizes, alone):
    expected = in_one_process(alone)
    for outcome in train_in_threads(compiled(norm), image_batches(STEPS, 12), sizes, norm=meaning):
        assert largest_difference(outcome, expected) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        burnish.losses.cross_entropy(weight=[0.2, 3.0, 1.0, 0.5, 2.0], label_smoothing=0.2, ignore_index=3),
        burnish.losses.cross_entropy(reduction="sum"),
        "focal",
    ],
)
def test_losses_divide_by_the_weight_of_all(loss):
    program, batches = compiled(loss=loss, optimizer="sgd:lr=0.01"), image_batches(STEPS, 12)
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, UNEVEN):
        assert largest_difference(outcome, alone) < 1e-11


@pytest.mark.slow
def test_a_penalty_of_the_weights_counts_once():
    network = Network("penalized", [6])
    logits = network.dense("head", network.input, 6, CLASSES)
    weight = network.builder.tensor(network.graph.initializers["head.weight"])
    penalty = network.builder.op("ReduceSum", weight * weight, keepdims=0)
    penalty.value.name = "penalty"
    model = network.model(logits)
    model.graph.outputs.append(penalty.value)
    loss = burnish.losses.weighted_sum(
        [(1.0, "cross_entropy", "logits"), (0.3, burnish.losses.output("penalty", reduction="sum"))]
    )
    program = burnish.compile(compute_in_float64(model), loss=loss, optimizer="sgd:lr=0.1")
    rng = np.random.default_rng(0)
    batches = [{"x": rng.standard_normal((12, 6)), "labels:logits": rng.integers(0, CLASSES, 12)} for _ in range(STEPS)]
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, UNEVEN):
        assert largest_difference(outcome, alone) < 1e-12


@pytest.mark.slow
def test_masks_are_those_of_the_samples():
    program = burnish.compile(inverted_residual(dropout=True), optimizer="sgd:lr=0.1")
    batches = image_batches(STEPS, 12)
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, UNEVEN):
        assert largest_difference(outcome, alone) < 1e-11


@pytest.mark.slow
def test_float32_differs_by_rounding():
    program = burnish.compile(residual(double=False), optimizer="sgd:lr=0.05")
    batches = image_batches(1, 12, np.float32)
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, UNEVEN[:1]):
        assert largest_difference(outcome, alone) < 2e-6


@pytest.fixture(scope="module")
def joined():
    return train_in_threads(compiled(), image_batches(STEPS, 12), EVEN)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"share": False}, {"bucket_size": 1}, {"bucket_size": 2000}])
def test_how_exchanges_are_joined_changes_no_bit(joined, options):
    apart = train_in_threads(compiled(), image_batches(STEPS, 12), EVEN, **options)
    for one, other in zip(joined, apart, strict=True):
        assert largest_difference(one, other) == 0


@pytest.mark.slow
def test_layers_that_do_not_wait_for_each_other_share_an_exchange():
    def counted(**options) -> dict[str, int]:
        found = exchanges(compiled(), **options)
        purposes = [node.attributes["purpose"].as_string() for node in found]
        assert [node.attributes["order"].as_int() for node in found] == list(range(len(found)))
        return {purpose: purposes.count(purpose) for purpose in sorted(set(purposes))}

    # The short cut's layer of the second block with the first of that block; their gradients with that of its last.
    assert counted(share=False) == {"count": 1, "figure": 3, "gradient": 1, "moments": 6, "sums": 6}
    assert counted() == {"count": 1, "figure": 1, "gradient": 1, "moments": 5, "sums": 5}


@pytest.mark.slow
@pytest.mark.skipif(not kernels.expected(), reason="needs a C++ compiler for the fused kernels")
def test_synchronized_layers_take_in_what_surrounds_them():
    """Every layer in float32 becomes kernels, the addition and the activation behind it and the gradients of these included."""
    program = burnish.compile(residual(double=False), optimizer="sgd:lr=0.05")
    graphs = program.graphs.lowered_to(TorchEngine().target.among_workers())
    step = derive(graphs, 2, get("sync"), bucket_size=2**20, share=True).copy_of("step")
    nodes = list(fuse(step, True).graph)
    found = [node.op_type for node in nodes]
    parts = ("Moments", "Merge", "Apply", "GradSums", "GradMerge", "GradApply")
    assert [found.count(f"FusedBatchNorm{part}") for part in parts] == [6] * 6
    assert not {"Relu", "ReluGrad", *(operator.name for operator in SYNCHRONIZED)} & set(found)
    ranks = [len(node.outputs[0].shape or ()) for node in nodes if node.op_type in ("Add", "FusedElementwise")]
    assert ranks
    assert 4 not in ranks


@pytest.mark.slow
def test_scale_and_bias_take_no_exchange_of_their_own():
    (gradients,) = [node for node in exchanges(compiled()) if node.op_type == "AllReduceStart"]
    weights = [value for value in gradients.inputs if value is not None and value.shape is not None and len(value.shape) == 4]
    # Six convolutions, the dense layer's weight and bias, and the number of samples; none of the twelve vectors of six layers.
    assert len(weights) == 6
    assert len(gradients.inputs) == 6 + 2 + 1


@pytest.mark.slow
def test_alone_nothing_is_exchanged():
    program = compiled()
    assert all(node.domain != BURNISH_DOMAIN for model in program.graphs.values() for node in model.graph)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "ghost:4"}, r"DataParallel: norm='ghost:4' is no policy for several workers: give 'sync', 'sync:<workers>' or"),
        ({"bucket_size": 0}, r"DataParallel: bucket_size=0: give a whole number of bytes, 1 or more"),
        ({"share": 1}, r"DataParallel: share must be True or False, not 1"),
        ({"group": 4}, r"DataParallel: group=4 is no group of workers that this process is of: give what burnish"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        burnish.DataParallel(**options)


def test_what_is_no_set_of_options():
    message = r"parallel=True: give burnish\.DataParallel\(\), or None to train alone"
    with pytest.raises(ConfigurationError, match=message):
        burnish.Session(compiled(), engine="torch", parallel=True)


@pytest.mark.slow
def test_a_group_that_does_not_divide_the_workers():
    message = r"norm: 'sync:2' takes statistics over groups of 2 workers, and there are 3: give a size that divides 3"
    with pytest.raises(ConfigurationError, match=message):
        train_in_threads(compiled("sync:2"), image_batches(1, 12), EVEN[:1])


@pytest.mark.slow
def test_programs_that_are_refused():
    assert exchanges(burnish.Program.load(compiled().to_onnx()))
    with pytest.raises(ConfigurationError, match=r"this program was written by another tool, .*: compile the model with burnish"):
        exchanges(without_semantic_graphs(compiled()))
    with pytest.raises(ConfigurationError, match=r"the metric 'auc:macro' of a batch is no function of sums over its samples"):
        exchanges(compiled(metrics=("auc:macro",)))


def test_an_engine_that_exchanges_nothing():
    (alone,) = ThreadCommunicator.group(1)
    message = (
        r"The engine 'reference' cannot exchange values with other workers: train with engine='torch' \(--engine torch\), or"
    )
    with pytest.raises(EngineError, match=message):
        burnish.Session(compiled(), engine="reference", parallel=burnish.DataParallel(communicator=alone))


@pytest.mark.slow
def test_workers_that_differ_are_refused():
    programs = [compiled(), compiled(optimizer="sgd:lr=0.2")]

    def opened(communicator: ThreadCommunicator, program: burnish.Program, seed: int) -> None:
        burnish.Session(program, engine="torch", seed=seed, parallel=burnish.DataParallel(communicator=communicator)).close()

    message = r"the program of rank 0 has the hash [0-9a-f]{16} and that of rank 1 [0-9a-f]{16}\. Compile the same model"
    with pytest.raises(ConfigurationError, match=message):
        in_threads(2, lambda communicator: opened(communicator, programs[communicator.rank], 0))
    message = r"the state of rank 0 has the hash [0-9a-f]{16} and that of rank 1 [0-9a-f]{16}\. Give every worker the same state"
    with pytest.raises(ConfigurationError, match=message):
        in_threads(2, lambda communicator: opened(communicator, programs[0], communicator.rank))
