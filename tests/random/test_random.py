"""Keys, random words, masks and dropout: the same bits everywhere, and good enough ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from burnish.autodiff import differentiate
from burnish.errors import ConfigurationError
from burnish.random import KEY_DTYPE, KEY_SHAPE, dropout, initial_key, keep_mask, key_from_seed, next_key, uniform_bits
from oracles.combinations import spread
from oracles.small_graphs import SmallGraph

KEY = ("uint32", (2,))
MASK = 2**32 - 1
SEEDS = [0, 1, 2, -1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), 123456789012345678]


def mixed(word: int) -> int:
    """The published 32-bit mixing function, on Python integers."""
    word ^= word >> 16
    word = word * 0x7FEB352D & MASK
    word ^= word >> 15
    word = word * 0x846CA68B & MASK
    return word ^ word >> 16


def expected_key(seed: int, steps: int = 0) -> np.ndarray:
    low, high = seed & MASK, seed >> 32 & MASK
    words = [mixed(mixed(start + high & MASK) ^ low) for start in (0xBB67AE85, 0x3C6EF372)]
    moved = [word + steps * stride & MASK for word, stride in zip(words, (0x9E3779B9, 0x6A09E667), strict=True)]
    return np.array(moved, np.uint32)


def expected_words(key: np.ndarray, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """One word per element, before the last step that only ``uniform_bits`` takes; element by element."""
    keys = [
        mixed(int(word) + mixed(start + stream & MASK) & MASK) for word, start in zip(key, (0xA54FF53A, 0x510E527F), strict=True)
    ]
    split = (len(shape) + 1) // 2
    words = np.zeros(shape, np.uint32)
    for place in itertools.product(*map(range, shape)):
        row = int(np.ravel_multi_index(place[:split], shape[:split])) if split else 0
        column = int(np.ravel_multi_index(place[split:], shape[split:])) if len(shape) > split else 0
        word = (mixed(row ^ keys[0]) ^ mixed(column ^ keys[1])) * 0x7FEB352D & MASK
        words[place] = (word ^ word >> 15) * 0x846CA68B & MASK
    return words


def draw(
    function: Any, shape: tuple[int, ...], key: np.ndarray, stream: int, *arguments: Any, declared: Any = "same"
) -> tuple[SmallGraph, dict[str, np.ndarray]]:
    """A graph that draws for an input x of a shape, and what it is fed."""
    graph = SmallGraph({"key": KEY, "x": ("float32", shape if declared == "same" else declared)})
    graph.output("drawn", function(graph.builder, graph["key"], stream, graph["x"], *arguments))
    return graph, {"key": key, "x": np.zeros(shape, np.float32)}


SHAPES = [(), (7,), (1,), (3, 5), (4, 1), (1, 6), (2, 3, 4), (2, 3, 4, 5), (2, 1, 3, 2, 2), (3, 0), (0,)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_gives_the_same_key_in_numpy_and_in_the_graph(seed: int) -> None:
    graph = SmallGraph({"seed": ("int64", ())})
    key = key_from_seed(graph.builder, graph["seed"])
    assert (key.dtype, tuple(key.shape)) == (KEY_DTYPE, KEY_SHAPE)
    graph.output("key", key)
    graph.check()
    expected = expected_key(seed)
    for result in (
        initial_key(seed),
        graph.run(seed=np.int64(seed))["key"],
        graph.run_reference(seed=np.int64(seed))["key"],
    ):
        assert result.dtype == np.uint32
        np.testing.assert_array_equal(result, expected)


def test_keys_of_many_seeds_and_steps_all_differ() -> None:
    keys = {tuple(initial_key(seed)) for seed in range(-2000, 2000)}
    assert len(keys) == 4000
    assert len({first for first, _ in keys}) > 3990
    assert len({second for _, second in keys}) > 3990


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 0.5, "0", True, None])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match="seed must be an integer from"):
        initial_key(seed)


def test_the_next_key() -> None:
    graph = SmallGraph({"key": KEY})
    graph.output("next", next_key(graph.builder, graph["key"]))
    session = graph.session()
    key = initial_key(7)
    for step in range(1, 6):
        reference = graph.run_reference(key=key)["next"]
        key = session(key=key)["next"]
        np.testing.assert_array_equal(key, expected_key(7, step))
        np.testing.assert_array_equal(key, reference)


@spread("shape", SHAPES, test=5, ids=str)
def test_the_same_words_on_every_runtime_and_under_every_shape_knowledge(shape: tuple[int, ...]) -> None:
    key = initial_key(42)
    expected = expected_words(key, 3, shape)
    expected ^= expected >> np.uint32(16)
    symbolic = [f"d{axis}" for axis in range(len(shape))]
    batch = [*symbolic[:1], *shape[1:]]
    for declared in ("same", symbolic, batch, None):
        graph, feeds = draw(uniform_bits, shape, key, 3, declared=declared)
        if declared is not None:
            graph.check()
        for result in (graph.run(**feeds), graph.run(threads=2, **feeds), graph.run_reference(**feeds)):
            assert result["drawn"].dtype == np.uint32
            np.testing.assert_array_equal(result["drawn"], expected)


@pytest.mark.parametrize("opset", [18, 22, 24])
def test_every_opset(opset: int) -> None:
    graph = SmallGraph({"key": KEY, "x": ("float32", ("batch", 4))}, opset=opset)
    graph.output("drawn", keep_mask(graph.builder, graph["key"], 1, graph["x"], 0.5))
    graph.check()
    key = initial_key(1)
    result = graph.run(key=key, x=np.zeros((3, 4), np.float32))["drawn"]
    np.testing.assert_array_equal(result, expected_words(key, 1, (3, 4)) >= 2**31)


def test_two_threads_draw_what_one_draws() -> None:
    graph, feeds = draw(keep_mask, (64, 16, 32, 32), initial_key(5), 9, 0.3)
    np.testing.assert_array_equal(graph.run(threads=1, **feeds)["drawn"], graph.run(threads=2, **feeds)["drawn"])


def test_a_mask_to_compare_with() -> None:
    """Written down once: a change of these bits changes what every seed means."""
    graph, feeds = draw(keep_mask, (4, 16), initial_key(0), 0, 0.25)
    rows = ["".join("01"[int(bit)] for bit in row) for row in graph.run(**feeds)["drawn"]]
    expected = expected_words(expected_key(0), 0, (4, 16)) >= 2**30
    assert rows == ["".join("01"[int(bit)] for bit in row) for row in expected]
    assert rows == GOLDEN


GOLDEN = ["1111111111010010", "1101111011111111", "1110111101111000", "1101010111111111"]


@pytest.mark.parametrize("ratio", [0.0, 1e-12, 0.1, 0.25, 0.5, 0.9, 1.0 - 1e-12, 1.0])
def test_the_mask_is_the_words_against_a_threshold(ratio: float) -> None:
    key = initial_key(11)
    words = expected_words(key, 2, (40, 30)).astype(np.float64)
    expected = words >= round(ratio * 2**32) if 0 < ratio < 1 else np.full(words.shape, ratio == 0)
    graph, feeds = draw(keep_mask, (40, 30), key, 2, ratio)
    np.testing.assert_array_equal(graph.run(**feeds)["drawn"], expected)
    at_run_time = SmallGraph({"key": KEY, "x": ("float32", (40, 30)), "ratio": ("float64", ())})
    mask = keep_mask(at_run_time.builder, at_run_time["key"], 2, at_run_time["x"], at_run_time["ratio"])
    at_run_time.output("drawn", mask)
    for results in (
        at_run_time.run(ratio=np.float64(ratio), **feeds),
        at_run_time.run_reference(ratio=np.float64(ratio), **feeds),
    ):
        np.testing.assert_array_equal(results["drawn"], expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("at_run_time", [False, True])
def test_dropout_and_its_gradient(dtype: str, ratio: float, at_run_time: bool) -> None:
    rng = np.random.default_rng(0)
    x, cotangent = rng.standard_normal((2, 6, 10)).astype(dtype)
    graph = SmallGraph({"key": KEY, "x": (dtype, ("batch", 10)), "dy": (dtype, ("batch", 10)), "ratio": ("float32", (1,))})
    share = graph["ratio"] if at_run_time else ratio
    y = dropout(graph.builder, graph["x"], share, graph["key"], 4)
    assert (y.dtype, y.shape) == (graph["x"].dtype, graph["x"].shape)
    gradient = differentiate(graph.builder, {y.value: graph["dy"]}, [graph["x"].value])[graph["x"].value]
    assert gradient is not None
    graph.output("y", y)
    graph.output("dx", gradient)
    graph.check()
    key = initial_key(3)
    results = graph.run(key=key, x=x, dy=cotangent, ratio=np.array([ratio], np.float32))
    exact = float(np.float32(ratio)) if at_run_time else ratio
    factor = np.zeros(x.shape) if ratio == 1.0 else (expected_words(key, 4, x.shape) >= round(exact * 2**32)) / (1.0 - exact)
    tolerance = 1e-6 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(results["y"], x * factor, rtol=tolerance)
    np.testing.assert_allclose(results["dx"], cotangent * factor, rtol=tolerance)
    assert results["y"].dtype == np.dtype(dtype)


def test_dropout_costs_few_passes_over_the_elements() -> None:
    graph = SmallGraph({"key": KEY, "x": ("float32", ("batch", 64, 28, 28))})
    y = dropout(graph.builder, graph["x"], 0.5, graph["key"], 0)
    graph.output("y", y)
    elementwise = {"Mul", "Cast", "BitwiseXor", "BitShift", "GreaterOrEqual"}
    passes = [node.op_type for node in graph.graph if node.op_type in elementwise and len(node.outputs[0].shape or ()) in (2, 4)]
    assert len(passes) == 9
    assert passes.index("GreaterOrEqual") == 5
    assert len(graph.operators()) < 60


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_that_is_no_share_is_refused(ratio: float) -> None:
    graph = SmallGraph({"key": KEY, "x": ("float32", (2,))})
    with pytest.raises(ConfigurationError, match="a dropout ratio must be between 0 and 1, not"):
        dropout(graph.builder, graph["x"], ratio, graph["key"], 0)
    with pytest.raises(ConfigurationError, match="a dropout ratio must be between 0 and 1, not"):
        keep_mask(graph.builder, graph["key"], 0, graph["x"], ratio)


@pytest.mark.parametrize("stream", [-1, 2**32])
def test_a_stream_out_of_range_is_refused(stream: int) -> None:
    graph = SmallGraph({"key": KEY, "x": ("float32", (2,))})
    with pytest.raises(ConfigurationError, match=f"numbered from 0 to .*, not {stream}"):
        uniform_bits(graph.builder, graph["key"], stream, graph["x"])


class Draws:
    """Masks of many keys and streams, as +1 and -1 scaled to mean 0 and variance 1."""

    def __init__(self, shape: tuple[int, ...], ratio: float, streams: int = 2):
        graph = SmallGraph({"key": KEY, "x": ("float32", shape)})
        for stream in range(streams):
            graph.output(f"mask{stream}", keep_mask(graph.builder, graph["key"], stream, graph["x"], ratio))
        graph.output("next", next_key(graph.builder, graph["key"]))
        self.session = graph.session()
        self.x = np.zeros(shape, np.float32)
        self.keep = 1.0 - ratio

    def __call__(self, seed: int, steps: int) -> np.ndarray:
        """Signs of shape [steps, streams, *shape]."""
        key, signs = initial_key(seed), []
        for _ in range(steps):
            results = self.session(key=key, x=self.x)
            key = results.pop("next")
            signs.append([(mask - self.keep) / np.sqrt(self.keep * (1.0 - self.keep)) for mask in results.values()])
        return np.array(signs)


def deviation(products: np.ndarray) -> float:
    """How many standard errors the mean of terms of mean 0 and variance 1 is from 0."""
    return float(products.sum() / np.sqrt(products.size))


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_statistics(ratio: float) -> None:
    """All numbers are reproducible: five standard errors would be a finding, not bad luck."""
    signs = Draws((128, 96), ratio)(seed=2024, steps=40)
    assert abs(deviation(signs)) < 5
    flat = signs.reshape(*signs.shape[:2], -1)
    figures = {f"lag {lag}": deviation(flat[..., lag:] * flat[..., :-lag]) for lag in (1, 2, 3, 95, 96, 97, 192)}
    figures["rows"] = deviation(signs[:, :, 1:] * signs[:, :, :-1])
    figures["columns"] = deviation(signs[..., 1:] * signs[..., :-1])
    figures["streams"] = deviation(signs[:, 0] * signs[:, 1])
    figures["steps"] = deviation(signs[1:] * signs[:-1])
    figures["seeds"] = deviation(signs[:20] * Draws((128, 96), ratio)(seed=2025, steps=20))
    corners = signs[..., :-1, :-1] * signs[..., :-1, 1:] * signs[..., 1:, :-1] * signs[..., 1:, 1:]
    figures["corners of a rectangle"] = deviation(corners[..., ::2, ::2])
    assert {name: figure for name, figure in figures.items() if abs(figure) > 4.5} == {}
    # The counts per row, column and mask vary as much as those of independent draws: no more, no less.
    for axes, extent in (((3,), 96), ((2,), 128), ((2, 3), 96 * 128)):
        squares = signs.sum(axis=axes) ** 2 / extent
        assert abs(squares.mean() - 1.0) < 5 * np.sqrt(2.0 / squares.size)


def test_rows_are_independent_of_each_other() -> None:
    """The squared products of all pairs of rows: where rows and columns leave a trace in the words, these are too large.

    With one multiplication less in the word of an element it would be 17 standard errors off.
    """
    rows = 256
    signs = Draws((rows, 256), 0.5, streams=1)(seed=1, steps=30)[:, 0]
    pairs = np.triu_indices(rows, 1)
    products = np.array([(step @ step.T)[pairs] for step in signs]) / 16.0
    assert abs((products**2).mean() - 1.0) < 5 * np.sqrt(2.0 / products.size)


def test_every_bit_of_a_word_is_fair_and_all_words_are_spread() -> None:
    graph, feeds = draw(uniform_bits, (512, 512), initial_key(77), 0)
    words = graph.run(**feeds)["drawn"]
    for bit in range(32):
        signs = (words >> np.uint32(bit) & np.uint32(1)) * 2.0 - 1.0
        assert abs(deviation(signs)) < 5
        assert abs(deviation(signs[1:] * signs[:-1])) < 5
        assert abs(deviation(signs[:, 1:] * signs[:, :-1])) < 5
    counts = np.bincount((words >> np.uint32(22)).ravel(), minlength=1024)
    chi_square = float(((counts - 256.0) ** 2 / 256.0).sum())
    assert abs(chi_square - 1023) < 5 * np.sqrt(2 * 1023)
    assert len(np.unique(words)) > words.size - 40
