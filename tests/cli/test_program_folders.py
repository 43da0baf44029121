"""Programs and runs in the place of a model: a compiled program trains as it is, a run says what to do with it."""

from __future__ import annotations

import pytest

import burnish
from burnish.training import read_checkpoint

TRAIN = ("--data", "data.npz", "--threads", "1", "--batch-size", "5")


def said(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_a_program_trains_as_the_model_it_was_compiled_from(run, folder):
    options = ("--optimizer", "adam", "--lr", "0.01", "--loss", "cross_entropy:label_smoothing=0.1")
    run("compile", "model.onnx", "-o", "program", *options)
    run("train", "model.onnx", *TRAIN, *options, "-o", "runs/model")
    assert "program: loaded in" in run("train", "program", *TRAIN, "-o", "runs/program").stdout
    rows = [
        [line.split(",")[:3] for line in (folder / f"runs/{name}/metrics.csv").read_text().splitlines()]
        for name in ("model", "program")
    ]
    assert rows[0] == rows[1]
    run("train", "program", *TRAIN, "--epochs", "2", "-o", "runs/program", "--resume")
    assert "program can be trained: " in run("check", "program").stdout


@pytest.mark.slow
def test_a_program_in_one_file_trains_as_it_was_compiled_from_the_state_in_it(run, folder):
    run("compile", "model.onnx", "-o", "program.onnx", "--optimizer", "adam", "--lr", "0.01", "--loss", "focal")
    assert "program.onnx: loaded in" in run("train", "program.onnx", *TRAIN, "-o", "runs/first").stdout
    text = said(run("train", "program.onnx", *TRAIN, "--optimizer", "sgd", code=2))
    assert "--optimizer says how a model is compiled, and 'program.onnx' is a program that is compiled already" in text
    text = said(run("compile", "program.onnx", "-o", "other", code=1))
    assert "'program.onnx' is a program that is compiled already: train it (burnish train program.onnx)" in text
    run("export", "runs/first", "--training", "-o", "trained.onnx")
    run("train", "trained.onnx", *TRAIN, "-o", "runs/second")
    first, second = (burnish.Program.load(folder / "runs" / name / "program") for name in ("first", "second"))
    assert first.options == second.options
    assert (first.options["optimizer"]["name"], first.options["loss"]["name"]) == ("adam", "focal")
    steps = [
        int(read_checkpoint(folder / "runs" / name / "checkpoints/latest.safetensors").state["step"])
        for name in ("first", "second")
    ]
    assert steps[1] == 2 * steps[0]
    run("train", "trained.onnx", *TRAIN, "--reinitialize", "kaiming", "-o", "runs/third")
    third = read_checkpoint(folder / "runs/third/checkpoints/latest.safetensors")
    assert int(third.state["step"]) == steps[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [("train", "program", *TRAIN, "--lr", "0.1"), ("check", "program", "--loss", "mse"), ("compare", "program", "--loss", "mse")],
)
def test_options_of_compilation_are_refused_for_a_program(run, command):
    run("compile", "model.onnx", "-o", "program")
    option = command[-2]
    text = said(run(*command, code=2))
    assert f"{option} says how a model is compiled, and 'program' is a program that is compiled already: leave it out" in text


def test_a_program_is_neither_compiled_again_nor_exported(run):
    run("compile", "model.onnx", "-o", "program")
    text = said(run("compile", "program", "-o", "other", code=1))
    assert "'program' is a program that is compiled already: train it (burnish train program)" in text
    text = said(run("export", "program", "-o", "tuned.onnx", code=1))
    assert "'program' is a program that is compiled and not trained: train it (burnish train program)" in text
    assert "program/predict.onnx" in text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "check"])
def test_the_folder_of_a_run_says_how_to_go_on(run, command):
    run("train", "model.onnx", *TRAIN, "-o", "runs/first")
    text = said(run(command, "runs/first", *(TRAIN if command == "train" else ()), code=1))
    assert "'runs/first' is the folder of a run: go on with the run by its own command and --resume" in text
    assert "--start-from runs/first" in text
    assert "'runs/first/tuned.onnx'" in text
