"""What else is done with a graph that has loops: frozen normalization, recomputation, workers, second derivatives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import burnish
from burnish import engines
from burnish.errors import ConfigurationError, GradientError
from oracles.central_differences import central_differences
from oracles.combinations import diagonal
from oracles.gradient_harness import assert_close
from oracles.several_workers import largest_difference, train_alone, train_in_threads

TEXT = """<ir_version: 10, opset_import: ["": 18]>
g (double[N, 3] x) => (double[N, 3] y) <int64 count = {4}, bool yes = {1}, double[3, 3] head = {1, 0, 0, 0.5, 1, 0, 0, 2, 1},
    double[3, 3] w = {1, 0.2, 0.3, 1, 0.5, 0.6, 0.7, 0.8, 0.9}, double[3] mean = {0.1, 0.2, 0.3},
    double[3] variance = {1, 2, 3}> {
    a = MatMul (x, head)
    h = Loop (count, yes, a) <body = step (int64 i, bool go, double[N, 3] s) => (bool on, double[N, 3] t)
        { on = Identity (go) m = MatMul (s, w) BODY }>
    y = MatMul (h, head)
}"""
TANH = TEXT.replace("BODY", "t = Tanh (m)")
NORMALIZED = TEXT.replace("BODY", "k = BatchNormalization (m, gamma, beta, mean, variance) t = Tanh (k)").replace(
    "double[3] mean", "double[3] gamma = {1, 1.5, 2}, double[3] beta = {0.1, 0, -0.1}, double[3] mean"
)
UNROLLED = f"""{TANH[: TANH.index("h = Loop")]}
    {" ".join(f"m{i} = MatMul ({'a' if i == 0 else f't{i - 1}'}, w) t{i} = Tanh (m{i})" for i in range(4))}
    y = MatMul (t3, head) }}"""


def compiled(text: str, **options: object) -> burnish.Program:
    return burnish.compile(onnx.parser.parse_model(text), loss="mse", optimizer="sgd:lr=0.1", **options)


def batches(dtype: type = np.float64) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [{name: generator.normal(size=(5, 3)).astype(dtype) for name in ("x", "targets")} for _ in range(3)]


@pytest.mark.slow
def test_normalization_in_a_loop_has_to_be_frozen() -> None:
    with pytest.raises(ConfigurationError, match=r"batch normalization '.*' is in the body of a loop, which normalizes any"):
        compiled(NORMALIZED)
    program = compiled(NORMALIZED, norm="frozen")
    assert {"gamma", "beta", "w"} < set(program.options["trainable"])
    fed = batches()[0] | program.initial_state()
    fed = {entry.name: fed[entry.name] for entry in program.signature["grad"].inputs}
    for name in ("gamma", "beta", "w"):

        def loss(arrays: list[np.ndarray], name: str = name) -> float:
            return engines.get("reference").run(program.grad, {**fed, f"param/{name}": arrays[0]})["loss"]

        expected = central_differences(loss, [fed[f"param/{name}"]], 0)
        for engine in ("reference", "torch", "onnxruntime"):
            found = engines.get(engine).run(program.grad, fed)[f"grad:{name}"]
            assert_close(found, expected, 1e-6, f"{engine}: {name}")
    with burnish.Session(program) as session:
        session.step(batches()[0])
        np.testing.assert_array_equal(session.state()["stat/mean"], [0.1, 0.2, 0.3])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[[2, 3]] * 3, [[4, 1], [1, 4], [3, 2]]])
def test_workers(sizes: list[list[int]]) -> None:
    program = compiled(TANH)
    alone = train_alone(program, batches())
    for outcome in train_in_threads(program, batches(), sizes):
        assert largest_difference(outcome, alone) < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_recomputation_changes_nothing(engine: str) -> None:
    states = []
    for recompute in (None, "layers"):
        with burnish.Session(compiled(TANH, recompute=recompute), engine=engine) as session:
            for batch in batches():
                session.step(batch)
            states.append(session.state())
    for name, array in states[0].items():
        np.testing.assert_array_equal(states[1][name], array)


@pytest.mark.slow
def test_mixed_precision_computes_bodies_in_float32() -> None:
    """Of what the loop reads in sixteen bits the body has its float32 version."""
    losses = []
    for text in (TANH, UNROLLED):
        program = compiled(text.replace("double", "float"), precision="bfloat16")
        with burnish.Session(program, engine="torch") as session:
            losses.append([session.step(batch)["loss"] for batch in batches(np.float32)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-2)


@pytest.mark.slow
def test_a_saved_program(tmp_path: Path) -> None:
    program = compiled(TANH)
    again = burnish.Program.load(program.save(tmp_path / "program"))
    assert largest_difference(train_alone(again, batches()), train_alone(program, batches())) == 0
    onnx.checker.check_model(program.to_onnx())


@pytest.mark.slow
@pytest.mark.parametrize("wrt", ["w", "x"])
def test_second_derivatives(wrt: str) -> None:
    text = TANH.replace("=> (double[N, 3] y)", "=> (double l)").replace(
        "y = MatMul (h, head)", "y = MatMul (h, head) q = Mul (y, y) l = ReduceSum <keepdims = 0> (q)"
    )
    first = burnish.grad(onnx.parser.parse_model(text), ["w", "x"])
    second = burnish.grad(first, ["x"], of=f"grad:{wrt}")
    x = batches()[0]["x"]
    v = np.random.default_rng(1).normal(size=(3, 3) if wrt == "w" else x.shape)
    run = engines.get("reference").run
    expected = central_differences(lambda arrays: float((run(first, {"x": arrays[0]})[f"grad:{wrt}"] * v).sum()), [x], 0)
    for engine in ("reference", "onnxruntime", "torch"):
        found = engines.get(engine).run(second, {"x": x, f"cotangent:grad:{wrt}": v})[f"grad:{wrt}:x"]
        assert_close(found, expected, 1e-6, engine)


def test_states_that_no_stack_holds_are_refused() -> None:
    text = TANH.replace("double[N, 3] x", "double[2, 3] x").replace("t = Tanh (m)", "k = Tanh (m) t = Concat <axis = 0> (k, k)")
    text = text.replace("double[N, 3] s) => (bool on, double[N, 3] t)", "double[2, 3] s) => (bool on, double[] t)")
    with pytest.raises(GradientError, match=r"Loop 'Loop' .* carries 'a' from shape \[2,3\] to shape .* began with it"):
        burnish.grad(onnx.parser.parse_model(text), "w")


@pytest.mark.slow
@diagonal((("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)]), ("engine", ["onnxruntime", "torch", "reference"]))
def test_a_recurrent_layer_over_frames_whose_rank_nobody_says(kind: str, gates: int, engine: str) -> None:
    """In a loop, and without the states that it begins with."""
    source = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]>
        g (float[T, N, 2] x, int64[k] shape) => (float[T, N, 2] y)
        <float[1, {3 * gates}, 2] w, float[1, {3 * gates}, 3] r, float[3, 2] back,
         int64 two = {{2}}, bool yes = {{1}}, int64[1] one = {{1}}> {{
        frames = Reshape (x, shape)
        y = Loop (two, yes, frames) <body = turn (int64 i, bool go, float[] s) => (bool on, float[] t) {{
            on = Identity (go) h = {kind} <hidden_size = 3> (s, w, r) q = Squeeze (h, one) t = MatMul (q, back) }}> }}""")
    rng = np.random.default_rng(0)
    for name, shape in {"w": (1, 3 * gates, 2), "r": (1, 3 * gates, 3), "back": (3, 2)}.items():
        source.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32) / 2, name))
    batch = {"x": rng.normal(size=(4, 3, 2)).astype(np.float32), "shape": np.array([4, 3, 2])}
    expected = engines.get("onnxruntime").run(burnish.load(source), batch)["y"]
    session = burnish.Session(burnish.compile(source, loss="mse", optimizer="sgd:lr=0.1", outputs="y"), engine=engine)
    np.testing.assert_allclose(session.predict(batch)["y"], expected, rtol=1e-4, atol=1e-6)
    losses = [session.step({**batch, "targets": np.ones((4, 3, 2), np.float32)})["loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[0]
