"""Activations that each worker computes again: the same bits for less memory, and no exchange more."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish import optim
from burnish.analysis.memory_plan import planned_peak
from burnish.distributed.derivation import derive
from burnish.distributed.exchanges import is_exchange
from burnish.engines.communicator import COLLECTIVES
from burnish.engines.torch import native as kernels
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from burnish.graph.annotations import RECOMPUTES
from burnish.models import residual_network
from burnish.norms import get
from burnish.rewriting.change_dtypes import compute_in_float64
from burnish.rewriting.recompute import run_in_order
from burnish.targets import TARGETS
from oracles.combinations import diagonal, named, spread
from oracles.kernel_graphs import kernel_graphs
from oracles.live_memory import measured
from oracles.normalized_networks import IMAGE, image_batches, inverted_residual
from oracles.rewritten import rewritten
from oracles.several_workers import Outcome, largest_difference, train_alone, train_in_threads, train_part
from oracles.small_networks import CLASSES, Network

STEPS, SAMPLES = 3, 12
PARTS = {1: [[12]] * STEPS, 2: [[5, 7], [12, 0], [1, 11]], 3: [[5, 0, 7], [1, 10, 1], [0, 0, 12]]}
KERNELS = translated_operators(BURNISH_DOMAIN) | FUSED


def deep(double: bool = True) -> ir.Model:
    """Four residual blocks, the third with strides and a convolution on its short cut."""
    model = residual_network(input_shape=IMAGE, classes=CLASSES, width=4, blocks=(2, 2))
    return compute_in_float64(model) if double else model


def normalized_rows() -> ir.Model:
    """Dense layers with batch normalization and dropout, in float32."""
    network = Network("normalized_rows", [12])
    y = network.input
    for index in range(3):
        y = network.normalized(f"norm{index}", network.dense(f"dense{index}", y, 12, 12), 12)
        y = network.builder.op("Relu", y)
    y = network.builder.op("Dropout", y, network.builder.constant(np.float32(0.3)))
    return network.model(network.dense("head", y, 12, CLASSES))


MODELS = {
    "residual": deep,
    "residual in float32": lambda: deep(double=False),
    "inverted": lambda: inverted_residual(dropout=True),
    "rows": normalized_rows,
    "rows in float64": lambda: compute_in_float64(normalized_rows()),
}


def rows(dtype: type = np.float64) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {"x": rng.standard_normal((SAMPLES, 12)).astype(dtype), "labels": rng.integers(0, CLASSES, SAMPLES)} for _ in range(STEPS)
    ]


@cache
def compiled(model: str = "residual", recompute: str | tuple[str, ...] | None = None, **options) -> burnish.Program:
    settings = {"optimizer": "sgd:lr=0.05,momentum=0.9", "running_variance": "pytorch", **options}
    return burnish.compile(MODELS[model](), recompute=recompute, **settings)


def both(
    model: str = "residual", recompute: str | tuple[str, ...] = "layers", **options
) -> tuple[burnish.Program, burnish.Program]:
    """The program that keeps all activations, and the one that computes some again."""
    return compiled(model, **options), compiled(model, recompute, **options)


def step_of(program: burnish.Program, workers: int = 2, norm: str = "sync") -> ir.Model:
    """What a worker's engine is given to run."""
    graphs = program.graphs.lowered_to(TARGETS["onnxruntime"].with_kernels(KERNELS))
    return derive(graphs, workers, get(norm), bucket_size=2000, share=True).copy_of("step")


def copies(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if RECOMPUTES.get(node) and node.op_type != "Reshape"]


def assert_same_bits(one: list[Outcome], other: list[Outcome]) -> None:
    for (reports, states), (expected_reports, expected_states) in zip(one, other, strict=True):
        assert reports == expected_reports
        for state, expected in zip(states, expected_states, strict=True):
            assert [name for name in expected if state[name].tobytes() != expected[name].tobytes()] == []


@spread(("name", "requested"), [("inverted", "layers"), ("residual", "layers"), ("inverted", ("*",))], test_all=2)
@pytest.mark.slow
def test_processes_come_to_what_one_with_the_whole_batch_does(pool, tmp_path, name, requested):
    plain, again = both(name, requested)
    batches = image_batches(STEPS, SAMPLES)
    alone = train_alone(burnish.Program.load(plain.save(tmp_path / "plain")), batches)
    saved = str(again.save(tmp_path / "again"))
    assert copies(step_of(burnish.Program.load(saved)))
    for workers, sizes in PARTS.items():
        for outcome in pool.run(workers, train_part, saved, batches, sizes, {}):
            assert largest_difference(outcome, alone) < 1e-10


# Without exchanges inside of a layer, and with one for each; sharded is an optimizer below.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "options"),
    [
        ("train", {"norm": "local"}),
        pytest.param("ghost:2", {}, marks=pytest.mark.slow),
        ("sync:2", {}),
        ("renorm", {}),
        pytest.param("frozen", {}, marks=pytest.mark.slow),
        pytest.param("train", {"deterministic": True}, marks=pytest.mark.slow),
        ("train", {"compression": "bfloat16"}),
        pytest.param("train", {"synchronize_every": 2}, marks=pytest.mark.slow),
        ("train", {"share": False, "bucket_size": 1}),
        pytest.param("train", {"shard_optimizer": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_policies_and_options_keep_their_bits(norm, options):
    plain, again = both("rows in float64", norm=norm)
    sizes = [[6, 6]] * STEPS if norm == "ghost:2" else [[5, 7], [1, 11], [6, 6]]
    expected, found = (train_in_threads(program, rows(), sizes, **options) for program in (plain, again))
    assert_same_bits(found, expected)


@diagonal(
    (
        "optimizer",
        named(
            [optim.accumulate(optim.adam(lr=0.01), 2), optim.chain(optim.clip_by_global_norm(0.5), optim.adam(lr=0.01))],
            ["accumulated", "clipped"],
        ),
    ),
    ("options", named([{}, {"shard_optimizer": True}], str)),
)
@pytest.mark.slow
def test_optimizers_keep_their_bits(optimizer, options):
    plain, again = both("rows in float64")
    plain, again = plain.with_optimizer(optimizer), again.with_optimizer(optimizer)
    expected, found = (train_in_threads(program, rows(), PARTS[3], **options) for program in (plain, again))
    assert_same_bits(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_precisions_keep_their_bits(precision):
    plain, again = both("rows", precision=precision)
    assert copies(step_of(again))
    expected, found = (train_in_threads(program, rows(np.float32), PARTS[3]) for program in (plain, again))
    assert_same_bits(found, expected)


@pytest.mark.slow
@diagonal(("requested", named(["layers", ("*",)], ["layers", "all"])), ("norm", ["sync", "local", "sync:2"]))
def test_exchanges_are_those_of_the_program_that_keeps_all(requested, norm):
    def exchanges(model: ir.Model) -> list[tuple]:
        found = [node for node in model.graph if is_exchange(node)]
        return [
            (node.op_type, *(node.attributes[name].value for name in ("order", "purpose")), len(node.inputs)) for node in found
        ]

    plain, again = (step_of(program, 4, norm) for program in both(recompute=requested))
    assert exchanges(again) == exchanges(plain)
    assert Counter(node.op_type for node in again.graph if node.op_type in COLLECTIVES) == Counter(
        node.op_type for node in plain.graph if node.op_type in COLLECTIVES
    )
    assert copies(again)
    assert not {node.op_type for node in copies(again)} & COLLECTIVES


def test_a_layer_that_runs_again_uses_the_statistics_that_were_exchanged():
    model = rewritten(run_in_order, step_of(both(recompute=("*",))[1]))
    gathered = {value for node in model.graph if node.op_type == "AllGather" for value in node.outputs}
    layers = [node for node in copies(model) if node.op_type == "BatchNormApply"]
    assert len(layers) == sum(node.op_type == "BatchNormMoments" for node in model.graph)
    for layer in layers:
        merge = layer.inputs[2].producer()
        assert merge.op_type == "BatchNormMerge"
        assert merge.inputs[0] in gathered


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_planned_falls(workers):
    plain, again = (planned_peak(step_of(program, workers), 64) for program in both())
    assert again.without_recompute == plain.bytes
    assert again.bytes - again.inputs < 0.6 * (plain.bytes - plain.inputs)


@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "2 workers"])
@pytest.mark.slow
def test_memory_of_tensors_falls(monkeypatch, workers):
    peaks = measured(monkeypatch)
    batches, held = image_batches(1, 128), []
    for program in both():
        peaks.clear()
        if workers:
            train_in_threads(program, batches, [[64] * workers])
        else:
            train_alone(program, batches)
        held.append(max(peaks))
    assert held[1] < 0.65 * held[0]


@pytest.mark.slow
@pytest.mark.skipif(not kernels.expected(), reason="needs a C++ compiler for the fused kernels")
@pytest.mark.parametrize("requested", ["layers", ("*",)], ids=["layers", "all"])
def test_the_second_run_of_a_layer_and_its_gradient_are_fused_too(requested):
    plain, again = both("residual in float32", requested)
    for program, workers in ((again, 0), (again, 2)):
        model = step_of(program, workers) if workers else kernel_graphs(program, KERNELS - COLLECTIVES)["step"]
        before = step_of(plain, workers) if workers else kernel_graphs(plain, KERNELS - COLLECTIVES)["step"]
        found, expected = (
            Counter(node.op_type for node in fuse(rewritten(run_in_order, graph), True).graph) for graph in (model, before)
        )
        for kind in (
            "FusedBatchNormGrad",
            "FusedBatchNormGradSums",
            "FusedBatchNormGradApply",
            "ReluGrad",
            "FusedBatchNormMoments",
        ):
            assert found[kind] == expected[kind], kind
        layer = "FusedBatchNormApply" if workers else "FusedBatchNorm"
        assert found[layer] > expected[layer] > 0


@pytest.mark.slow
def test_patterns_are_known_to_a_program_that_was_loaded(tmp_path):
    program = compiled("rows", ("dense1.*",))
    loaded = burnish.Program.load(program.save(tmp_path / "program"))
    for each in (program, loaded):
        assert {node.op_type for node in copies(step_of(each))} == {"Gemm"}


@pytest.mark.slow
def test_a_budget_that_exchanges_do_not_fit_is_said_and_the_least_is_taken(caplog):
    budget = int(1.02 * both(recompute=f"layers:batch={SAMPLES}")[1].planned_peak(SAMPLES).bytes)
    plain, program = both(recompute=f"{budget}:batch={SAMPLES}")
    assert program.planned_peak(SAMPLES).bytes <= budget < plain.planned_peak(SAMPLES).bytes
    options = {**program.options, "recompute": f"1KB:batch={SAMPLES}"}
    tight = replace(program, graphs=replace(program.graphs, options=options))
    with caplog.at_level(logging.WARNING, logger="burnish"):
        assert copies(step_of(program))
        assert caplog.messages == []
        assert copies(step_of(tight))
    (message,) = caplog.messages
    assert message.startswith(
        "burnish: recompute: the step graph as the engine runs it does not fit 1,000 bytes at batch 12; the"
    )
    assert message.endswith(", which is taken")
