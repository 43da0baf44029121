"""Dropout in branches and loops: drawn from the key, in each iteration anew, and the same in the backward pass."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from burnish import engines
from burnish.errors import GradientError
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.central_differences import central_differences
from oracles.gradient_harness import assert_close

HEADER = """<ir_version: 10, opset_import: ["": 18]>
g (double[N, 3] x) => (double[N, 3] y) <bool yes = {1}, double half = {0.5}, double huge = {100}, int64 count = {4},
    double[3, 3] w = {1, 0.2, 0.3, 1, 0.5, 0.6, 0.7, 0.8, 0.9}, double[3] start = {0.1, 0.2, 0.3}> {
"""
STEP = "m = MatMul (s, w) k = Tanh (m) t = Dropout (k, half, yes)"
BODIES = {
    "loop": f"""y = Loop (count, yes, x) <body = step (int64 i, bool go, double[N, 3] s) => (bool on, double[N, 3] t)
        {{ on = Identity (go) {STEP} }}>""",
    "scan": f"""last, y = Scan (start, x) <num_scan_inputs = 1,
        body = step (double[3] h, double[3] f) => (double[3] t, double[3] r) {{ s = Add (h, f) {STEP} r = Identity (t) }}>""",
    "branch": f"""total = ReduceSum <keepdims = 0> (x)
        less = Less (total, huge)
        y = If (less) <then_branch = t () => (double[N, 3] t) {{ s = Identity (x) {STEP} }},
            else_branch = e () => (double[N, 3] b) {{ b = Identity (x) }}>""",
    "branch of a loop": f"""y = Loop (count, yes, x) <body = step (int64 i, bool go, double[N, 3] s)
        => (bool on, double[N, 3] u) {{
        on = Identity (go)
        u = If (go) <then_branch = t () => (double[N, 3] t) {{ {STEP} }},
            else_branch = e () => (double[N, 3] b) {{ b = Identity (s) }}> }}>""",
}


def parsed(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEADER}{body} }}")


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_gradients(body: str) -> None:
    program = burnish.compile(parsed(body), loss="mse", optimizer="sgd:lr=0.1")
    generator = np.random.default_rng(0)
    fed = {name: generator.normal(size=(4, 3)) for name in ("x", "targets")} | program.initial_state(seed=3)
    fed = {entry.name: fed[entry.name] for entry in program.signature["grad"].inputs}
    results = {engine: engines.get(engine).run(program.grad, fed) for engine in ("reference", "torch", "onnxruntime")}
    (expected,) = [
        central_differences(lambda arrays: results_of(program, {**fed, "param/w": arrays[0]})["loss"], [fed["param/w"]], 0)
    ]
    for engine, found in results.items():
        assert_close(found["grad:w"], expected, 1e-6, engine)


def results_of(program: burnish.Program, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return engines.get("reference").run(program.grad, fed)


@pytest.mark.parametrize("operator", ["Loop", "Scan"])
def test_each_iteration_has_draws_of_its_own(operator: str) -> None:
    body = "t = Identity (s) r = Dropout (f, half, yes)"
    if operator == "Loop":
        nodes = f"""last, rows = Loop (count, yes, start) <body = step (int64 i, bool go, double[3] s) => (bool on, double[3] t,
            double[N, 3] r) {{ on = Identity (go) f = Identity (x) {body} }}>"""
    else:
        nodes = f"""axis = Constant <value_ints = [0]> ()
            one = Unsqueeze (x, axis)
            four = Concat <axis = 0> (one, one, one, one)
            last, rows = Scan (start, four) <num_scan_inputs = 1, body = step (double[3] s, double[N, 3] f) => (double[3] t,
            double[N, 3] r) {{ {body} }}>"""
    text = f"{nodes} z = Mul (rows, start) y = Add (z, last)"
    model = onnx.parser.parse_model(f"{HEADER}{text} }}".replace("(double[N, 3] y)", "(double[T, N, 3] y)"))
    program = burnish.compile(model, loss="mse", optimizer="sgd:lr=0.1")
    ones = np.ones((50, 3))
    fed = {"x": ones, "targets": np.zeros((4, 50, 3))} | program.initial_state()
    step = program.semantic["grad"].clone()
    rows = next(node for node in step.graph if node.op_type == operator).outputs[1]
    step.graph.outputs.append(rows)
    lower_semantic_operators(step)
    inputs = {value.name: fed[value.name] for value in step.graph.inputs}
    masks = engines.get("reference").run(step, inputs)[rows.name] != 0
    assert 0.4 < masks.mean() < 0.6
    for first in range(4):
        for second in range(first):
            assert 0.3 < (masks[first] == masks[second]).mean() < 0.7


def test_draws_without_a_key_are_refused() -> None:
    with pytest.raises(GradientError, match=r"Dropout 'Dropout' .* draws random numbers in a body of Loop .* burnish\.compile"):
        burnish.grad(parsed(BODIES["loop"]), "w")
