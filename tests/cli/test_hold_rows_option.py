"""Rows that training leaves as they are, by the command line."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from burnish.compiler.options import read_held_rows
from burnish.program import Program

NAME = "classifier.bias"


def weight_of(path: str, name: str = NAME) -> np.ndarray:
    return next(numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer if tensor.name == name)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["model", "program"])
def test_train_leaves_the_rows_as_they_are(run, folder, source):
    held = ("--hold-rows", f"{NAME}=0,2", "--hold-rows", "classifier.weight=1")
    options = ("--optimizer", "adamw", "--weight-decay", "0.5", "--average", "ema:decay=0.5")
    if source == "program":
        run("compile", "model.onnx", "-o", "program", *held, *options)
        run("train", "program", "--data", "data.npz", "-o", "run", "--no-fold")
    else:
        run("train", "model.onnx", "--data", "data.npz", "-o", "run", "--no-fold", *held, *options)
    before, after = weight_of("model.onnx"), weight_of("run/tuned.onnx")
    assert [after[row] == before[row] for row in range(3)] == [True, False, True]
    before, after = weight_of("model.onnx", "classifier.weight"), weight_of("run/tuned.onnx", "classifier.weight")
    assert [bool((after[row] == before[row]).all()) for row in range(3)] == [False, True, False]
    assert Program.load("run/program").options["hold_rows"] == {NAME: [0, 2], "classifier.weight": [1]}
    assert json.loads(run("inspect", "run", "--json").stdout)["options"]["hold_rows"][NAME] == [0, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (f"{NAME}=7", "error: hold_rows: 'classifier.bias' has no row 7"),
        ("classifier.bais=0", "error: hold_rows: 'classifier.bais' is no weight of the model; did you mean 'classifier.bias'"),
    ],
)
def test_rows_that_the_model_does_not_have(run, folder, given, message):
    assert message in run("compile", "model.onnx", "-o", "program", "--hold-rows", given, code=1).stderr


@pytest.mark.parametrize("given", ["classifier.bias", "classifier.bias=", "classifier.bias=x", "=0", "classifier.bias=0.5"])
def test_what_says_no_rows(run, folder, given):
    assert f"--hold-rows {given}: write NAME=ROWS" in run("compile", "model.onnx", "-o", "p", "--hold-rows", given, code=2).stderr


def test_names_and_rows_are_told_apart_at_the_last_equals_sign():
    assert read_held_rows(["a=b=0,1", "c=2", "c= 3"]) == {"a=b": [0, 1], "c": [2, 3]}
