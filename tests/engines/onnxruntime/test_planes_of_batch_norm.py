"""The kernels of batch normalization on ONNX Runtime against float64: shapes, activations, large means, constant channels."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.kernels.compiling import find_compiler
from oracles.combinations import diagonal

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")

EPSILON = 1e-5
LIMIT = 1.0
SINGLE = 2.0**-24  # half a unit in the last place of float32, relative
# One channel; planes shorter than a vector, no multiple of one, longer than a block of sums; signals, volumes, single elements.
SHAPES = [(3, 1, 5, 7), (2, 3, 17, 19), (1, 24, 40, 61), (4, 37, 2), (2, 9, 3, 2, 4), (70, 40), (5, 96, 1, 1), (1, 8, 7, 7)]


@functools.cache
def kernels(activation: int, is_added: bool, has_more: bool):
    """The layer and its gradient, as the graph pass calls them, of tensors of any rank: inputs to outputs by name."""
    given = {"x": 1, "scale": 1, "bias": 1, "added": int(is_added)}
    common = {"activation": activation, "limit": LIMIT}
    forward = onnx.helper.make_node(
        "FusedBatchNorm",
        [name for name, is_given in given.items() if is_given],
        ["y", "mean", "inverse_std", "variance", "saved"],
        domain="burnish",
        epsilon=EPSILON,
        present=[*given.values()],
        output_count=5,
        **common,
    )
    # Of the result where something was added, of the bias where nothing was.
    read = {name: 1 for name in ("dy", "x", "scale", "inverse_std", "saved")}
    read |= {"y": int(bool(activation) and is_added), "more": int(has_more), "bias": int(bool(activation) and not is_added)}
    backward = onnx.helper.make_node(
        "FusedBatchNormGrad",
        [name for name, is_given in read.items() if is_given],
        ["dx", "dscale", "dbias", *(["before"] if activation else [])],
        domain="burnish",
        present=[*read.values()],
        output_count=4 if activation else 3,
        **common,
    )

    def run(feeds: dict[str, np.ndarray], threads: int = 2) -> dict[str, np.ndarray]:
        def value(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
            return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)

        vector, x = feeds["scale"], feeds["x"]
        outputs = {"y": x, "mean": vector, "inverse_std": vector, "variance": vector, "dx": x, "dscale": vector, "dbias": vector}
        outputs |= {"before": x} if activation else {}
        graph = onnx.helper.make_graph(
            [forward, backward], "layer", [value(*item) for item in feeds.items()], [value(*item) for item in outputs.items()]
        )
        opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("burnish", 1)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return dict(OnnxRuntimeEngine(kernels=True).load(ir.from_proto(model), threads)(feeds))

    return run


def per_channel(vector, x):
    return vector.reshape(1, -1, *[1] * (x.ndim - 2))


def exactly(x, scale, bias, added, dy, activation):
    """In float64: y, statistics, dx, dscale, dbias, and the gradient before the activation."""
    x, scale, bias, dy = (array.astype(np.float64) for array in (x, scale, bias, dy))
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    mean, variance = x.mean(axes), x.var(axes)
    inverse = 1 / np.sqrt(variance + EPSILON)
    normalized = (x - per_channel(mean, x)) * per_channel(inverse, x)
    y = normalized * per_channel(scale, x) + per_channel(bias, x) + (0 if added is None else added.astype(np.float64))
    passes = (y > 0) if activation else np.ones(y.shape, bool)
    passes &= (y < LIMIT) if activation == 2 else True
    flow = dy * passes
    count = x.size / x.shape[1]
    dbias, dscale = flow.sum(axes), (flow * normalized).sum(axes)
    dx = per_channel(scale * inverse, x) * (flow - per_channel(dbias / count, x) - normalized * per_channel(dscale / count, x))
    result = np.maximum(y, 0) if activation else y
    return np.minimum(result, LIMIT) if activation == 2 else result, mean, variance, dx, dscale, dbias, flow, y


def drawn(shape, seed=0):
    random = np.random.default_rng(seed)
    arrays = {name: random.normal(size=shape).astype(np.float32) for name in ("x", "dy", "added", "more")}
    channels = shape[1]
    arrays["scale"] = random.uniform(0.5, 1.5, channels).astype(np.float32)
    arrays["bias"] = random.normal(size=channels).astype(np.float32)
    return arrays


@diagonal(("shape", SHAPES), ("activation", [0, 1, 2]), ("is_added", [False, True]), ("has_more", [False, True]))
def test_any_shape_agrees_with_float64(shape, activation, is_added, has_more):
    arrays = drawn(shape, seed=shape[1])
    names = ["x", "dy", "scale", "bias", *(["added"] if is_added else []), *(["more"] if has_more else [])]
    feeds = {name: arrays[name] for name in names}
    added = feeds.get("added")
    dy = feeds["dy"].astype(np.float64) + feeds.get("more", np.float32(0))
    *_, before = exactly(feeds["x"], feeds["scale"], feeds["bias"], added, dy, activation)
    # Elements at a kink pass their gradient on or not as they are rounded: they pass none here.
    near = np.zeros(shape, bool)
    if activation:
        near = (np.abs(before) < 1e-4) | ((np.abs(before - LIMIT) < 1e-4) if activation == 2 else False)
    feeds["dy"] = np.where(near, 0, feeds["dy"])
    if has_more:
        feeds["more"] = np.where(near, 0, feeds["more"])
    dy = feeds["dy"].astype(np.float64) + feeds.get("more", np.float32(0))
    y, mean, variance, dx, dscale, dbias, flow, _ = exactly(feeds["x"], feeds["scale"], feeds["bias"], added, dy, activation)
    actual = kernels(activation, is_added, has_more)(feeds)
    np.testing.assert_allclose(actual["y"], y, rtol=0, atol=8 * SINGLE * (np.abs(y).max() + 1))
    np.testing.assert_allclose(actual["mean"], mean, rtol=4 * SINGLE, atol=8 * SINGLE)
    np.testing.assert_allclose(actual["variance"], variance, rtol=8 * SINGLE)
    gain = np.abs(feeds["scale"]).max() * actual["inverse_std"].max()
    np.testing.assert_allclose(actual["dx"], dx, rtol=1e-5, atol=16 * SINGLE * gain * (np.abs(flow).max() + 1))
    terms = np.abs(flow).sum() / shape[1] + 1
    np.testing.assert_allclose(actual["dscale"], dscale, rtol=1e-5, atol=16 * SINGLE * terms)
    np.testing.assert_allclose(actual["dbias"], dbias, rtol=1e-5, atol=16 * SINGLE * terms)
    if activation:
        np.testing.assert_allclose(actual["before"], flow, rtol=2 * SINGLE, atol=2 * SINGLE)


@pytest.mark.parametrize("shape", [(3, 8, 30, 31), (64, 8)])
def test_a_large_mean_costs_no_digits(shape):
    arrays = drawn(shape)
    feeds = {name: arrays[name] for name in ("x", "dy", "scale", "bias")}
    feeds["x"] = (feeds["x"] + np.float32(1e4)).astype(np.float32)
    y, _, variance, dx, dscale, *_ = exactly(feeds["x"], feeds["scale"], feeds["bias"], None, feeds["dy"], 0)
    actual = kernels(0, False, False)(feeds)
    for name, expected in (("y", y), ("variance", variance), ("dx", dx), ("dscale", dscale)):
        assert np.linalg.norm(actual[name] - expected) <= 1e-6 * np.linalg.norm(expected), name


def test_a_pilot_unlike_the_other_elements_costs_no_digits():
    """The pilot is the mean of 16 elements of a channel, every ninetieth here: these lie far from all others."""
    arrays = drawn((2, 4, 24, 30), seed=1)
    feeds = {name: arrays[name] for name in ("x", "dy", "scale", "bias")}
    rows = feeds["x"].transpose(1, 0, 2, 3).reshape(4, -1).copy()
    rows[:, ::90] += 3e4
    feeds["x"] = np.ascontiguousarray(rows.reshape(4, 2, 24, 30).transpose(1, 0, 2, 3))
    y, mean, variance, *_ = exactly(feeds["x"], feeds["scale"], feeds["bias"], None, feeds["dy"], 0)
    actual = kernels(0, False, False)(feeds)
    np.testing.assert_allclose(actual["variance"], variance, rtol=1e-6)
    np.testing.assert_allclose(actual["mean"], mean, rtol=1e-6)
    assert np.linalg.norm(actual["y"] - y) < 3e-7 * np.linalg.norm(y)


def test_a_constant_channel_is_its_bias():
    feeds = {name: drawn((4, 16, 9, 9))[name] for name in ("x", "dy", "scale", "bias")}
    feeds["x"] = np.full((4, 16, 9, 9), 12345.678, np.float32)
    actual = kernels(0, False, False)(feeds)
    np.testing.assert_array_equal(actual["y"], np.broadcast_to(feeds["bias"].reshape(1, -1, 1, 1), (4, 16, 9, 9)))
    assert not actual["variance"].any()


def test_no_elements_have_no_statistics():
    feeds = {name: drawn((0, 3, 4, 4))[name] for name in ("x", "dy", "scale", "bias")}
    actual = kernels(0, False, False)(feeds)
    assert np.isnan(actual["mean"]).all()
    assert not actual["dbias"].any()


@pytest.mark.parametrize("shape", [(3, 20, 33, 35), (900, 40)])
def test_the_bits_do_not_depend_on_threads(shape):
    feeds = {name: drawn(shape)[name] for name in ("x", "dy", "scale", "bias")}
    one, two = (kernels(1, False, False)(feeds, threads=threads) for threads in (1, 2))
    for name, array in one.items():
        np.testing.assert_array_equal(two[name], array, err_msg=name)
