"""What opsets 27 and 28 added to older operators: computed and differentiated on every engine, in older opsets too."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from burnish import engines
from burnish.errors import ModelError, UnsupportedOperatorError

ENGINES = ["onnxruntime", "torch", "reference"]
RNG = np.random.default_rng(0)


def parsed(text: str, opset: int = 28) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 13, opset_import: ["": {opset}]> {text}')


def run(source: onnx.ModelProto, engine: str, **feeds: np.ndarray) -> np.ndarray:
    program = burnish.compile(source, loss="mse", outputs="y")
    assert max(graph.opset_imports[""] for graph in program.graphs.values()) <= 26
    return burnish.Session(program, engine=engine).predict(feeds)["y"]


def blocks(x: np.ndarray, mode: str) -> np.ndarray:
    n, c, h, w = x.shape
    apart = x.reshape(n, c, h // 2, 2, w // 2, 2)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return apart.transpose(order).reshape(n, c * 4, h // 2, w // 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("extents", ["N, 3, 4, 6", "N, C, H, W"])
@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_blocks_whose_channel_comes_first_or_last(mode: str, extents: str, engine: str) -> None:
    x = RNG.normal(size=(2, 3, 4, 6)).astype(np.float32)
    source = parsed(f"""g (float[{extents}] x) => (float[N, k, l, m] y) <float[1] w = {{2}}> {{
        z = SpaceToDepth <blocksize = 2, mode = "{mode}"> (x) y = Mul (z, w) }}""")
    np.testing.assert_allclose(run(source, engine, x=x), 2 * blocks(x, mode), rtol=1e-6)
    cotangent = RNG.normal(size=(2, 12, 2, 3)).astype(np.float32)
    found = engines.get(engine).run(burnish.grad(source, "x"), {"x": x, "cotangent:y": cotangent})["grad:x"]
    # The blocks only change places: each element of the gradient is the cotangent at its place.
    places = blocks(np.arange(x.size).reshape(x.shape), mode)
    expected = np.zeros(x.size, np.float32)
    expected[places.reshape(-1)] = 2 * cotangent.reshape(-1)
    np.testing.assert_allclose(found, expected.reshape(x.shape), rtol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_remainder_of_fractions_has_the_sign_of_the_divisor(engine: str) -> None:
    x = np.array([[5.3, -5.3, 5.3, -5.3, 6.0, -6.0, 0.0]], np.float32)
    source = parsed("""g (float[N, 7] x) => (float[N, 7] y) <float[7] b = {3, 3, -3, -3, 3, -3, 3}, float[1] w = {1}> {
        z = Mod (x, b) y = Mul (z, w) }""")
    b = np.array([3, 3, -3, -3, 3, -3, 3], np.float32)
    np.testing.assert_allclose(run(source, engine, x=x), np.mod(x, b), rtol=1e-6)
    ones = np.ones((1, 5), np.float32)
    source = parsed("g (float[N, 5] x, float[5] b) => (float[N, 5] y) { y = Mod (x, b) }")
    feeds = {"x": x[:, :5] + 0.1, "b": b[:5], "cotangent:y": ones}
    gradient = engines.get(engine).run(burnish.grad(source, ["x", "b"]), feeds)
    np.testing.assert_array_equal(gradient["grad:x"], ones)
    np.testing.assert_array_equal(gradient["grad:b"], -np.floor(feeds["x"][0] / b[:5]))


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
@pytest.mark.parametrize("stash", ["", "<stash_type = 1>"])
def test_a_range_of_sixteen_bits_is_computed_in_float32(stash: str, engine: str) -> None:
    """In its own type steps of 0.1 add up to another number of elements."""
    source = parsed(f"""g (float[N, 1] x, float16 start, float16 end, float16 by) => (float[N, k] y) <float[1] w = {{1}}> {{
        r = Range {stash} (start, end, by) f = Cast <to = 1> (r) s = Mul (x, w) y = Add (s, f) }}""")
    bounds = {name: np.array(number, np.float16) for name, number in {"start": 0, "end": 30, "by": 0.1}.items()}
    found = run(source, engine, x=np.zeros((1, 1), np.float32), **bounds)
    step = np.float32(np.float16(0.1))
    np.testing.assert_array_equal(found[0], (np.arange(len(found[0]), dtype=np.float32) * step).astype(np.float16))
    assert len(found[0]) == np.ceil(np.float32(30) / step)


def test_a_mode_that_is_not_known_is_named() -> None:
    source = parsed('g (float[N, 3, 4, 6] x) => (float[N, 12, 2, 3] y) { y = SpaceToDepth <blocksize = 2, mode = "RCD"> (x) }')
    with pytest.raises((UnsupportedOperatorError, ModelError), match=r"SpaceToDepth .*RCD"):
        burnish.load(source)
