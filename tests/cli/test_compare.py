"""``burnish compare``: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json

import pytest

from burnish import engines
from oracles.faulty_engine import FaultyEngine


@pytest.fixture
def faulty(monkeypatch):
    """Let the name ``faulty`` be an engine whose LogSoftmax is wrong."""
    get = engines.get
    engine = FaultyEngine(lambda node: node.op_type == "LogSoftmax")
    monkeypatch.setattr(engines, "get", lambda name="auto": engine if name == "faulty" else get(name))


@pytest.mark.slow
def test_engines_that_agree(run, folder):
    result = run("compare", "model.onnx", "--engines", "onnxruntime,reference", "--steps", "2", "--json", "report.json")
    assert "onnxruntime and reference agree over 2 steps" in result.stdout
    assert "reference beside onnxruntime" in result.stdout
    values = json.loads((folder / "report.json").read_text())
    assert values["agrees"] is True
    assert len(values["losses"]) == 2
    assert values["losses"][0]["onnxruntime"] == pytest.approx(values["losses"][0]["reference"], rel=1e-5)


@pytest.mark.slow
def test_engines_that_differ(run, folder, faulty):
    result = run("compare", "model.onnx", "--engines", "onnxruntime,faulty", "--steps", "2", "--json", "report.json", code=1)
    said = " ".join(result.stderr.split())
    assert "error: faulty differs from onnxruntime in step 0, in 'loss'" in said
    assert "first at LogSoftmax" in said
    assert "of the loss: by 9.9e-03 on the same inputs; against float64 onnxruntime is off by" in said
    assert "differs" in result.stdout
    values = json.loads((folder / "report.json").read_text())
    assert values["reports"][0]["fault"]["operator"] == "burnish.SoftmaxCrossEntropy"
    assert f"error: {' '.join(values['message'].split())}" in said


@pytest.mark.slow
def test_a_tolerance_lets_a_fault_pass(run, faulty):
    result = run("compare", "model.onnx", "--engines", "onnxruntime,faulty", "--steps", "1", "--rtol", "0.5")
    assert "onnxruntime and faulty agree over 1 step" in result.stdout


@pytest.mark.slow
def test_the_data_of_training(run, folder):
    run("compare", "model.onnx", "--data", "data.npz", "--steps", "4", "--batch-size", "8", "--json", "report.json")
    run("compare", "model.onnx", "--steps", "4", "--json", "random.json")
    found, random = (json.loads((folder / name).read_text())["losses"] for name in ("report.json", "random.json"))
    assert len(found) == 4
    assert found[0] != random[0]
    # Two batches of eight are an epoch of the twenty samples; the third comes from the next.
    assert found[2]["onnxruntime"] != found[0]["onnxruntime"]


@pytest.mark.slow
def test_a_program_is_compared_as_it_was_compiled(run, folder):
    run("compile", "model.onnx", "-o", "program", "--optimizer", "adam")
    run("compare", "program", "--steps", "1", "--float64", "--json", "report.json")
    values = json.loads((folder / "report.json").read_text())
    assert any(name.startswith("opt/second_moment/") for name in values["reports"][0]["tensors"])
    assert max(values["errors"]["onnxruntime"].values()) < 1e-4


def test_options_that_make_no_sense(run):
    result = run("compare", "model.onnx", "--engines", "onnxruntime", code=1)
    assert "engines: give two or more to compare" in result.stderr
    assert "--extent batch: give NAME=N" in run("compare", "model.onnx", "--extent", "batch", code=2).stderr
    result = run("compare", "model.onnx", "--extent", "height=3", code=1)
    assert "extent: no input has a dimension 'height'; symbolic are" in result.stderr
    result = run("compare", "model.onnx", "--extent", "a=3", "--data", "data.npz", code=2)
    assert "--extent is for random data" in result.stderr
