"""Kernels over rows on ONNX Runtime: layer and root-mean-square normalization, cross-entropy, beside float64."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import onnx
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine, kernels
from burnish.errors import EngineError
from burnish.kernels.compiling import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")

COLUMNS = 96
LAYERS = {
    "layer": "y = LayerNormalization<axis = -1>(x, scale, bias)",
    "layer without a bias": "y0 = LayerNormalization<axis = -1>(x, scale) y = Add(y0, bias)",
    "two axes": "y = LayerNormalization<axis = -2>(x, wide, wider)",
    "root mean square": "y0 = RMSNormalization(x, scale) y = Add(y0, bias)",
    "mean and variance": "y0 = MeanVarianceNormalization<axes = [1, 2]>(x) y1 = Mul(y0, scale) y = Add(y1, bias)",
}


@cache
def engine() -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(kernels=True)


def model_of(layer: str, dtype: str = "float") -> onnx.ModelProto:
    text = f"""
<ir_version: 10, opset_import: ["" : 23]>
g ({dtype}["N", 3, {COLUMNS}] x0) => ({dtype}["N", 3, {COLUMNS}] y) {{ x = Add(x0, shift) {LAYERS[layer]} }}
"""
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    shapes = {"scale": (COLUMNS,), "bias": (COLUMNS,), "wide": (3, COLUMNS), "wider": (3, COLUMNS), "shift": (3, COLUMNS)}
    used = {name for node in model.graph.node for name in node.input}
    for name, shape in shapes.items():
        if name in used:
            array = np.zeros(shape) if name == "shift" else random.normal(1, 0.5, shape)
            array = array.astype(np.float32).astype(np.float64 if dtype == "double" else np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def compiled(layer: str, dtype: str = "float", **options):
    model = model_of(layer, dtype)
    trainable = [value.name for value in model.graph.initializer]  # the shift too, which stands before all layers
    return burnish.compile(model, loss="mse", optimizer="sgd", trainable=trainable, **options)


@cache
def gradients(layer: str):
    """The graph of the gradients, and what each of its nodes of burnish's own is called."""
    program = compiled(layer)
    graph = program.graphs.lowered_to(engine().target)["grad"]
    copy = graph.clone()
    kernels.call_kernels(copy)
    return program, graph, Counter(node.op_type for node in copy.graph if node.domain == "burnish")


def feeds_of(program: burnish.Program, mean: float, deviation: float, rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    x = random.normal(mean, deviation, (rows, 3, COLUMNS)).astype(np.float32)
    targets = random.normal(0, 3, x.shape).astype(np.float32)
    return {**program.initial_state(0), "x0": x, "targets": targets}


def run(graph, feeds, threads=1):
    return engine().load(graph, threads)({value.name: feeds[value.name] for value in graph.graph.inputs})


@pytest.mark.parametrize(("mean", "deviation"), [(0, 1), (1e4, 1)], ids=["centered", "far from zero"])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_beside_float64(layer, mean, deviation):
    """As exact where the mean is ten thousand deviations as where it is zero, beside what is exact for the same float32 x."""
    program, graph, called = gradients(layer)
    assert called["FusedStandardize"] == called["FusedStandardizeGrad"] == 1
    feeds = feeds_of(program, mean, deviation, 37)
    actual = run(graph, feeds)
    wide = compiled(layer, "double", target="reference").grad
    feeds = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in feeds.items()}
    exact = burnish.engines.get("reference").load(wide)({value.name: feeds[value.name] for value in wide.graph.inputs})
    names = [name for name in exact if name == "loss" or name.startswith("grad:")]
    assert len(names) >= 3
    for name in names:
        apart = np.linalg.norm(actual[name] - exact[name])
        # x itself is read through an addition, which does not round here: shift is zero
        assert apart <= 5e-6 * np.linalg.norm(exact[name]) + 1e-7, name


@pytest.mark.parametrize("layer", ["layer", "root mean square"])
def test_rows_have_the_same_bits_on_any_number_of_threads(layer):
    program, graph, _ = gradients(layer)
    feeds = feeds_of(program, 3, 2, 500)
    first = run(graph, feeds)
    for threads in (1, 2):
        for name, array in run(graph, feeds, threads).items():
            np.testing.assert_array_equal(array, first[name], err_msg=name)


CLASSES = 57


@cache
def classifier() -> burnish.Program:
    text = f"""
<ir_version: 10, opset_import: ["" : 21]>
g (float["N", {CLASSES}] x) => (float["N", {CLASSES}] y) {{ y = Mul(x, scale) }}
"""
    model = onnx.parser.parse_model(text)
    scale = np.random.default_rng(2).normal(1, 0.3, CLASSES).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(scale, "scale"))
    return burnish.compile(model, loss=burnish.losses.cross_entropy(ignore_index=-100), optimizer="sgd")


def test_cross_entropy_beside_float64():
    program, random = classifier(), np.random.default_rng(3)
    x = random.normal(0, 20, (300, CLASSES)).astype(np.float32)
    labels = random.integers(0, CLASSES, 300)
    labels[::7] = -100
    graph = program.graphs.lowered_to(engine().target)["grad"]
    copy = graph.clone()
    kernels.call_kernels(copy)
    called = Counter(node.op_type for node in copy.graph if node.domain == "burnish")
    assert called["FusedCrossEntropy"] == called["FusedCrossEntropyGrad"] == 1
    state = program.initial_state(0)
    results = [run(graph, {**state, "x": x, "labels": labels}, threads) for threads in (1, 2)]
    scale = state["param/scale"].astype(np.float64)
    z = x * scale
    probabilities = np.exp(z - z.max(1, keepdims=True))
    total = probabilities.sum(1, keepdims=True)
    counts = labels != -100
    log_p = z - z.max(1, keepdims=True) - np.log(total)
    rows = np.flatnonzero(counts)
    np.testing.assert_allclose(results[0]["loss"], -log_p[rows, labels[rows]].mean(), rtol=1e-6)
    flow = probabilities / total
    flow[rows, labels[rows]] -= 1
    flow[~counts] = 0
    exact = (flow / counts.sum() * x).sum(0)
    assert np.linalg.norm(results[0]["grad:scale"] - exact) <= 1e-6 * np.linalg.norm(exact)
    for name, array in results[0].items():
        np.testing.assert_array_equal(results[1][name], array, err_msg=name)


def test_a_label_that_is_out_of_range_is_an_error():
    graph = classifier().graphs.lowered_to(engine().target)["grad"]
    feeds = {**classifier().initial_state(0), "x": np.zeros((3, CLASSES), np.float32), "labels": np.array([0, 1, CLASSES])}
    with pytest.raises(EngineError, match=rf"label {CLASSES} in row 2 is out of range for {CLASSES} classes"):
        run(graph, feeds)


def test_no_rows():
    program, graph, _ = gradients("layer")
    results = run(graph, feeds_of(program, 0, 1, 0))
    assert not results["grad:scale"].any()
