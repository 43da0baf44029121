"""Weights in branches and loop bodies are state, train, and are exported; a decided branch trains as the model without it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.errors import UntrainedWeightsWarning
from oracles.onnxruntime_outputs import onnxruntime_outputs

HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'
ENGINES = ("onnxruntime", "torch", "reference")
BRANCHED = """g (float[N, 2] x, int64 sr) => (float[N, 2] y)
<float[2, 2] head = {1, -2, 3, 4}, int64 rate = {16000}> {
    wide = Equal (sr, rate)
    h = If (wide) <
        then_branch = one () => (u) <float[2, 2] w = {1, 2, 3, 4}> { u = MatMul (x, w) },
        else_branch = two () => (v) {
            w = Constant <value = float[2, 2] {5, 6, 7, 8}> ()
            p = MatMul (x, w)
            v = Tanh (p)
        }
    >
    y = MatMul (h, head)
}"""
PLAIN = """g (float[N, 2] x) => (float[N, 2] y)
<float[2, 2] head = {1, -2, 3, 4}, float[2, 2] w = {5, 6, 7, 8}> {
    p = MatMul (x, w)
    h = Tanh (p)
    y = MatMul (h, head)
}"""


def parsed(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER + text)
    onnx.checker.check_model(model, full_check=True)
    return model


def compiled(model: onnx.ModelProto, **options: object) -> tuple[burnish.Program, dict[str, str]]:
    """A program, and the weights that compilation warns of, with the reasons; nothing else is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = burnish.compile(model, loss="mse", optimizer=burnish.optim.sgd(lr=0.01), **options)
    assert all(isinstance(warning.message, UntrainedWeightsWarning) for warning in caught)
    return program, {name: why for warning in caught for name, why in warning.message.weights.items()}


def in_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose inputs, outputs and tensors are float16 in place of float32, in branches too."""

    def convert(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
                value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        attributes = [attribute for node in graph.node for attribute in node.attribute]
        for tensor in (*graph.initializer, *(attribute.t for attribute in attributes if attribute.HasField("t"))):
            if tensor.data_type == onnx.TensorProto.FLOAT:
                array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        for attribute in attributes:
            if attribute.HasField("g"):
                convert(attribute.g)

    convert(model.graph)
    return model


def batch() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=(4, 2)).astype(np.float32) for name in ("x", "targets")}


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_of_a_branch_that_stays_train_and_are_exported(engine: str, tmp_path: Path) -> None:
    program, untrained = compiled(parsed(BRANCHED))
    assert untrained == {}
    assert program.options["trainable"] == ["head", "w", "w_1"]
    first = program.initial_state()
    assert first["param/w"].ravel().tolist() == [1, 2, 3, 4]
    assert first["param/w_1"].ravel().tolist() == [5, 6, 7, 8]
    session = burnish.Session(program, engine=engine)
    plain, _ = compiled(parsed(PLAIN))
    without = burnish.Session(plain, engine="reference")
    for _ in range(3):
        session.step({**batch(), "sr": np.array(8000)})
        without.step(batch())
    state, expected = session.state(), without.state()
    np.testing.assert_array_equal(state["param/w"], first["param/w"])
    for name, same in (("param/w_1", "param/w"), ("param/head", "param/head")):
        np.testing.assert_allclose(state[name], expected[same], rtol=1e-6)
    # The other branch moves its own weight.
    session.step({**batch(), "sr": np.array(16000)})
    assert not np.array_equal(session.state()["param/w"], first["param/w"])
    np.testing.assert_array_equal(session.state()["param/w_1"], state["param/w_1"])
    state = session.state()
    exported = ir.load(session.export(tmp_path / "tuned.onnx"))
    assert {"w", "w_1", "head"} <= {value.name for value in exported.graph.initializers.values()}
    assert "If" in {node.op_type for node in exported.graph}
    for rate in (16000, 8000):
        fed = {"x": batch()["x"], "sr": np.array(rate)}
        found = onnxruntime_outputs(exported, fed)["y"]
        hidden = np.tanh(fed["x"] @ state["param/w_1"]) if rate == 8000 else fed["x"] @ state["param/w"]
        np.testing.assert_allclose(found, hidden @ state["param/head"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_whose_branch_is_decided_trains_as_one_without_it(engine: str) -> None:
    program, untrained = compiled(parsed(BRANCHED), bind={"sr": 8000})
    assert not untrained
    assert program.options["bind"] == {"sr": 8000}
    assert [entry.name for entry in program.signature["step"].inputs if entry.name in ("x", "sr")] == ["x"]
    plain, _ = compiled(parsed(PLAIN))
    states = []
    for each in (program, plain):
        session = burnish.Session(each, engine=engine)
        for _ in range(3):
            session.step(batch())
        states.append(session.state())
    assert set(states[0]) == set(states[1])
    for name, array in states[1].items():
        np.testing.assert_array_equal(states[0][name], array)
    assert not np.array_equal(states[0]["param/w"], program.initial_state()["param/w"])


def test_a_saved_program_keeps_the_fixed_inputs(tmp_path: Path) -> None:
    program, _ = compiled(parsed(BRANCHED), bind={"sr": 8000})
    again = burnish.Program.load(program.save(tmp_path / "program"))
    assert again.options["bind"] == {"sr": 8000}
    assert burnish.Session(again).step(batch())["loss"] == burnish.Session(program).step(batch())["loss"]


def test_weights_that_are_all_in_branches() -> None:
    model = parsed(BRANCHED.replace("y = MatMul (h, head)", "y = Neg (h)").replace("float[2, 2] head = {1, -2, 3, 4}, ", ""))
    program, untrained = compiled(model)
    assert (program.options["trainable"], untrained) == (["w", "w_1"], {})
    program, untrained = compiled(model, bind={"sr": 16000})
    assert (program.options["trainable"], untrained) == (["w"], {})


def trained(model: onnx.ModelProto, engine: str = "onnxruntime", **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """The state after three steps."""
    session = burnish.Session(compiled(model)[0], engine=engine)
    for _ in range(3):
        session.step({**batch(), **inputs})
    return session.state()


def test_a_weight_that_others_read_too_has_its_whole_gradient() -> None:
    text = """g (float[N, 2] x, bool c) => (float[N, 2] y)
<float[2, 2] shared = {1, 2, 3, 4}, float[2, 2] head = {1, -2, 3, 4}> {
    a = MatMul (x, shared)
    turned = Transpose <perm = [1, 0]> (shared)
    HIDDEN
    sum = Add (a, h)
    y = MatMul (sum, head)
}"""
    branches = "<then_branch = one () => (u) { u = MatMul (x, turned) }, else_branch = two () => (v) { v = Neg (x) }>"
    found = trained(parsed(text.replace("HIDDEN", f"h = If (c) {branches}")), c=np.array(True))
    expected = trained(parsed(text.replace("HIDDEN", "h = MatMul (x, turned)").replace(", bool c", "")))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)
    assert not np.array_equal(expected["param/shared"].ravel(), [1, 2, 3, 4])


def test_a_weight_before_a_branch() -> None:
    text = """g (float[N, 2] x, bool c) => (float[N, 2] y) <float[2, 2] stem = {1, 2, 3, 4}> {
    s = MatMul (x, stem)
    y = If (c) <then_branch = one () => (u) { u = Tanh (s) }, else_branch = two () => (v) { v = Neg (s) }>
}"""
    for condition, operator in ((True, "Tanh"), (False, "Neg")):
        plain = text[: text.index("y = If")].replace(", bool c", "") + f"y = {operator} (s) }}"
        found, expected = trained(parsed(text), c=np.array(condition)), trained(parsed(plain))
        np.testing.assert_allclose(found["param/stem"], expected["param/stem"], rtol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_of_a_loop(engine: str) -> None:
    head = "sum = Add (x, h) y = MatMul (sum, head)"
    model = parsed(f"""g (float[2, 2] x) => (float[2, 2] y)
<int64 count = {{3}}, bool yes = {{1}}, float[2, 2] start = {{1, 0, 0, 1}}, float[2, 2] head = {{1, -2, 3, 4}}> {{
    h = Loop (count, yes, start) <body = step (int64 i, bool go, float[2, 2] s) => (bool on, float[2, 2] t)
        <float[2, 2] w = {{1, 0.2, 0.3, 1}}> {{ on = Identity (go) m = MatMul (s, w) t = Tanh (m) }}>
    {head}
}}""")
    unrolled = parsed(f"""g (float[2, 2] x) => (float[2, 2] y)
<float[2, 2] w = {{1, 0.2, 0.3, 1}}, float[2, 2] start = {{1, 0, 0, 1}}, float[2, 2] head = {{1, -2, 3, 4}}> {{
    a = MatMul (start, w) b = Tanh (a) c = MatMul (b, w) d = Tanh (c) e = MatMul (d, w) h = Tanh (e)
    {head}
}}""")
    program, untrained = compiled(model)
    assert untrained == {}
    assert set(program.options["trainable"]) == {"start", "w", "head"}
    two = {name: array[:2] for name, array in batch().items()}
    states = []
    for each, runs_on in ((model, engine), (unrolled, "reference")):
        session = burnish.Session(compiled(each)[0], engine=runs_on)
        for _ in range(3):
            session.step(two)
        states.append(session.state())
    for name, array in states[1].items():
        np.testing.assert_allclose(states[0][name], array, rtol=1e-5, atol=1e-6)
    assert not np.allclose(states[1]["param/w"].ravel(), [1, 0.2, 0.3, 1], atol=1e-4)


def test_what_stops_a_gradient_inside_of_a_branch_is_named() -> None:
    model = parsed(BRANCHED.replace("u = MatMul (x, w)", "m = MatMul (x, w) u = Round (m)"))
    program, untrained = compiled(model)
    assert untrained == {"w": "Round 'Round' (output 'u') lets no gradient through"}
    assert program.options["trainable"] == ["head", "w_1"]


@pytest.mark.parametrize("bind", [None, {"sr": 8000}])
def test_a_file_in_float16(bind: dict[str, int] | None, tmp_path: Path) -> None:
    """Masters are float32, exports float16, and the branch reads what it did."""
    model = in_float16(parsed(BRANCHED))
    program, untrained = compiled(model, bind=bind)
    assert untrained == {}
    names = ("param/w", "param/head") if bind else ("param/w", "param/w_1", "param/head")
    assert all(program.initial_state()[name].dtype == np.float32 for name in names)
    fed = {"x": batch()["x"].astype(np.float16), "targets": batch()["targets"].astype(np.float16)}
    rate = {} if bind else {"sr": np.array(8000)}
    session = burnish.Session(program)
    before = onnxruntime_outputs(model, {"x": fed["x"], "sr": np.array(8000)})["y"]
    np.testing.assert_allclose(session.predict({"x": fed["x"], **rate})["y"], before, rtol=2e-3)
    losses = [session.step({**fed, **rate})["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    exported = ir.load(session.export(tmp_path / "tuned.onnx"))
    assert {value.dtype.name for name, value in exported.graph.initializers.items() if name in ("w", "w_1", "head")} == {
        "FLOAT16"
    }
    onnxruntime_outputs(exported, {"x": fed["x"], **rate})
