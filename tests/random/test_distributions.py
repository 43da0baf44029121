"""Uniform, normal, Bernoulli and multinomial draws: from the words of the key, spread as they should be, in every program."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from scipy import stats

import burnish
from burnish.graph import Builder, Tensor
from burnish.random import bernoulli, initial_key, keep_mask, multinomial, normal, uniform, uniform_bits
from oracles.small_graphs import SmallGraph

KEY = ("uint32", (2,))
DTYPES = ["float16", "float32", "float64"]
Draw = Callable[[Builder, Tensor, Tensor], Tensor]


def drawn(draw: Draw, x: np.ndarray, seed: int = 0, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """What a draw gives on onnxruntime and on the reference evaluator."""
    graph = SmallGraph({"key": KEY, "x": (str(x.dtype), x.shape)})
    graph.output("drawn", draw(graph.builder, graph["key"], graph["x"]))
    graph.check()
    feeds = {"key": initial_key(seed), "x": x}
    return graph.run(threads=threads, **feeds)["drawn"], graph.run_reference(**feeds)["drawn"]


def words(shape: tuple[int, ...], seed: int, stream: int) -> np.ndarray:
    return drawn(lambda builder, key, x: uniform_bits(builder, key, stream, x), np.zeros(shape, np.float32), seed)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_numbers_are_the_leading_bits_of_the_words(dtype: str) -> None:
    onnx_dtype = ir.DataType.from_numpy(np.dtype(dtype))
    results = drawn(lambda builder, key, x: uniform(builder, key, 5, x, onnx_dtype, -1.0, 3.0), np.zeros((64, 33), np.float32))
    bits = words((64, 33), 0, 5)
    share = bits * 2.0**-32 if dtype == "float64" else ((bits >> 8) * 2.0**-24).astype(np.float32)
    for result in results:
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, (share * share.dtype.type(4) - share.dtype.type(1)).astype(dtype))


def test_uniform_numbers_are_spread_evenly() -> None:
    result, _ = drawn(
        lambda builder, key, x: uniform(builder, key, 0, x, ir.DataType.FLOAT),
        np.zeros((400, 500), np.float32),
        seed=4,
        threads=2,
    )
    assert result.min() >= 0.0
    assert result.max() < 1.0
    assert stats.kstest(result.ravel(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_numbers_have_the_distribution(dtype: str) -> None:
    onnx_dtype = ir.DataType.from_numpy(np.dtype(dtype))
    result, reference = drawn(
        lambda builder, key, x: normal(builder, key, 1, x, onnx_dtype, 2.0, 0.5), np.zeros((400, 500), np.float32), seed=9
    )
    assert result.dtype == dtype
    np.testing.assert_allclose(result, reference, rtol={"float16": 2e-3, "float32": 1e-5, "float64": 1e-13}[dtype])
    deviations = (result.astype(np.float64) - 2.0) / 0.5
    if dtype != "float16":  # of so few digits that equal numbers are frequent
        assert stats.kstest(deviations.ravel(), "norm").pvalue > 1e-3
    assert abs(deviations.mean()) * np.sqrt(deviations.size) < 5
    assert abs(deviations.std() - 1.0) < 0.01
    assert abs((deviations[1:] * deviations[:-1]).mean()) * np.sqrt(deviations.size) < 5
    assert abs((deviations[:, 1:] * deviations[:, :-1]).mean()) * np.sqrt(deviations.size) < 5


def test_bernoulli_numbers() -> None:
    probability = np.repeat(np.array([[0.0, 0.1, 0.5, 0.9, 1.0]], np.float32), 20000, axis=0)
    result, reference = drawn(lambda builder, key, x: bernoulli(builder, key, 0, x, ir.DataType.INT64), probability)
    np.testing.assert_array_equal(result, reference)
    assert result.dtype == np.int64
    assert set(result[:, 0]) == {0}
    assert set(result[:, 4]) == {1}
    np.testing.assert_allclose(result.mean(axis=0), probability[0], atol=0.015)


def test_multinomial_draws_classes_by_their_probability() -> None:
    scores = np.array([[0.0, 1.0, -1.0, -np.inf], [100.0, 0.0, 100.0, 0.0]], np.float32)
    result, reference = drawn(lambda builder, key, x: multinomial(builder, key, 2, x, 30000, ir.DataType.INT32), scores)
    np.testing.assert_array_equal(result, reference)
    assert (result.dtype, result.shape) == (np.int32, (2, 30000))
    for row, classes in enumerate(result):
        expected = torch.softmax(torch.from_numpy(scores[row]), 0).numpy()
        np.testing.assert_allclose(np.bincount(classes, minlength=4) / 30000, expected, atol=0.012)
        assert set(np.flatnonzero(np.bincount(classes, minlength=4))) <= set(np.flatnonzero(expected > 1e-30))


def in_torch(key: np.ndarray, stream: int, rows: int, columns: int) -> torch.Tensor:
    """The words of a matrix before the last step of ``uniform_bits``, by PyTorch's integer kernels."""

    def mix(word: torch.Tensor) -> torch.Tensor:
        word = (word ^ (word >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        word = (word ^ (word >> 15)) * 0x846CA68B & 0xFFFFFFFF
        return word ^ (word >> 16)

    base = torch.tensor([0xA54FF53A, 0x510E527F]) + stream & 0xFFFFFFFF
    row_key, column_key = mix(torch.from_numpy(key.astype(np.int64)) + mix(base) & 0xFFFFFFFF)
    words = mix(torch.arange(rows) ^ row_key)[:, None] ^ mix(torch.arange(columns) ^ column_key)[None, :]
    words = words * 0x7FEB352D & 0xFFFFFFFF
    return (words ^ (words >> 15)) * 0x846CA68B & 0xFFFFFFFF


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_masks_are_the_same_bits_in_pytorch(ratio: float) -> None:
    expected = in_torch(initial_key(31), 7, 300, 257) >= int(ratio * 2**32 + 0.5)
    x = np.zeros((300, 257), np.float32)
    for threads in (1, 2):
        for result in drawn(lambda builder, key, x: keep_mask(builder, key, 7, x, ratio), x, seed=31, threads=threads):
            np.testing.assert_array_equal(result, expected.numpy())


DRAWING_MODEL = """
<ir_version: 10, opset_import: ["": 18]>
noisy (float[batch, 4] x) => (float[batch, 4] y, float[2, 3] fixed, float[2, 3] flat, int64[batch, 5] classes)
    <float[4, 4] weight = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
{
    h = MatMul (x, weight)
    noise = RandomNormalLike <mean = 1.0, scale = 0.1> (h)
    spread = RandomUniformLike <low = 2.0, high = 3.0> (h)
    fixed = RandomNormal <shape = [2, 3]> ()
    flat = RandomUniform <shape = [2, 3], high = 9.0> ()
    p = Sigmoid (h)
    coins = Bernoulli (p)
    classes = Multinomial <sample_size = 5, dtype = 7> (h)
    scaled = Mul (h, noise)
    total = Add (scaled, spread)
    y = Mul (total, coins)
}"""


def test_a_program_draws_from_its_key() -> None:
    model = onnx.parser.parse_model(DRAWING_MODEL)
    program = burnish.compile(model, loss="mse", outputs="y")
    drawing = {"RandomNormalLike", "RandomUniformLike", "RandomNormal", "RandomUniform", "Bernoulli", "Multinomial"}
    assert not drawing & {node.op_type for node in program.step.graph}
    random = np.random.default_rng(0)
    batch = {"x": random.standard_normal((6, 4), dtype=np.float32), "targets": np.zeros((6, 4), np.float32)}
    runs = []
    for engine in ("onnxruntime", "onnxruntime", "reference"):
        session = burnish.Session(program, engine, seed=3)
        runs.append([session.step(batch)["loss"] for _ in range(3)])
    assert runs[0] == runs[1]
    np.testing.assert_allclose(runs[0], runs[2], rtol=1e-5)
    assert burnish.Session(program, seed=4).step(batch)["loss"] != runs[0][0]
    held = burnish.Session(program, seed=3)
    first = held.step(batch, lr=0.0)["loss"]
    assert held.step(batch, lr=0.0)["loss"] != first, "the key moves on"


def test_the_gradient_passes_what_was_drawn() -> None:
    """y = h * noise: the gradient of h is that noise, the same numbers as in the forward pass."""
    text = """
<ir_version: 10, opset_import: ["": 18]>
noisy (float[batch, 4] x) => (float[batch, 4] y) <float[4] weight = {1, 2, 3, 4}>
{
    h = Mul (x, weight)
    noise = RandomNormalLike (h)
    y = Mul (h, noise)
}"""
    program = burnish.compile(onnx.parser.parse_model(text), loss=burnish.losses.mean_squared_error(reduction="sum"), outputs="y")
    state = program.initial_state(seed=5)
    x = np.random.default_rng(1).standard_normal((7, 4)).astype(np.float32)
    feeds = {"x": x, "targets": np.zeros((7, 4), np.float32)}
    feeds |= {entry.name: state[entry.name] for entry in program.signature["grad"].inputs if entry.is_state}
    results = burnish.engines.get("onnxruntime").run(program.grad, feeds)
    weight = state["param/weight"]
    noise = drawn(lambda builder, key, like: normal(builder, key, 0, like, ir.DataType.FLOAT), x, seed=5)[0]
    np.testing.assert_allclose(results["loss"], ((x * weight * noise) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(results["grad:weight"], (2 * x * weight * noise * x * noise).sum(axis=0), rtol=1e-5)
