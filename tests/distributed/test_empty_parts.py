"""A worker whose part of a batch is empty changes nothing: every policy comes to what those with samples come to."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import kernels
from oracles.normalized_networks import image_batches, inverted_residual, residual
from oracles.several_workers import Outcome, largest_difference, train_alone, train_in_threads

SAMPLES = 12
THREE = [[8, 0, 4], [0, 12, 0], [4, 4, 4]]
RENORM = "renorm:start=0,r_max_step=0,d_max_step=0,r_max=1.2,d_max=0.1"
MODELS = {"residual": residual, "depthwise": inverted_residual}
ALONE = [("ghost:4", THREE), (RENORM, THREE), ("frozen", THREE), ("sync:2", [[5, 7, 0, 0], [0, 0, 12, 0], [0, 0, 3, 9]])]
"""Policies whose outcome is that of one process with the whole batch."""
APART = [("local", [[8, 0, 4], [0, 8, 4], [8, 4, 0]]), ("sync:2", [[8, 0, 0, 4], [8, 0, 4, 0], [0, 8, 2, 2]])]
"""Those whose outcome is that of two workers which go by their own parts, of 8 and of 4 samples."""


@pytest.fixture(autouse=True)
def _without_warnings():
    """PyTorch warns of what it computes of nothing: such a step is as good as any."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def compiled(model: ir.Model, norm: str) -> burnish.Program:
    return burnish.compile(model, norm=norm, optimizer="sgd:lr=0.05,momentum=0.9", running_variance="pytorch")


def assert_like(outcomes: list[Outcome], expected: Outcome, double: bool) -> None:
    assert np.isfinite([value for report in expected[0] for value in report.values()]).all()
    for outcome in outcomes:
        assert largest_difference(outcome, expected) < (1e-11 if double else 2e-6)


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("norm", "sizes"), ALONE, ids=[norm.partition(":")[0] for norm, _ in ALONE])
def test_policies_of_the_whole_batch(model, norm, sizes, double):
    program = compiled(MODELS[model](double), norm)
    batches = image_batches(len(sizes), SAMPLES, np.float64 if double else np.float32)
    assert_like(train_in_threads(program, batches, sizes), train_alone(program, batches), double)


def test_group_normalization_of_nothing():
    """Its groups are cut by a Reshape that infers an extent, which the elements of an empty part do not tell."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
g (float[N, 4, 3, 3] x) => (float[N, 4] logits) <float[4] scale = {1, 2, 3, 4}, float[4] bias = {1, 0, -1, 2}> {
    normalized = GroupNormalization <num_groups = 2> (x, scale, bias)
    squared = Mul (normalized, normalized)
    pooled = GlobalAveragePool (squared)
    logits = Flatten (pooled)
}""")
    program = burnish.compile(model, optimizer="sgd:lr=0.05,momentum=0.9")
    x, labels = rng.normal(size=(3, SAMPLES, 4, 3, 3)).astype(np.float32), rng.integers(0, 4, (3, SAMPLES))
    batches = [{"x": x[index], "labels": labels[index]} for index in range(3)]
    assert_like(train_in_threads(program, batches, THREE), train_alone(program, batches), double=False)


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("norm", "sizes"), APART, ids=["local", "sync"])
def test_policies_of_parts(model, norm, sizes, double):
    program, apart = (compiled(MODELS[model](double), policy) for policy in (norm, "local"))
    batches = image_batches(len(sizes), SAMPLES, np.float64 if double else np.float32)
    expected = train_in_threads(apart, batches, [[8, 4]] * len(sizes))[0]
    assert_like(train_in_threads(program, batches, sizes), expected, double)


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
def test_groups_of_samples_in_a_step_in_which_no_worker_has_any(double):
    """Weights move on by momentum alone, and running statistics stay, bit for bit."""
    program, dtype = compiled(residual(double), "ghost:4"), np.float64 if double else np.float32
    batches = [image_batches(1, 8, dtype)[0], image_batches(1, 0, dtype)[0]]
    for _, (before, after) in train_in_threads(program, batches, [[4, 4], [0, 0]]):
        for name, array in after.items():
            assert np.isfinite(array).all(), name
            if name.startswith("stat/"):
                assert array.tobytes() == before[name].tobytes(), name


@pytest.mark.skipif(not kernels.expected(), reason="needs a C++ compiler for the fused kernels")
@pytest.mark.parametrize("suffix", ["", "_bfloat16"])
@pytest.mark.parametrize("extents", [(4, 0, 3, 3), (0, 5, 3, 3), (4, 0), (0, 5)], ids=str)
def test_kernels_of_no_elements(extents, suffix):
    """Groups of samples are laid out as channels: without samples there is none."""
    assert kernels.available(f"batch_norm{suffix}", f"batch_norm_gradient{suffix}")
    x = torch.zeros(extents, dtype=torch.bfloat16 if suffix else torch.float32)
    vector = torch.zeros(extents[1])
    training, gradient = (
        getattr(torch.ops.burnish, name + suffix).default for name in ("batch_norm_training", "batch_norm_gradient")
    )
    y, _, inverse_std, _, saved = training(x, vector, vector, None, 1e-5, 1, float("inf"))
    dx, dscale, dbias, before = gradient(y, x, vector, inverse_std, saved, y, y, None, 1, float("inf"), True)
    assert [tuple(tensor.shape) for tensor in (y, dx, before)] == [extents] * 3
    assert [gradients.tolist() for gradients in (dscale, dbias)] == [[0.0] * extents[1]] * 2
