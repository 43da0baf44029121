"""Momentum within the product that makes the gradient: the same results, and what stays as it is."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.graph import attribute_value
from burnish.passes import accumulate_gradients

GEMM, MUL, ADD = "g = Gemm<transA = 1>(a, b)", "s = Mul(v, m)", "y = Add(s, g)"
TURNED = ("t = Transpose(b)", "g = Gemm<transA = 1, transB = 1>(a, t)")
SHAPES = {"a": (3, 6), "b": (3, 4), "v": (6, 4)}


def update(*nodes: str, dtype: str = "float", v: str = "6, 4", inputs: str = "", outputs: str = "") -> ir.Model:
    text = (
        f'<ir_version: 10, opset_import: ["" : 18]> update ({dtype}[N, 6] a, {dtype}[N, 4] b, {dtype}[{v}] v{inputs}) '
        f"=> ({dtype}[6, 4] y{outputs}) <{dtype} m = {{0.9}}> {{ {' '.join(nodes)} }}"
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize(
    "nodes",
    [
        (GEMM, MUL, ADD),
        (GEMM, "s = Mul(m, v)", "y = Add(g, s)"),
        (*TURNED, MUL, ADD),
    ],
)
def test_results_are_those_of_the_momentum(nodes):
    rng = np.random.default_rng(0)
    model = update(*nodes)
    accumulated = accumulate_gradients(model.clone())
    assert operators(accumulated)[-1] == "Gemm"
    assert not {"Mul", "Add"} & {*operators(accumulated)}
    onnx.checker.check_model(ir.to_proto(accumulated), full_check=True)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("a", (3, 6)), ("b", (3, 4)), ("v", (6, 4)))
    }
    engine = OnnxRuntimeEngine(kernels=False)
    expected, given = (engine.run(each, arrays)["y"] for each in (model, accumulated))
    np.testing.assert_allclose(given, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(given, np.float32(0.9) * arrays["v"] + arrays["a"].T @ arrays["b"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        update(GEMM, MUL, ADD, dtype="double"),  # the attribute would round the momentum
        update(GEMM, MUL, ADD, v="4"),
        update("g = Gemm<transA = 1>(a, b, v)", MUL, ADD),
        update("g = Gemm<transA = 1, alpha = 2.0>(a, b)", MUL, ADD),
        update(GEMM, "s = Mul(v, n)", ADD, inputs=", float n"),
        update(GEMM, MUL, ADD, "z = Relu(g)", outputs=", float[6, 4] z"),
        update(GEMM, MUL, ADD, "z = Relu(s)", outputs=", float[6, 4] z"),
        update(GEMM, MUL, "y = Sub(s, g)"),
    ],
    ids=["float64", "broadcast", "third operand", "factor", "not constant", "gradient read", "multiple read", "subtraction"],
)
def test_others_stay_as_they_are(model):
    nodes = operators(model)
    assert operators(accumulate_gradients(model)) == nodes


def test_a_step_accumulates_large_weights_and_trains_as_gradients_and_update_apart_do():
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[N, 64] x) => (float[N, 40] y) { y = Gemm<transB = 1>(x, w, b) }'
    )
    for name, shape in (("w", (40, 64)), ("b", (40,))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 8, name))
    program = burnish.compile(proto, loss="mse", optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))
    accumulating = next(node for node in program.step.graph if attribute_value(node, "beta", 1.0) < 1)
    assert accumulating.outputs[0].name == "next:opt/momentum/w"
    engine = OnnxRuntimeEngine(kernels=False)
    state = program.initial_state()
    batch = {"x": rng.standard_normal((8, 64)).astype(np.float32), "targets": rng.standard_normal((8, 40)).astype(np.float32)}
    with burnish.Session(program, engine=engine, state=state) as session:
        for _ in range(3):
            session.step(batch)
        trained = session.state()
    values = {name: array.astype(np.float64) for name, array in state.items() if name.startswith("param/")}
    velocity = {name: np.zeros_like(value) for name, value in values.items()}
    for _ in range(3):
        dy = 2 * (batch["x"] @ values["param/w"].T + values["param/b"] - batch["targets"]) / batch["targets"].size
        for name, gradient in (("param/w", dy.T @ batch["x"]), ("param/b", dy.sum(0))):
            velocity[name] = 0.9 * velocity[name] + gradient
            values[name] -= 0.1 * velocity[name]
    for name, expected in values.items():
        np.testing.assert_allclose(trained[name], expected, rtol=1e-5, atol=1e-6)
