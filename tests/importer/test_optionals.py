"""Optional values that are made in a model: the same results without them, and gradients through what they hold."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from burnish.engines import get as engine
from burnish.errors import InputError

X = np.array([[1.0, -2.0, 3.0]], np.float32)


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g (float[N,3] x) => (float[N,3] y) {{ {text} }}')


CHOOSE = """y = If (has) <
    then_branch = a () => (float[N,3] t) { t = Mul (x, x) }, else_branch = b () => (float[N,3] e) { e = Neg (x) }
>"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("o = Optional (x) held = OptionalGetElement (o) y = Mul (held, held)", 2 * X),
        ("held = OptionalGetElement (x) y = Mul (held, held)", 2 * X),
        (f"o = Optional (x) has = OptionalHasElement (o) {CHOOSE}", 2 * X),
        (f"has = OptionalHasElement (x) {CHOOSE}", 2 * X),
        (f"has = OptionalHasElement () {CHOOSE}", -np.ones_like(X)),
    ],
    ids=["element", "element of a tensor", "has one", "tensor", "nothing"],
)
def test_what_an_optional_value_holds_is_known(text: str, expected: np.ndarray) -> None:
    gradient = burnish.grad(model(text), "x")
    assert not [node.op_type for node in gradient.graph.all_nodes() if "Optional" in node.op_type or node.op_type == "If"]
    result = engine("onnxruntime").run(gradient, {"x": X, "cotangent:y": np.ones_like(X)})
    np.testing.assert_allclose(result["grad:x"], expected)


def test_an_optional_value_that_comes_from_outside_stays() -> None:
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[N,3] x, optional(float[N,3]) o) => (float[N,3] y)
        { held = OptionalGetElement (o) y = Mul (held, x) }"""
    loaded = burnish.load(onnx.parser.parse_model(text))
    assert [node.op_type for node in loaded.graph] == ["OptionalGetElement", "Mul"]


OPTIONAL_INPUT = """<ir_version: 9, opset_import: ["": OPSET]> g (float[N,3] x, optional(float[N,3]) o) => (float[N,2] y)
    <float[3,2] w = {1, 2, 3, 4, 5, 6}> { has = OptionalHasElement (o)
        z = If (has) <then_branch = a () => (float[N,3] t) { h = OptionalGetElement (o) t = Add (h, x) },
                      else_branch = b () => (float[N,3] e) { e = Identity (x) }>
        y = MatMul (z, w) }"""


@pytest.mark.parametrize("opset", [15, 18])
@pytest.mark.parametrize("name", ["onnxruntime", "torch", "reference"])
def test_an_optional_input_is_there_in_every_batch(name: str, opset: int) -> None:
    program = burnish.compile(
        onnx.parser.parse_model(OPTIONAL_INPUT.replace("OPSET", str(opset))), loss="mse", optimizer="sgd:lr=0.001"
    )
    session = burnish.Session(program, engine=name)
    np.testing.assert_allclose(session.predict({"x": X, "o": 2 * X})["y"], 3 * X @ np.array([[1, 2], [3, 4], [5, 6]]), rtol=1e-6)
    batch = {"x": X, "o": X, "targets": np.zeros((1, 2), np.float32)}
    assert session.step(batch)["loss"] > session.step(batch)["loss"]
    with pytest.raises(InputError, match="lacks the input 'o'"):
        session.predict({"x": X})


def test_an_optional_output_is_what_it_holds() -> None:
    source = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N,3] x) => (float[N,2] y, optional(float[N,2]) o)
        <float[3,2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul (x, w) o = Optional (y) }""")
    for name in ("onnxruntime", "torch", "reference"):
        found = burnish.Session(burnish.compile(source, loss="mse", outputs="y"), engine=name).predict({"x": X})
        np.testing.assert_array_equal(found["o"], found["y"])
