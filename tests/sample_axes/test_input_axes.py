"""Along which axis of inputs, labels and outputs `compile` finds the samples, and what it asks where a file leaves that open."""

from __future__ import annotations

import re
import warnings

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import burnish
from burnish.errors import ConfigurationError, ModelError, ObjectiveWarning
from burnish.program import Role, Signature

WEIGHTS = {
    "w": (6, 3),
    "square": (6, 6),
    "lstm_w": (1, 24, 6),
    "lstm_r": (1, 24, 6),
    "deep_w": (2, 24, 6),
    "deep_r": (2, 24, 6),
    "scale": (1,),
}
INTEGERS = {"zero": [0], "one": [1], "last": -1}

LSTM = "s, h, c = LSTM <hidden_size = 6> ({}, lstm_w, lstm_r) f = Squeeze (s, one)"
BOTH_WAYS = (
    's, h, c = LSTM <hidden_size = 6, direction = "bidirectional"> (x, deep_w, deep_r, , , state, cells)'
    "f = ReduceMean <keepdims = 0> (s, one)"
)
ATTENTION = (
    "t = Transpose <perm = [1, 0, 2]> (x) k = Transpose <perm = [0, 2, 1]> (t) q = MatMul (t, k) p = Softmax (q)"
    "a = MatMul (p, t) f = Transpose <perm = [1, 0, 2]> (a)"
)


def model_of(inputs: str, body: str, outputs: str = "float[A, B, 3] y") -> onnx.ModelProto:
    """`body` makes `f`, of which a matrix makes `y`."""
    head = "" if "y =" in body else "y = MatMul (f, w)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {{ {body} {head} }}')
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in WEIGHTS.items()}
    arrays |= {name: np.array(numbers) for name, numbers in INTEGERS.items()}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items() if name in read)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model


def compiled(model: onnx.ModelProto, **options) -> burnish.Program:
    return burnish.compile(model, **{"loss": "mse", "optimizer": "sgd:lr=0.1"} | options)


def axes_of(program: burnish.Program) -> dict[str, int | None]:
    entries = [*program.signature["step"].inputs_of(Role.DATA, Role.LABEL), *program.signature["predict"].outputs]
    return {entry.name: entry.sample_axis for entry in entries}


FOUND = {
    "a name": ("float[time, batch, 6] x", LSTM.format("x"), {"x": 1, "targets": 1, "y": 1}),
    "a name beside a fixed extent": ("float[12, batch_size, 6] x", LSTM.format("x"), {"x": 1, "targets": 1, "y": 1}),
    "letters": ("float[T, N, 6] x", LSTM.format("x"), {"x": 1, "targets": 1, "y": 1}),
    "what a layer leaves apart": ("float[s0, s1, 6] x", LSTM.format("x"), {"x": 1, "targets": 1, "y": 1}),
    "what attention leaves apart": ("float[s0, s1, 6] x", ATTENTION, {"x": 1, "targets": 1, "y": 1}),
    "no names": ("float[?, ?, 6] x", LSTM.format("x"), {"x": 1, "targets": 1, "y": 1}),
    "fixed extents": ("float[12, 32, 6] x", LSTM.format("x"), {"x": 1, "targets": 1, "y": 1}),
    "the last step": (
        "float[s0, s1, 6] x",
        LSTM.format("x") + "l = Gather <axis = 0> (f, last) y = MatMul (l, w)",
        {"x": 1, "targets": 0, "y": 0},
    ),
    "states": (
        "float[time, batch, 6] x, float[2, batch, 6] state, float[2, batch, 6] cells",
        BOTH_WAYS,
        {"x": 1, "state": 1, "cells": 1, "targets": 1, "y": 1},
    ),
    "states of fixed extents": (
        "float[12, 32, 6] x, float[2, 32, 6] state, float[2, 32, 6] cells",
        BOTH_WAYS,
        {"x": 1, "state": 1, "cells": 1, "targets": 1, "y": 1},
    ),
    "a shared grid": (
        "float[batch, 5, 6] x, float[5, 6] grid",
        "f = Add (x, grid)",
        {"x": 0, "grid": None, "targets": 0, "y": 0},
    ),
    "positions": (
        "float[time, batch, 6] x, float[time, 1, 6] places",
        "f = Add (x, places)",
        {"x": 1, "places": None, "targets": 1, "y": 1},
    ),
    "the first": ("float[batch, time, 6] x", "t = Transpose <perm = [1, 0, 2]> (x)" + LSTM.format("t"), {"x": 0}),
    "the first without names": ("float[s0, s1, 6] x", "f = Relu (x)", {"x": 0, "targets": 0, "y": 0}),
    "the first of fixed extents": ("float[4, 12, 6] x", "f = Relu (x)", {"x": 0, "targets": 0, "y": 0}),
    "one sample of many steps": (
        "float[1, s1, 6] x",
        "t = Transpose <perm = [1, 0, 2]> (x)" + LSTM.format("t"),
        {"x": 0},
    ),
    "samples in audio": ("float[1, num_samples, 6] x", "f = Relu (x)", {"x": 0, "targets": 0, "y": 0}),
    "a graph of nodes": (
        "float[nodes, 6] x, int64[2, edges] ends",
        "e = Gather <axis = 0> (ends, zero) i = Squeeze (e, zero) f = Gather <axis = 0> (x, i)",
        {"x": 0},
    ),
    "a state that comes back": (
        "float[batch, time, 6] x",
        "t = Transpose <perm = [1, 0, 2]> (x)"
        + LSTM.format("t").replace("f = Squeeze (s, one)", "h2 = Relu (h) f = Squeeze (s, one)"),
        {"x": 0, "h2": 1},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_file_tells_the_axis(name):
    inputs, body, expected = FOUND[name]
    outputs = "float[A, B, 3] y" + (", float[1, B, 6] h2" if "h2" in expected else "")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        axes = axes_of(compiled(model_of(inputs, body, outputs), outputs="y"))
    assert {key: axes[key] for key in expected} == expected


def test_a_batch_that_is_opened_stands_where_the_file_has_one_sample():
    program = compiled(model_of("float[12, 1, 6] x", LSTM.format("x")), batch="open")
    assert axes_of(program) == {"x": 1, "targets": 1, "y": 1}
    assert program.signature["step"].inputs_of(Role.DATA)[0].shape == (12, "batch", 6)


def test_an_axis_that_is_asked_for_is_opened_and_an_input_without_samples_is_not():
    model = model_of("float[1, 1, 6] x, float[1, 1, 6] grid", "f = Add (x, grid)")
    program = compiled(model, batch="open", sample_axis={"x": 1, "grid": None})
    shapes = {entry.name: entry.shape for entry in program.signature["step"].inputs_of(Role.DATA)}
    assert shapes == {"x": (1, "batch", 6), "grid": (1, 1, 6)}
    assert axes_of(program) == {"x": 1, "grid": None, "targets": 1, "y": 1}
    with pytest.raises(ConfigurationError, match=r"'x' \[12, 1, 6\] holds its samples along axis 0 \(sample_axis\), and only"):
        compiled(model_of("float[12, 1, 6] x", LSTM.format("x")), batch="open", sample_axis=0)


def test_what_the_file_leaves_open_is_asked_for():
    model = model_of("float[s0, s1, s2] x", "m = Mul (x, scale) y = Softmax <axis = 0> (m)")
    with pytest.raises(ConfigurationError) as refused:
        compiled(model)
    said = str(refused.value)
    assert said.startswith("sample_axis: the file leaves open which axis of the input 'x'")
    assert "Softmax" in said
    assert "axis 1 ('s1') or axis 2 ('s2')" in said
    assert "sample_axis={'x': 1} (--sample-axis x=1)" in said
    for axis in (0, 1, 2):
        assert axes_of(compiled(model, sample_axis={"x": axis})) == {"x": axis, "targets": axis, "y": axis}


def test_what_is_asked_for_goes_before_the_file():
    model = model_of("float[batch, time, 6] x, float[batch, time, 6] grid", "f = Add (x, grid)")
    assert axes_of(compiled(model, sample_axis=1)) == {"x": 1, "grid": 1, "targets": 1, "y": 1}
    assert axes_of(compiled(model, sample_axis={"x": 1}))["grid"] == 1
    assert axes_of(compiled(model, sample_axis={"grid": None})) == {"x": 0, "grid": None, "targets": 0, "y": 0}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"y": 1}, r"sample_axis: the model has no input 'y'.*its inputs are 'x', 'lengths'"),
        ({"x": 3}, r"sample_axis=3: the input 'x' of shape .* has the axes 0 to 2: give one of them, or None"),
        ({"x": -1}, r"sample_axis=-1: the input 'x'"),
        ({"x": True}, r"sample_axis=True: the input 'x'"),
        (1, r"sample_axis=1: the input 'lengths' of shape .* has the axes 0 to 0: .* such as \{'lengths': 0\} \(--sample-axis"),
        ({"x": None, "lengths": None}, r"no input would have samples: give the axis of one at least, such as \{'x': 0\}"),
    ],
)
def test_an_axis_that_there_is_not_is_refused(asked, message):
    with pytest.raises(ConfigurationError, match=message):
        compiled(model_of("float[batch, 5, 6] x, float[batch] lengths", "f = Relu (x) r = Relu (lengths)"), sample_axis=asked)


def test_nodes_that_work_along_the_axis_that_was_asked_for_are_named():
    model = model_of("float[time, batch, 6] x", LSTM.format("x"))
    with pytest.warns(
        ObjectiveWarning, match=r"the first axis of the input 'x' .*: LSTM .*\(sample_axis=\.\.\., --sample-axis\)"
    ):
        compiled(model, sample_axis=0)


def test_programs_and_exports_keep_the_axis(tmp_path):
    model = model_of("float[s0, s1, 6] x, float[s0, 1, 6] places", "f = Add (x, places)")
    program = compiled(model, sample_axis={"x": 1, "places": None})
    expected = {"x": 1, "places": None, "targets": 1, "y": 1}
    program.save(tmp_path / "program")
    assert axes_of(burnish.Program.load(tmp_path / "program")) == expected
    with burnish.Session(program) as session:
        exported = session.export(tmp_path / "tuned.onnx")
    assert axes_of(compiled(onnx.load(exported))) == expected


def test_a_program_that_says_nothing_has_its_samples_first():
    signature = compiled(model_of("float[time, batch, 6] x", LSTM.format("x"))).signature
    written = signature.to_dict()
    (entry,) = [entry for entry in written["step"]["inputs"] if entry["name"] == "x"]
    assert entry["sample_axis"] == 1
    del entry["sample_axis"]
    (read,) = Signature.from_dict(written)["step"].inputs_of(Role.DATA)
    assert read.sample_axis == 0
    plain = compiled(model_of("float[batch, time, 6] x", "f = Relu (x)")).signature.to_dict()
    assert "sample_axis" not in str(plain)
    for axis in (3, -1, "1", True, 1.5):
        with pytest.raises(ValueError, match="sample_axis"):
            Signature.from_dict({"step": {"inputs": [{**entry, "sample_axis": axis}], "outputs": []}})


def test_a_mark_that_is_no_axis_is_refused():
    model = model_of("float[time, batch, 6] x", LSTM.format("x"))
    note = model.graph.input[0].metadata_props.add()
    note.key, note.value = "burnish.sample_axis", "7"
    with pytest.raises(ModelError, match=re.escape("'burnish.sample_axis' of the input 'x'")):
        compiled(model)
