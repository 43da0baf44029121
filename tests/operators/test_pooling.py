"""The semantic pooling gradients, against closed forms and PyTorch's own pooling."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

import burnish
from oracles.gradient_harness import GradientGraph, gradient_graph, run_gradients
from oracles.semantic_operators import run_semantic_operator
from specs.operator_spec import OperatorSpec, Sample

WINDOW = {"kernel_shape": [2, 2], "strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0]}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_max_pool_gradient_adds_what_overlapping_windows_share(dtype: str) -> None:
    """[[1, 2, 0], [3, 9, 4], [5, 6, 7]]: all four 2x2 windows have their maximum, 9, at flat position 4."""
    x = np.array([1, 2, 0, 3, 9, 4, 5, 6, 7], dtype).reshape(1, 1, 3, 3)
    dy = np.array([1, 10, 100, -1000], dtype).reshape(1, 1, 2, 2)
    indices = np.full((1, 1, 2, 2), 4, np.int64)
    (dx,) = run_semantic_operator("MaxPoolGrad", [dy, indices, x], like=2, batched=(0, 1, 2), **WINDOW)
    expected = np.zeros((1, 1, 3, 3))
    expected[0, 0, 1, 1] = -889
    np.testing.assert_array_equal(dx, expected)


def test_average_pool_gradient_spreads_each_window_evenly() -> None:
    dy = np.array([4, 8, 12, 16], np.float32).reshape(1, 1, 2, 2)
    x = np.zeros((1, 1, 3, 3), np.float32)
    (dx,) = run_semantic_operator("AveragePoolGrad", [dy, x], like=1, batched=(0, 1), count_include_pad=0, **WINDOW)
    np.testing.assert_array_equal(dx[0, 0], [[1, 3, 2], [4, 10, 6], [3, 7, 4]])


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], dict[str, list[int] | int]]:
    """A shape and symmetric windows that PyTorch's pooling knows too."""
    kernel = draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    strides = draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    pads = [draw(st.integers(0, size // 2)) for size in kernel]
    sizes = [draw(st.integers(4, 9)) for _ in kernel]
    ceil = draw(st.integers(0, 1))
    for size, width, stride, pad in zip(sizes, kernel, strides, pads, strict=True):
        reach = size + 2 * pad - width
        # The standard's shape inference and its runtimes disagree on a last window that lies wholly in the padding.
        assume(not ceil or -(-reach // stride) * stride < size + pad)
    attributes = {"kernel_shape": kernel, "strides": strides, "pads": pads * 2, "ceil_mode": ceil}
    return [2, 2, *sizes], attributes


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=windows(), shapes=st.sampled_from(["static", "batch", "symbolic"]), include=st.integers(0, 1))
def test_average_pool_matches_torch(case: tuple[list[int], dict], shapes: str, include: int) -> None:
    shape, attributes = case
    sample = Sample([np.random.default_rng(1).standard_normal(shape)], {**attributes, "count_include_pad": include})
    options = torch_options(attributes)
    # PyTorch counts padding up to the end of the padded input, as the standard does.
    against_torch("AveragePool", sample, shapes, lambda x: functional.avg_pool2d(x, **options, count_include_pad=bool(include)))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=windows(), shapes=st.sampled_from(["static", "batch", "symbolic", "unranked"]), levels=st.sampled_from([2, 1000]))
def test_max_pool_matches_torch(case: tuple[list[int], dict], shapes: str, levels: int) -> None:
    """With two levels most windows have ties, which both give to the first maximum."""
    shape, attributes = case
    sample = Sample([np.random.default_rng(2).integers(0, levels, shape).astype(float)], attributes)
    options = torch_options(attributes)
    against_torch("MaxPool", sample, shapes, lambda x: functional.max_pool2d(x, **options))


APART = {
    "halving": ([2, 3, 6, 4], [2, 2], [2, 2]),
    "entries_between_windows": ([2, 2, 8, 9], [2, 3], [3, 4]),
    "entries_after_the_last_window": ([1, 2, 5, 8], [2, 3], [2, 3]),
    "signal": ([2, 3, 9], [3], [3]),
    "volume": ([1, 2, 4, 5, 4], [2, 2, 1], [2, 2, 2]),
}


@pytest.mark.parametrize("name", list(APART))
def test_max_pool_over_windows_that_are_apart_scatters_nothing(name: str) -> None:
    """Two levels: most windows have ties."""
    shape, kernel, strides = APART[name]
    sample = Sample([np.random.default_rng(2).integers(0, 2, shape).astype(float)], {"kernel_shape": kernel, "strides": strides})
    pool = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}[len(kernel)]
    graph = against_torch("MaxPool", sample, "batch", lambda x: pool(x, tuple(kernel), tuple(strides)))
    emitted = {node.op_type for node in graph.model.graph.all_nodes()}
    assert "ScatterElements" not in emitted
    repeats = name in ("halving", "signal")
    assert ("Resize" in emitted, "ConvTranspose" in emitted) == (repeats, not repeats)


@pytest.mark.parametrize("name", list(APART))
def test_average_pool_repeats_where_windows_tile_the_input(name: str) -> None:
    shape, kernel, strides = APART[name]
    sample = Sample([np.random.default_rng(2).standard_normal(shape)], {"kernel_shape": kernel, "strides": strides})
    pool = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}[len(kernel)]
    graph = against_torch("AveragePool", sample, "batch", lambda x: pool(x, tuple(kernel), tuple(strides)))
    emitted = {node.op_type for node in graph.model.graph.all_nodes()}
    assert ("Resize" in emitted, "ConvTranspose" in emitted) == (
        (True, False) if name in ("halving", "signal") else (False, True)
    )


def test_a_program_with_windows_that_are_apart_computes_no_indices() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        network (float[batch, 2, 4, 4] x) => (float[batch, 8] logits) <float[1, 2, 1, 1] scale = {1, 2}> {
            scaled = Mul (x, scale)
            pooled = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (scaled)
            logits = Flatten (pooled)
        }"""
    )
    program = burnish.compile(model, loss="cross_entropy", trainable=["scale"])
    pools = [node for node in program.step.graph if node.op_type == "MaxPool"]
    assert pools
    assert all([output.name for output in pool.outputs[1:]] in ([], [""]) for pool in pools)


def torch_options(attributes: dict) -> dict:
    return {
        "kernel_size": tuple(attributes["kernel_shape"]),
        "stride": tuple(attributes["strides"]),
        "padding": tuple(attributes["pads"][:2]),
        "ceil_mode": bool(attributes["ceil_mode"]),
    }


def against_torch(op_type: str, sample: Sample, shapes: str, function) -> GradientGraph:
    x = torch.tensor(sample.inputs[0], requires_grad=True)
    y = function(x)
    cotangent = np.random.default_rng(3).standard_normal(tuple(y.shape))
    (expected,) = torch.autograd.grad(y, x, torch.from_numpy(cotangent))
    graph = gradient_graph(OperatorSpec(op_type, lambda rng: []), sample, "float32", shapes)
    (output,), (gradient,) = run_gradients(graph, sample, "float32", {0: cotangent})
    np.testing.assert_allclose(output, y.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-5, atol=1e-5)
    return graph
