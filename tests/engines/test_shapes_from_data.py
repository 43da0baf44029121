"""Shapes, bounds and lengths that are inputs, not constants: each engine does with them what ONNX Runtime does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from burnish import engines
from oracles.combinations import diagonal, named

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
SHAPED = {
    "Reshape": "r = Reshape (x, s)",
    "Reshape allowzero": "r = Reshape <allowzero = 1> (x, s)",
    "Reshape of a part": "e = Slice (x, zero, zero, zero) r = Reshape (e, s)",
    "Reshape computed": "t = Add (s, zero) u = Cast <to = 6> (t) v = Cast <to = 7> (u) r = Reshape (x, v)",
    "Expand": "r = Expand (x, s)",
    "Tile": "r = Tile (x, s)",
    "ConstantOfShape": "r = ConstantOfShape <value = float[1] {2.5}> (s)",
    "Pad": "r = Pad (x, s)",
    "Pad reflect": 'r = Pad <mode = "reflect"> (x, s)',
    "Pad edge": 'r = Pad <mode = "edge"> (x, s)',
    "Pad wrap": 'r = Pad <mode = "wrap"> (x, s)',
    "Slice": "b, e, p = Split <axis = 0, num_outputs = 3> (s) r = Slice (x, b, e, one, p)",
    "Range": """b, e, p = Split <axis = 0, num_outputs = 3> (s) c = Squeeze (b) d = Squeeze (e) f = Squeeze (p)
        g = Range (c, d, f) r = Cast <to = 1> (g)""",
    "Resize": 'r = Resize <mode = "linear"> (x, , , s)',
    "OneHot": "d = Squeeze (s) r = OneHot (ids, d, onoff)",
    "Split": "p, q = Split <axis = 1> (x, s) r = Concat <axis = 1> (q, p)",
    "Unsqueeze": "r = Unsqueeze (x, s)",
    "Squeeze": "e = Unsqueeze (x, one) r = Squeeze (e, s)",
    "ReduceSum": "r = ReduceSum (x, s)",
    "TopK": "r, i = TopK <axis = 1> (x, s)",
    "Gather": "r = Gather <axis = 1> (x, s)",
    "CumSum": "d = Squeeze (s) r = CumSum (x, d)",
    "Trilu": "d = Squeeze (s) r = Trilu (x, d)",
    "CenterCropPad": "r = CenterCropPad <axes = [1, 2]> (x, s)",
}
CASES = [
    *[("Reshape", s) for s in ([2, 0, 4, 1], [0, -1], [-1], [0, 0, 0], [4, 6], [0, 12, 1], [3, -1, 2])],
    *[("Reshape allowzero", s) for s in ([4, 6], [2, 3, 4], [-1, 4])],
    *[("Reshape of a part", s) for s in ([0, 3, 4], [0, 12], [0, 0, 2, 2])],
    *[("Reshape computed", s) for s in ([0, 1, 12], [2, 0, 2, 2, 1])],
    *[("Expand", s) for s in ([2, 3, 4], [5, 2, 3, 4], [1, 1, 1], [1], [2, 1, 4])],
    *[("Tile", s) for s in ([1, 2, 3], [0, 1, 1])],
    *[("ConstantOfShape", s) for s in ([2, 3], [0], [0, 4])],
    *[("Pad", s) for s in ([0, 1, 2, 1, 0, 0], [0, -1, 0, 0, 0, -2])],
    *[(f"Pad {mode}", [0, 1, 2, 1, 0, 1]) for mode in ("reflect", "edge", "wrap")],
    *[("Slice", s) for s in ([0, 2, 1], [-1, -4, -1], [2, 0, 1], [0, 9, 2], [-9, 9, 1], [9, -9, -1])],
    *[("Range", s) for s in ([0, 5, 1], [5, 0, -2], [3, 3, 1], [4, 2, 1])],
    *[("Resize", s) for s in ([2, 3, 8], [2, 6, 4], [2, 2, 3])],
    *[("OneHot", s) for s in ([3], [5])],
    *[("Split", s) for s in ([1, 2], [3, 0])],
    *[("Unsqueeze", s) for s in ([0, 2], [-1])],
    *[("Squeeze", s) for s in ([1],)],
    *[("ReduceSum", s) for s in ([1], [0, -1])],
    *[("TopK", s) for s in ([1], [3])],
    *[("Gather", s) for s in ([2, -1, 0], [-3])],
    *[("CumSum", s) for s in ([1], [-1])],
    *[("Trilu", s) for s in ([1], [-1])],
    *[("CenterCropPad", s) for s in ([5, 2], [3, 4])],
]


def model(operator: str, length: int | str, extents: str = "N, 3, 4") -> onnx.ModelProto:
    """``x`` and what ``operator`` takes as ``s``, through a multiplication by a weight."""
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 19]>
        g (float[{extents}] x, int64[{length}] s) => (float[] y)
        <float w = {{2}}, int64[1] one = {{1}}, int64[1] zero = {{0}}, int64[3] ids = {{0, 2, 1}}, float[2] onoff = {{-1, 3}}> {{
        {SHAPED[operator]} y = Mul (r, w) }}""")


@diagonal(
    (("operator", "s"), named(CASES, [f"{operator} {s}" for operator, s in CASES])),
    ("known", ["length", "rank", "nothing"]),
    ("engine", ["torch", "reference"]),
    test=60,
)
def test_a_shape_that_is_an_input(operator: str, s: list[int], known: str, engine: str) -> None:
    # The standard's inference takes sizes of an unknown number for none.
    length = "k" if known != "length" and operator != "Resize" else len(s)
    source = burnish.load(model(operator, length, "a, b, c" if known == "nothing" else "N, 3, 4"))
    feeds = {"x": X, "s": np.array(s)}
    expected = engines.get("onnxruntime").run(source, feeds)["y"]
    found = engines.get(engine).run(source, feeds)["y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", ["d = Sub (n, n)", "d = Div (n, nine)", "d = Mod (n, n)", "e = Sub (n, n) d = Mul (e, nine)"])
def test_a_zero_that_is_computed_of_extents_copies_one(count: str) -> None:
    source = burnish.load(
        onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]> g (float[N, 3, 4] x) => (float[a, b] y)
        <int64[1] nine = {{9}}, int64[1] rest = {{-1}}, float[1] w = {{2}}> {{
        n = Shape <start = 0, end = 1> (x) {count} s = Concat <axis = 0> (d, rest) r = Reshape (x, s) y = Mul (r, w) }}""")
    )
    np.testing.assert_allclose(engines.get("torch").run(source, {"x": X})["y"], 2 * X.reshape(2, 12))


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_training_behind_a_shape_that_copies_extents(engine: str) -> None:
    source = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N, 3, 4] x, int64[4] s) => (float[a, b, c, d] y)
        <float[4, 1] w = {1, 2, 3, 4}> { r = Reshape (x, s) t = Transpose <perm = [0, 1, 3, 2]> (r) y = MatMul (t, w) }""")
    session = burnish.Session(burnish.compile(source, loss="mse", optimizer=burnish.optim.sgd(lr=1.0)), engine=engine)
    targets = np.zeros((2, 3, 1, 1), np.float32)
    session.step({"x": X, "s": np.array([2, 0, 4, 1]), "targets": targets})
    weight = np.array([1.0, 2, 3, 4])
    expected = weight - 2 * np.einsum("nck,nc->k", X, X @ weight) / 6
    np.testing.assert_allclose(session.state()["param/w"][:, 0], expected, rtol=1e-5)
