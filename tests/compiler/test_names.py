"""Names that a model and the programs made of it both use: told apart where that can be, refused by name where it cannot."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import burnish
from burnish.errors import ConfigurationError

WEIGHT = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
LABELS = np.array([0, 1, 1, 0])


def dense(data: str = "x", logits: str = "logits", *, passed_through: bool = False) -> onnx.ModelProto:
    """``logits = data @ w``; with ``passed_through``, ``data`` is an output as well."""
    shapes = {data: ["batch", 3], logits: ["batch", 2]}
    infos = {name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    outputs = [infos[logits], infos[data]] if passed_through else [infos[logits]]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [data, "w"], [logits])],
        "graph",
        [infos[data]],
        outputs,
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labels", "lr", "step", "rng/key", "opt/momentum/w", "loss", "next:param/w", "grad:w"])
def test_an_output_may_have_a_name_of_the_program(name, tmp_path):
    session = burnish.Session(burnish.compile(dense(logits=name), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9)))
    plain = burnish.Session(burnish.compile(dense(), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9)))
    for _ in range(2):
        assert session.step({"x": X, "labels": LABELS}) == plain.step({"x": X, "labels": LABELS})
    assert session.evaluate({"x": X, "labels": LABELS}) == plain.evaluate({"x": X, "labels": LABELS})
    np.testing.assert_array_equal(session.predict({"x": X})[name], plain.predict({"x": X})["logits"])
    exported = onnxruntime.InferenceSession(session.export(tmp_path / "tuned.onnx"))
    assert [output.name for output in exported.get_outputs()] == [name]


@pytest.mark.parametrize("name", ["labels", "lr", "step", "rng/key", "param/w"])
def test_an_input_with_the_name_of_an_input_of_the_program_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"^the model has an input '{name}', a name the program needs for its .*rename"):
        burnish.compile(dense(name))


@pytest.mark.parametrize("name", ["loss", "accuracy", "next:param/w", "grad:w"])
def test_an_input_with_the_name_of_an_output_of_the_program_is_refused(name):
    with pytest.raises(
        ConfigurationError, match=f"^'{name}' would be both an input and an output of .*: rename it in the model$"
    ):
        burnish.compile(dense(name))


def test_an_output_with_the_name_of_a_parameter_is_refused():
    with pytest.raises(ConfigurationError, match=r"^'param/w' would be both .* of the program's predict graph: rename it"):
        burnish.compile(dense(logits="param/w"))


def test_an_input_that_is_an_output_too(tmp_path):
    session = burnish.Session(burnish.compile(dense(passed_through=True), outputs="logits"))
    session.step({"x": X, "labels": LABELS})
    np.testing.assert_array_equal(session.predict({"x": X})["x"], X)
    exported = onnxruntime.InferenceSession(session.export(tmp_path / "tuned.onnx"))
    np.testing.assert_array_equal(exported.run(["x"], {"x": X})[0], X)


@pytest.mark.parametrize("outputs", [3, ["logits", "logits"], []], ids=str)
def test_outputs_is_one_name_for_a_loss_that_reads_one(outputs):
    message = rf"^outputs is the name of the one output .* not {re.escape(repr(outputs))}; the model has 'logits'$"
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(dense(), outputs=outputs)


def test_a_list_of_one_output():
    assert burnish.compile(dense(), outputs=["logits"]).signature == burnish.compile(dense(), outputs="logits").signature


CONVOLUTIONS = "{t}c = Conv <pads = [1, 1]> ({x}, w, b) {t}r = Relu ({t}c) {t}o = Conv <pads = [1, 1]> ({t}r, v)"
BODIES = {
    "If": f"""y = If (flag) <
        then_branch = one () => (float[N, 2, 8] ao) {{ {CONVOLUTIONS.format(t="a", x="x")} }},
        else_branch = two () => (float[N, 2, 8] bo) {{ {CONVOLUTIONS.format(t="b", x="x")} }}>""",
    "Loop": f"""y = Loop (two, yes, x) <body = turn (int64 i, bool go, float[N, 2, 8] s) => (bool on, float[N, 2, 8] ao)
        {{ on = Identity (go) {CONVOLUTIONS.format(t="a", x="s")} }}>""",
    "Scan": f"""h, q = Scan <num_scan_inputs = 1, scan_input_axes = [2], body = turn (float[N, 2, 8] s, float[N, 2] column) =>
        (float[N, 2, 8] next, float[N, 2] last) {{ {CONVOLUTIONS.format(t="a", x="s")}
            next = Add (ao, s) last = Tanh (column) }}> (x, x)
        y = Tanh (h)""",
    "SequenceMap": f"""parts = SplitToSequence <axis = 2> (x, two)
        mapped = SequenceMap (parts) <body = each (float[N, 2, k] e) => (float[N, 2, k] ao)
            {{ {CONVOLUTIONS.format(t="a", x="e")} }}>
        y = ConcatFromSequence <axis = 2> (mapped)""",
    "function": """y = own.block (x, w, b, v)""",
}
BLOCK = f"""<domain: "own", opset_import: ["": 18]> block (x, w, b, v) => (ao) {{ {CONVOLUTIONS.format(t="a", x="x")} }}"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", BODIES)
def test_what_is_computed_in_bodies_has_names_of_its_own(kind, tmp_path):
    """Passes emit into a body, and into the graph around it, after names were told apart."""
    text = f"""<ir_version: 9, opset_import: ["": 18, "own": 1]> g (float[N, 2, 8] x, bool flag) => (float[N, 2, 8] y)
        <float[2, 2, 3] w, float[2] b, float[2, 2, 3] v, int64 two = {{2}}, bool yes = {{1}}> {{ {BODIES[kind]} }}"""
    source = onnx.parser.parse_model(text + (BLOCK if kind == "function" else ""))
    rng = np.random.default_rng(3)
    for name, shape in {"w": (2, 2, 3), "b": (2,), "v": (2, 2, 3)}.items():
        source.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32) / 3, name))
    program = burnish.compile(source, loss="mse", optimizer=burnish.optim.sgd(lr=0.1), metrics=())
    program.save(tmp_path / "program")
    paths = sorted((tmp_path / "program").glob("*.onnx"))
    assert {"step.onnx", "grad.onnx", "predict.onnx"} <= {path.name for path in paths}
    for path in paths:
        graph = onnx.load(path).graph
        assert len(defined := names_in(graph)) == len(set(defined)), path.name
    onnxruntime.InferenceSession(tmp_path / "program" / "step.onnx")
    x = rng.normal(size=(4, 2, 8)).astype(np.float32)
    batch = {"x": x, "targets": x, "flag": np.array(True)}
    for engine in ("onnxruntime", "torch"):
        session = burnish.Session(program, engine=engine)
        losses = [session.step(batch)["loss"] for _ in range(3)]
        assert losses[2] < losses[0]


def names_in(graph: onnx.GraphProto) -> list[str]:
    """The names that a graph and the bodies in it define."""
    names = [value.name for value in graph.input]
    names += [tensor.name for tensor in graph.initializer if tensor.name not in names]
    for node in graph.node:
        names += [name for name in node.output if name]
        for attribute in node.attribute:
            names += [name for body in (attribute.g, *attribute.graphs) for name in names_in(body)]
    return names
