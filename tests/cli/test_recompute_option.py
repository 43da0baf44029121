"""``--recompute``: its text, and the planned peak that compile and inspect print."""

from __future__ import annotations

import json

import pytest

from burnish.compiler.options import CompileOptions, read_recompute


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([], None),
        (["layers"], "layers"),
        (["layers:batch=16"], "layers:batch=16"),
        (["1.5GB:batch=16"], "1.5GB:batch=16"),
        (["layer1*"], ["layer1*"]),
        (["layer1*", "layer2*"], ["layer1*", "layer2*"]),
    ],
)
def test_what_is_given_is_read(given, read):
    assert read_recompute(given) == read


@pytest.mark.slow
def test_a_budget_is_for_the_batch_that_the_run_has(run):
    def planned(text):
        return CompileOptions(recompute=read_recompute([text])).for_batch(32).recompute.options()

    assert planned("1.5GB") == "1500000000B:batch=32"
    assert planned("1.5GB:batch=16") == "1500000000B:batch=16"
    assert planned("layers") == "layers"
    train = ("train", "model.onnx", "--data", "data.npz", "--batch-size", "16", "-o", "again")
    text = run(*train, "--recompute", "18KB").stdout
    assert "planned peak of a step at batch 16: " in text
    planned = json.loads(run("inspect", "again", "--json").stdout)["planned_peak"]
    assert planned["batch"] == 16
    assert planned["bytes"] <= 18_000 < planned["without_recompute"]


@pytest.mark.slow
def test_compile_and_inspect_print_the_planned_peak(run):
    plain = run("compile", "model.onnx", "-o", "plain").stdout.splitlines()[-1]
    assert plain.startswith("planned peak of a step at batch 1: ")
    assert "without recomputation" not in plain
    line = run("compile", "model.onnx", "-o", "again", "--recompute", "layers:batch=64").stdout.splitlines()[-1]
    assert line.startswith("planned peak of a step at batch 64: ")
    assert line.endswith("B without recomputation")
    assert line in run("inspect", "again").stdout
    planned = json.loads(run("inspect", "again", "--json").stdout)["planned_peak"]
    assert planned["batch"] == 64
    assert planned["inputs"] < planned["bytes"] < planned["without_recompute"]


@pytest.mark.slow
def test_a_budget_out_of_reach_is_an_error(run):
    result = run("compile", "model.onnx", "-o", "program", "--recompute", "1KB", code=1)
    assert "the least that recomputation reaches is" in " ".join(result.stderr.split())
