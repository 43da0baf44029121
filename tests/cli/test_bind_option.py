"""Inputs that are fixed to a value, by the command line."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from burnish.program import Program


@pytest.fixture
def branched(folder):
    """A model with a network in each branch, a state beside its data, and data of neither."""
    model = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["": 18]>
branched (float[batch, 4] x, float[batch, 3] state, int64 sr, bool twice) => (float[batch, 3] logits) <int64 rate = {16000}> {
  wide = Equal(sr, rate)
  p = If (wide) <
    then_branch = one () => (u) {
      w = Constant <value = float[1, 3] {1, 2, 3}> ()
      s = Slice(x, zero, one, axis)
      u = MatMul(s, w)
    },
    else_branch = two () => (v) {
      w = Constant <value = float[4, 3] {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> ()
      v = MatMul(x, w)
    }
  >
  q = If (twice) <then_branch = three () => (a) { a = Add(p, p) }, else_branch = four () => (b) { b = Identity(p) }>
  logits = Add(q, state)
}""")
    for name, number in (("zero", 0), ("one", 1), ("axis", 1)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([number]), name))
    onnx.save(model, "branched.onnx")
    generator = np.random.default_rng(0)
    np.savez("samples.npz", x=generator.standard_normal((24, 4)).astype(np.float32), y=generator.integers(0, 3, 24))


BIND = ("--bind", "sr=8000", "--bind", "state=0", "--bind", "twice=false")


@pytest.mark.slow
def test_train_what_one_value_chooses(run, branched):
    run("train", "branched.onnx", "--data", "samples.npz", "-o", "run", "--batch-size", "5", *BIND)
    bound = {"sr": 8000, "state": 0, "twice": False}
    assert Program.load("run/program").options["bind"] == bound
    assert json.loads(run("inspect", "run", "--json").stdout)["options"]["bind"] == bound
    tuned = onnx.load("run/tuned.onnx").graph
    assert [value.name for value in tuned.input] == ["x"]
    assert [(tensor.name, list(tensor.dims)) for tensor in tuned.initializer if tensor.data_type == 1] == [("w", [4, 3])]


@pytest.mark.slow
def test_inspect_and_check(run, branched):
    before = json.loads(run("inspect", "branched.onnx", "--json").stdout)
    assert [weight["name"] for weight in before["parameters"]] == ["w", "w_1"]
    assert not before["unreached"]
    assert not before["nothing_trains"]
    after = json.loads(run("inspect", "branched.onnx", "--json", *BIND).stdout)
    assert [value["name"] for value in after["inputs"]] == ["x"]
    assert [(weight["name"], weight["shape"]) for weight in after["parameters"]] == [("w", [4, 3])]
    assert "can be trained: 15 parameters" in run("check", "branched.onnx").stdout
    assert "can be trained: 12 parameters" in run("check", "branched.onnx", *BIND).stdout


@pytest.mark.slow
def test_compile_and_compare(run, branched):
    run("compile", "branched.onnx", "-o", "program", *BIND)
    assert Program.load("program").options["bind"]["sr"] == 8000
    run("compare", "branched.onnx", "--steps", "2", *BIND)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sr", "--bind sr: write NAME=VALUE, such as 'sr=16000' or 'state=0'"),
        ("=1", "--bind =1: write NAME=VALUE"),
        ("sr=8000 sr=1", "--bind sr=1: 'sr' is fixed to a value already: give it once"),
    ],
)
def test_what_is_no_name_with_a_value(run, branched, given, message):
    options = [word for part in given.split() for word in ("--bind", part)]
    assert message in run("check", "branched.onnx", *options, code=2).stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rate=1", "bind: 'rate' is a weight or a constant of the model, and no input"),
        ("stat=1", "bind: the model has no input 'stat' (did you mean 'state'?)"),
        ("sr=fast", "bind: the input 'sr' is int64, and is given 'fast'"),
        ("sr=[1,2]", "bind: the input 'sr' has the shape [], and is given an array of shape [2]"),
    ],
)
def test_values_that_do_not_fit(run, branched, given, message):
    assert message in run("check", "branched.onnx", "--bind", given, code=1).stderr


@pytest.mark.slow
def test_a_program_has_its_own(run, branched):
    run("compile", "branched.onnx", "-o", "program", *BIND)
    for command in (("inspect", "program"), ("train", "program", "--data", "samples.npz")):
        assert "--bind" in run(*command, "--bind", "sr=8000", code=2).stderr
