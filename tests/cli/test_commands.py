"""Each command, in this process: what it writes, what it says, and how it fails."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.cli.console import output
from burnish.errors import ConfigurationError, ObjectiveWarning
from burnish.files import file_writing
from burnish.graph import Builder
from burnish.models import residual_network
from burnish.optim import schedules
from burnish.program import Program, Role
from oracles.combinations import spread

TRAIN = ("train", "model.onnx", "--data", "data.npz", "--threads", "1", "--batch-size", "8")


def predictions(path: Path, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": images})[0]


def images() -> np.ndarray:
    return np.load("data.npz")["x"][:, None]


@pytest.mark.slow
def test_train_writes_a_run(run, folder, curves):
    result = run(*TRAIN, "--epochs", "2", "--eval-data", "data.npz", "--lr", "0.05", "-o", "runs/first")
    written = {path.name for path in (folder / "runs/first").iterdir()}
    assert written == {"checkpoints", "curves.png", "metrics.csv", "program", "run.json", "run.toml", "tuned.onnx"}
    assert "compiled in" in result.stdout
    assert "data.npz: 20 samples; data.npz: 20 samples to evaluate on" in result.stdout
    assert "epoch 2/2  train loss" in result.stdout
    assert "runs/first/tuned.onnx: the tuned model, after 6 steps" in result.stdout
    with (folder / "runs/first/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["3", "6"]
    assert {row["lr"] for row in rows} == {"0.05"}
    right = (predictions(folder / "runs/first/tuned.onnx", images()).argmax(1) == np.load("data.npz")["y"]).mean()
    assert float(rows[-1]["eval_accuracy"]) == right
    record = json.loads((folder / "runs/first/run.json").read_text())
    assert record["command"].startswith("burnish train model.onnx --data data.npz")


@pytest.mark.slow
def test_the_folder_of_a_run_is_named_after_the_model(run, folder):
    run(*TRAIN, "--export", "elsewhere.onnx")
    assert (folder / "runs/model/metrics.csv").exists()
    assert (folder / "elsewhere.onnx").exists()
    assert not (folder / "runs/model/tuned.onnx").exists()


@pytest.mark.slow
def test_resuming_continues_bit_for_bit(run, folder):
    run(*TRAIN, "--epochs", "3", "-o", "whole")
    run(*TRAIN, "--epochs", "1", "-o", "parts")
    run(*TRAIN, "--epochs", "3", "-o", "parts", "--resume")
    assert (folder / "whole/tuned.onnx").read_bytes() == (folder / "parts/tuned.onnx").read_bytes()


@pytest.mark.slow
def test_a_run_is_not_overwritten_unasked(run, folder):
    run(*TRAIN)
    before = (folder / "runs/model/tuned.onnx").read_bytes()
    result = run(*TRAIN, "--epochs", "2", "-o", "runs/model", code=1)
    assert "error: 'runs/model' holds a run already: go on with it (--resume), start anew in it (--overwrite)" in result.stderr
    assert (folder / "runs/model/tuned.onnx").read_bytes() == before
    run(*TRAIN, "--epochs", "2", "--overwrite")
    assert (folder / "runs/model/tuned.onnx").read_bytes() != before
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["model"]


@pytest.mark.slow
def test_resuming_a_finished_run_says_so(run, folder):
    run(*TRAIN, "--lr", "0.01")
    before = (folder / "runs/model/tuned.onnx").read_bytes()
    text = run(*TRAIN, "--resume", "--lr", "0.1", "--schedule", "cosine", "--reinitialize", "kaiming").stdout
    assert "'runs/model': already finished after 3 steps; nothing to train: raise epochs (--epochs) above 1" in text
    assert "--lr 0.1 is taken from here on; the run was started with 0.01" in text
    assert "--schedule cosine is taken from here on; the run was started with constant" in text
    assert "--reinitialize is not taken" in text
    assert (folder / "runs/model/tuned.onnx").read_bytes() == before
    text = run(*TRAIN, "--lr", "0.1", "--schedule", "cosine", "--resume", "--epochs", "1").stdout
    assert "is taken from here on; the run was started with 0.01" in text
    assert "taken from here on: " not in text


@pytest.mark.slow
@pytest.mark.usefixtures("frequent_rows")
def test_the_schedule_of_a_run_is_in_its_program(run, folder):
    run(*TRAIN, "--lr", "0.5", "--schedule", "cosine", "--warmup", "2", "--epochs", "2")
    optimizer = burnish.optim.get(Program.load(folder / "runs/model/program").options["optimizer"])
    assert optimizer.lr == schedules.warmup(schedules.cosine(0.5, 4), 2)
    assert rates(folder / "runs/model") == pytest.approx(
        [1 / 6, 1 / 3, *(0.25 * (1 + math.cos(math.pi * t / 4)) for t in range(4))]
    )
    assert json.loads((folder / "runs/model/run.json").read_text())["course"] == {
        "lr": 0.5,
        "schedule": "cosine",
        "warmup": 2,
        "epochs": 2,
    }


def rates(run_folder: Path) -> list[float]:
    with (run_folder / "metrics.csv").open() as file:
        return [float(row["lr"]) for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--lr", "0.5", "--schedule", "step:every=1,gamma=0.5"), schedules.step(0.5, 1, 0.5)),
        (("--lr", "0.5", "--schedule", "cosine:final=0.1"), schedules.cosine(0.5, 3, 0.1)),
        (("--lr", "0.5", "--schedule", "linear:steps=9"), schedules.linear(0.5, 9)),
        (
            ("--lr", "0.5", "--schedule", "inverse_square_root", "--warmup", "2"),
            schedules.warmup(schedules.inverse_square_root(0.5), 2),
        ),
        (("--schedule", "piecewise:boundaries=[2],rates=[0.2,0.1]"), schedules.piecewise([2], [0.2, 0.1])),
    ],
)
def test_a_schedule_takes_settings_behind_a_colon(run, folder, arguments, expected):
    run(*TRAIN, *arguments)
    optimizer = burnish.optim.get(Program.load(folder / "runs/model/program").options["optimizer"])
    assert optimizer.lr == expected


@pytest.mark.slow
@pytest.mark.usefixtures("frequent_rows")
def test_a_resumed_run_takes_another_schedule_from_there_on(run, folder):
    run(*TRAIN, "--lr", "0.5", "--schedule", "linear")
    text = run(*TRAIN, "--lr", "0.5", "--schedule", "linear", "--epochs", "3", "--resume").stdout
    assert "--epochs 3 is taken from here on; the run was started with 1" in text
    first, following = rates(folder / "runs/model")[:3], rates(folder / "runs/model")[3:]
    assert first == pytest.approx([0.5 * (3 - t) / 3 for t in range(3)])
    assert following == pytest.approx([0.5 * (9 - t) / 9 for t in range(3, 9)])
    text = run(*TRAIN, "--lr", "0.25", "--schedule", "constant", "--epochs", "4", "--resume").stdout
    assert "--lr 0.25 is taken from here on; the run was started with 0.5" in text
    assert rates(folder / "runs/model")[9:] == [0.25] * 3
    # What was saved before can still be exported, with the program as it is now.
    run("export", "runs/model", "--best", "-o", "best.onnx")
    result = run(*TRAIN, "--momentum", "0.5", "--schedule", "cosine", "--epochs", "5", "--resume", code=1)
    assert (
        "--resume 'runs/model': --momentum 0.5 (the run was started without it): a run goes on as it was started" in result.stderr
    )


@pytest.mark.slow
@pytest.mark.usefixtures("frequent_rows")
def test_a_run_that_starts_from_another_has_the_whole_schedule(run, folder):
    run(*TRAIN, "--epochs", "2")
    checkpoint = "runs/model/checkpoints/latest.safetensors"
    run(*TRAIN, "--start-from", checkpoint, "--lr", "0.5", "--schedule", "linear", "--warmup", "1", "-o", "second")
    assert rates(folder / "second") == pytest.approx([0.25, 0.5, 0.25])
    run(*TRAIN, "--start-from", "runs/model", "--lr", "0.5", "--schedule", "linear", "--warmup", "1", "-o", "third")
    assert rates(folder / "third") == rates(folder / "second")
    # It resumes in the same schedule: that begins after the steps of the run that it started from.
    more = ("--lr", "0.5", "--schedule", "inverse_square_root", "--warmup", "1", "--epochs", "2")
    run(*TRAIN, "--start-from", "runs/model", *more, "-o", "whole", "--checkpoint-every", "2", "--keep-checkpoints", "9")
    shutil.copytree(folder / "whole", folder / "cut")
    for path in (folder / "cut/checkpoints").glob("*.safetensors"):
        if path.name != "step-00000008.safetensors":
            path.unlink()
    run(*TRAIN, *more, "-o", "cut", "--resume")
    assert rates(folder / "cut") == rates(folder / "whole")
    assert (folder / "cut/tuned.onnx").read_bytes() == (folder / "whole/tuned.onnx").read_bytes()
    message = run(*TRAIN, "--start-from", "runs", "-o", "fourth", code=1).stderr
    assert "There is no checkpoint 'runs/checkpoints/latest.safetensors'" in " ".join(message.split())


@pytest.mark.slow
@pytest.mark.usefixtures("frequent_rows")
def test_a_damaged_checkpoint_does_not_keep_a_run_from_another_schedule(run, folder):
    run(*TRAIN, "--schedule", "linear", "--epochs", "2", "--keep-checkpoints", "2")
    latest = folder / "runs/model/checkpoints/latest.safetensors"
    latest.unlink()
    latest.write_bytes(b"half a file")
    text = run(*TRAIN, "--schedule", "linear", "--epochs", "3", "--resume").stdout
    assert "Passed over" in text
    assert rates(folder / "runs/model")[6:] == pytest.approx([0.1 * (9 - t) / 9 for t in range(6, 9)])


@pytest.mark.slow
def test_a_compiled_program_computes_its_rate(run, folder):
    run("compile", "model.onnx", "-o", "program", "--lr", "0.25", "--schedule", "polynomial", "--steps", "10", "--warmup", "4")
    signature = Program.load(folder / "program").signature["step"]
    assert signature.end == 10
    assert not signature.inputs_of(Role.HYPERPARAMETER)
    run("compile", "model.onnx", "-o", "warmed", "--warmup", "4")
    assert Program.load(folder / "warmed").signature["step"].end is None
    assert "polynomial" in run("inspect", "program").stdout


@pytest.mark.slow
def test_a_tuned_model_can_be_left_unfolded(run, folder):
    text = run(*TRAIN).stdout
    assert "the tuned model, after 3 steps; batch normalization is folded: to train it further, export with --no-fold" in text
    text = run(*TRAIN, "--overwrite", "--no-fold").stdout
    assert text.splitlines()[-1] == "runs/model/tuned.onnx: the tuned model, after 3 steps"
    assert "BatchNormalization" in {node.op_type for node in ir.load("runs/model/tuned.onnx").graph}
    assert "batch normalization is folded" in run("export", "runs/model", "-o", "folded.onnx").stdout


@pytest.mark.slow
def test_options_reach_the_program(run, folder):
    run(
        *TRAIN,
        *("--optimizer", "adamw", "--weight-decay", "0.1", "--trainable", "classifier.*", "--norm", "frozen"),
        *("--metrics", "accuracy,top_2", "--checkpoint-every", "1", "--schedule", "cosine", "--seed", "7"),
    )
    options = Program.load(folder / "runs/model/program").options
    assert options["optimizer"]["name"] == "adamw"
    assert options["optimizer"]["weight_decay"] == 0.1
    assert options["trainable"] == ["classifier.weight", "classifier.bias"]
    assert options["norm"] == "frozen"
    assert options["metrics"] == ["accuracy", "top_2"]
    header = (folder / "runs/model/metrics.csv").read_text().splitlines()[0]
    assert header == "step,epoch,samples,seconds,lr,loss,accuracy,top_2,eval_loss,eval_accuracy,eval_top_2"


@pytest.mark.slow
def test_precision_reaches_the_program(run, folder):
    run("compile", "model.onnx", "-o", "half", "--precision", "float16")
    assert Program.load(folder / "half").options["precision"]["dtype"] == "float16"
    result = run("compile", "model.onnx", "-o", "other", "--precision", "int8", code=1)
    assert "precision: unknown 'int8'; choose among 'float32', 'float16', 'bfloat16'" in result.stdout + result.stderr


@pytest.mark.slow
def test_sgd_has_momentum_unless_told_otherwise(run, folder):
    run("compile", "model.onnx", "-o", "usual")
    run("compile", "model.onnx", "-o", "none", "--momentum", "0", "--norm", "*=train")
    assert Program.load(folder / "usual").options["optimizer"]["momentum"] == 0.9
    assert Program.load(folder / "none").options["optimizer"]["momentum"] == 0.0
    assert Program.load(folder / "none").options["norm"] == {"*": "train"}


@pytest.mark.slow
def test_from_scratch(run, folder):
    run(*TRAIN, "--reinitialize", "kaiming", "--lr", "0", "--trainable", "classifier.weight")
    before = {value.name: value.const_value.numpy() for value in ir.load("model.onnx").graph.initializers.values()}
    after = {value.name: value.const_value.numpy() for value in ir.load("runs/model/tuned.onnx").graph.initializers.values()}
    assert not np.array_equal(before["classifier.weight"], after["classifier.weight"])


def write_dense_model(path: Path) -> None:
    graph = ir.Graph(
        [ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 2]))],
        [],
        nodes=[],
        opset_imports={"": 18},
        name="dense",
    )
    builder = Builder(graph)
    weight = ir.Value(
        name="weight",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape([2, 2]),
        const_value=ir.tensor(np.eye(2, dtype=np.float32), name="weight"),
    )
    graph.register_initializer(weight)
    logits = builder.op("MatMul", builder.tensor(graph.inputs[0]), builder.tensor(weight))
    logits.value.name = "logits"
    graph.outputs.append(logits.value)
    ir.save(ir.Model(graph, ir_version=8), path)


@pytest.mark.slow
def test_the_column_that_is_taken_for_the_label_is_named(run, folder):
    write_dense_model(folder / "dense.onnx")
    (folder / "data.csv").write_text("a;b;kind\n1;2;0\n3;4;1\n")
    text = run("train", "dense.onnx", "--data", "data.csv").stdout
    assert "data.csv: no column is called label, y or target; 'kind', the last, is taken for the label (--label: another)" in text
    text = run("train", "dense.onnx", "--data", "data.csv", "--label", "kind", "--overwrite").stdout
    assert "no column is called" not in text
    (folder / "wide.csv").write_text("a\tb\tc\tkind\n1\t2\t3\t0\n")
    result = run("train", "dense.onnx", "--data", "wide.csv", "-o", "wide", code=1)
    assert "wide.csv (with the last column, 'kind', as label): 'x' wants samples of shape [2]" in result.stderr


@pytest.mark.slow
def test_tables_and_class_names(run, folder):
    write_dense_model(folder / "dense.onnx")
    (folder / "train.csv").write_text("species,a,b\nemu,1,2\nant,3,4\nemu,5,6\n")
    (folder / "test.csv").write_text("species,a,b\nemu,1,2\n")
    result = run(
        *("train", "dense.onnx", "--data", "train.csv", "--eval-data", "test.csv", "--label", "species", "--lr", "0.001")
    )
    assert "train.csv: 3 samples of 2 classes; test.csv: 1 sample to evaluate on" in result.stdout
    assert json.loads((folder / "runs/dense/run.json").read_text())["classes"] == ["ant", "emu"]


@pytest.mark.slow
def test_compile_writes_the_program(run, folder):
    result = run("compile", "model.onnx", "-o", "program")
    written = {path.name for path in (folder / "program").glob("*.onnx")}
    assert sorted(name for name in written if not name.endswith(".semantic.onnx")) == [
        f"{name}.onnx" for name in ("apply", "evaluate", "grad", "init", "predict", "source", "step")
    ]
    assert "step.onnx" in result.stdout
    onnx.checker.check_model(folder / "program/step.onnx")


@pytest.mark.slow
def test_export_from_a_run_or_a_checkpoint(run, folder):
    run(*TRAIN, "--epochs", "2", "--eval-data", "data.npz")
    run("export", "runs/model", "-o", "latest.onnx")
    assert (folder / "latest.onnx").read_bytes() == (folder / "runs/model/tuned.onnx").read_bytes()
    run("export", "runs/model/checkpoints/latest.safetensors", "-o", "same.onnx")
    assert (folder / "same.onnx").read_bytes() == (folder / "latest.onnx").read_bytes()
    result = run("export", "runs/model", "--best", "--no-fold", "-o", "best.onnx")
    assert re.search(r"best\.onnx: the model after \d steps", result.stdout)
    operators = {node.op_type for node in ir.load("best.onnx").graph}
    assert "BatchNormalization" in operators
    assert "BatchNormalization" not in {node.op_type for node in ir.load("latest.onnx").graph}
    run("export", "runs/model", "--no-fold", "-o", "unfolded.onnx")
    np.testing.assert_allclose(
        predictions(folder / "unfolded.onnx", images()), predictions(folder / "latest.onnx", images()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_programs_and_runs_as_one_onnx_file(run, folder):
    result = run("compile", "model.onnx", "-o", "program.onnx")
    assert "inference with training_info" in result.stdout
    assert burnish.Program.load(folder / "program.onnx").saved_state["step"] == 0
    run(*TRAIN, "--epochs", "2")
    result = run("export", "runs/model", "--training", "-o", "trained.onnx")
    steps = int(re.search(r"trained\.onnx: the model and its training after (\d+) steps", result.stdout)[1])
    program = burnish.Program.load(folder / "trained.onnx")
    assert program.saved_state["step"] == steps > 0
    session = burnish.Session(program, state=program.saved_state)
    logits = session.predict({"x": images()})["logits"]
    np.testing.assert_allclose(predictions(folder / "trained.onnx", images()), logits, rtol=1e-4, atol=1e-5)


@spread(
    ("arguments", "message"),
    [
        (("inspect", "missing.onnx"), r"missing\.onnx"),
        (("inspect", "data.npz"), r"data\.npz"),
        (
            ("train", "model.onnx", "--data", "missing.npz"),
            r"missing\.npz: no such file or folder; check the path\. Data are digits",
        ),
        (("train", "model.onnx", "--data", "model.onnx"), r"burnish does not read '\.onnx' files"),
        (("train", "model.onnx", "--data", "digits"), r"'x' wants samples of shape \[1, 4, 4\], .* have shape \[8, 8\]"),
        (("train", "model.onnx", "--data", "data.npz", "--loss", "hunge"), r"there is no loss 'hunge'"),
        (("train", "model.onnx", "--data", "data.npz", "--optimizer", "tiger"), r"there is no optimizer 'tiger'"),
        (("train", "model.onnx", "--data", "data.npz", "--trainable", "stem.conv"), r"'stem\.conv' matches no weight"),
        (("train", "model.onnx", "--data", "data.npz", "--engine", "abacus"), r"There is no engine 'abacus'"),
        (
            ("evaluate", "model.onnx", "data.npz", "--engine", "torch", "--kernels"),
            r"are for --engine onnxruntime, not for 'torch'",
        ),
        ((*TRAIN, "--engine", "torch", "--no-kernels"), r"are for --engine onnxruntime, not for 'torch': leave them out"),
        (
            ("train", "model.onnx", "--data", "data.npz", "--schedule", "stairs"),
            r"no learning-rate schedule 'stairs'.*; choose among constant, cosine, ",
        ),
        ((*TRAIN, "--schedule", "cosin"), r"no learning-rate schedule 'cosin' \(did you mean 'cosine'\?\)"),
        (
            (*TRAIN, "--schedule", "step:evry=2"),
            r"'step' has no option 'evry' \(did you mean 'every'\?\); it takes lr, every, gamma",
        ),
        ((*TRAIN, "--schedule", "constant:steps=2"), r"'constant' has no option 'steps'; it takes lr"),
        ((*TRAIN, "--schedule", "exponential"), r"'exponential' needs the option 'gamma': give it"),
        (("train", "model.onnx", "--data", "data.npz", "--resume"), r"There is nothing to resume in 'runs/model'"),
        (("check", "model.onnx", "--outputs", "scores"), r"outputs: the model has no output 'scores'; it has 'logits'"),
        (("compile", "model.onnx", "-o", "program", "--norm", "whiten"), r"there is no norm policy 'whiten'"),
        (("export", "runs/none", "-o", "x.onnx"), r"'runs/none': there is no such run or checkpoint"),
        (("export", "data.npz", "-o", "x.onnx"), r"The program of 'data\.npz' is not beside it"),
        (("export", ".", "-o", "x.onnx"), r"holds no latest\.safetensors: the run has not saved anything yet"),
    ],
    test=6,
)
def test_an_error_is_one_message_without_a_traceback(run, arguments, message):
    result = run(*arguments, code=1)
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_momentum_reaches_every_optimizer_that_has_one(run, folder):
    run("compile", "model.onnx", "-o", "program", "--optimizer", "rmsprop", "--momentum", "0.5")
    assert Program.load(folder / "program").options["optimizer"]["momentum"] == 0.5


@pytest.mark.slow
def test_settings_of_an_optimizer_stand_behind_its_name(run, folder):
    run("compile", "model.onnx", "-o", "program", "--optimizer", "sgd:nesterov=true", "--lr", "0.2")
    options = Program.load(folder / "program").options["optimizer"]
    assert (options["nesterov"], options["momentum"], options["lr"]) == (True, 0.9, 0.2)


@pytest.mark.slow
def test_debug_raises_the_error_itself_wherever_it_stands(run):
    for arguments in (
        ("--debug", "compile", "model.onnx", "-o", "program", "--norm", "whiten"),
        ("compile", "model.onnx", "-o", "program", "--norm", "whiten", "--debug"),
    ):
        result = run(*arguments, code=1)
        assert isinstance(result.exception, ConfigurationError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "model.onnx"), "Missing option '--data'"),
        (("train", "--data", "digits"), "Missing argument 'MODEL'"),
        (("paint", "model.onnx"), "No such command 'paint'"),
        ((*TRAIN, "--epochs", "0"), "Invalid value for '--epochs'"),
        ((*TRAIN, "--epochs", "many"), "Invalid value for '--epochs'"),
        ((*TRAIN, "--optimizer", "adam", "--momentum", "0.9"), "adam takes no --momentum"),
        ((*TRAIN, "--optimizer", "adamw:lr=0.1", "--lr", "0.2"), "--lr and 'adamw:lr=0.1' both give the lr of adamw"),
        ((*TRAIN, "--optimizer", "adagrad", "--momentum", "0.9", "--weight-decay", "0.1"), "adagrad takes no --momentum"),
        ((*TRAIN, "--resume", "--overwrite"), "--resume goes on with a run"),
        (
            (*TRAIN, "--schedule", "cosine", "--warmup", "3"),
            "--schedule cosine has 3 steps, 3 of them for the warm-up: give fewer",
        ),
        ((*TRAIN, "--schedule", "step:lr=0.1,every=2"), "--schedule step:lr=0.1,every=2: give the rate with --lr"),
        (
            (*TRAIN, "--lr", "0.1", "--schedule", "piecewise:boundaries=[2],rates=[0.2,0.1]"),
            "--lr: piecewise has rates of its own; leave it out",
        ),
        ((*TRAIN, "--schedule", "one_cycle", "--warmup", "1"), "--warmup: one_cycle begins with a warm-up of its own"),
        (
            ("compile", "model.onnx", "-o", "program", "--schedule", "linear"),
            "--schedule linear needs to know its steps: give --steps",
        ),
        (("compile", "model.onnx", "-o", "program", "--steps", "9"), "--steps is for a --schedule that has an end"),
        ((*TRAIN, "--norm", "train", "--norm", "frozen"), "'train': with several --norm, each is PATTERN=POLICY"),
        (("export", "data.npz", "--best", "-o", "x.onnx"), "--best chooses among the checkpoints of a run"),
    ],
)
def test_wrong_usage_exits_with_2(run, arguments, message):
    assert message in run(*arguments, code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [(), ("--no-kernels",)], ids=["by default", "no kernels"])
def test_a_loss_that_is_not_finite(run, folder, kernels):
    arrays = dict(np.load("data.npz"))
    np.savez("data.npz", x=arrays["x"] * np.float32(1e37), y=arrays["y"])
    result = run(*TRAIN, *kernels, code=1)
    assert re.search(r"error: .*Training stopped in epoch 1, batch \d", result.stderr, re.DOTALL)
    assert "The run begins with it, before a step is taken, so that no learning rate changes it" in result.stderr


def test_version(run):
    assert run("--version").stdout == f"burnish {burnish.__version__}\n"


@pytest.mark.slow
def test_demo_in_small(run, folder, curves):
    result = run("demo", "--epochs", "1", "--width", "2", "-o", "runs/small")
    counts = re.findall(r"(\d+)/360 = ", result.stdout)
    assert len(counts) == 2
    assert counts[0] == counts[1]
    assert "They agree." in result.stdout
    assert {"metrics.csv", "curves.png", "tuned.onnx", "checkpoints"} <= {path.name for path in (folder / "runs/small").iterdir()}
    run("export", "runs/small", "-o", "again.onnx")
    assert (folder / "again.onnx").read_bytes() == (folder / "runs/small/tuned.onnx").read_bytes()


@pytest.mark.slow
def test_a_demo_whose_counts_differ_fails(run, monkeypatch):
    monkeypatch.setattr("burnish.cli.demo.right_by_onnxruntime", lambda *arguments: 7)
    monkeypatch.setattr("burnish.training.Trainer.run", lambda self: None)
    result = run("demo", "--epochs", "1", "--width", "2", code=1)
    assert re.search(r"is right 7 times and the session \d+ times, of 360: they have to agree", result.stderr)


@pytest.mark.slow
def test_the_option_tables_name_every_option_once(run):
    text = run("train", "--help-all").stdout
    for option in "data eval-data loss optimizer lr momentum weight-decay epochs batch-size trainable norm metrics seed".split():
        assert len(re.findall(rf"--{option}\b(?!-)", text)) >= 1, option


def test_names_are_printed_as_they_are(capsys):
    output().print("a:x:b [red]c")
    assert capsys.readouterr().out == "a:x:b [red]c\n"


@pytest.mark.slow
def test_a_resumed_run_takes_the_options_that_it_was_started_with(run, folder):
    options = ("--lr", "0.05", "--optimizer", "adam", "--eval-data", "data.npz", "--norm", "frozen", "--seed", "3")
    run(*TRAIN, *options, "--epochs", "2", "-o", "whole")
    run(*TRAIN, *options, "--epochs", "1", "-o", "parts")
    text = run("train", "model.onnx", "-o", "parts", "--resume", "--epochs", "2").stdout
    assert "epoch 2/2" in text
    assert "is taken from here on" not in text
    assert (folder / "parts/tuned.onnx").read_bytes() == (folder / "whole/tuned.onnx").read_bytes()
    assert "epoch 3/3" in run("train", "-o", "parts", "--resume", "--epochs", "3").stdout  # and the model with them
    written = tomllib.loads((folder / "parts/run.toml").read_text())["train"]
    assert written["epochs"] == 3
    assert written["norm"] == ["frozen"]


@pytest.mark.slow
def test_an_option_that_a_run_was_started_otherwise_with_is_named(run, folder):
    run(*TRAIN, "--epochs", "1", "-o", "run", "--optimizer", "sgd", "--momentum", "0.5")
    text = run("train", "-o", "run", "--resume", "--epochs", "2", "--momentum", "0.9", code=1).stderr
    assert " ".join(text.split()) == (
        "error: --resume 'run': --momentum 0.9 (the run was started with 0.5): a run goes on as it was started: leave it out, or "
        "begin another in its state: --start-from run"
    )
    text = run("train", "-o", "run", "--resume", "--batch-size", "4", "--norm", "frozen", code=1).stderr
    assert (
        "--norm frozen (the run was started without it); --batch-size 4 (the run was started with 8): a run goes on"
        in " ".join(text.split())
    )
    text = run("train", "other.onnx", "-o", "run", "--resume", code=1).stderr
    assert "there is no file 'other.onnx'" in text
    text = run("train", "-o", "run", "--resume", "--epochs", "2", "--threads", "2").stdout
    assert "taken from here on: --threads 2 (the run was started with 1)" in text


@pytest.mark.slow
def test_nothing_of_a_run_of_another_command_is_left_where_it_is_overwritten(run, folder):
    tune = ("finetune", "model.onnx", "--data", "data.npz", "--epochs", "2", "--lr", "0.01", "-o", "run", "--threads", "1")
    run(*tune, "--unfreeze", "1")
    assert {"finetune.json", "start.onnx", "stages"} <= {path.name for path in (folder / "run").iterdir()}
    run(*TRAIN, "--epochs", "1", "-o", "run", "--overwrite")
    left = {path.name for path in (folder / "run").iterdir()}
    assert left.isdisjoint({"finetune.json", "start.onnx", "stages"})
    assert {"tuned.onnx", "run.toml", "metrics.csv"} <= left
    run(*tune, "--overwrite")
    run("train", "run/start.onnx", *TRAIN[2:], "--epochs", "1", "-o", "run", "--overwrite")
    assert (folder / "run" / "start.onnx").is_file()  # which it trained
    assert not (folder / "run" / "finetune.json").exists()


@pytest.mark.parametrize(
    "command",
    [("predict", "run", "data.npz", "-o"), (*TRAIN, "--export"), ("quantize", "model.onnx", "--data", "data.npz", "-o")],
)
def test_data_are_not_overwritten(run, folder, command):
    linked = folder / ("data.npz" if command[0] != "quantize" else "data.onnx")
    if not linked.exists():
        linked.symlink_to("data.npz")
    before = (folder / "data.npz").read_bytes()
    text = run(*command, linked.name, code=1).stderr
    assert f"'{linked.name}' is read, and would be overwritten: give the name of another file" in text
    assert (folder / "data.npz").read_bytes() == before


@pytest.mark.parametrize(
    "command",
    [
        (*TRAIN, "--export"),
        ("finetune", "model.onnx", "--data", "data.npz", "--export"),
        ("quantize", "model.onnx", "--data", "data.npz", "-o"),
        ("compile", "model.onnx", "-o"),
        ("compare", "model.onnx", "--json"),
    ],
)
def test_a_model_is_not_overwritten_by_what_is_made_of_it(run, folder, command):
    before = (folder / "model.onnx").read_bytes()
    text = run(*command, "model.onnx", code=1).stderr
    assert "'model.onnx' is read, and would be overwritten: give the name of another file" in text
    assert (folder / "model.onnx").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("command", [("export", "run", "-o"), ("report", "run", "-o")])
def test_what_a_run_was_made_of_is_not_overwritten(run, folder, command):
    run(*TRAIN, "--epochs", "1", "-o", "run")
    latest = "run/checkpoints/latest.safetensors"
    before = {name: (folder / name).read_bytes() for name in ("model.onnx", "data.npz", latest)}
    for name in [*before] if command[0] == "export" else ["model.onnx", "data.npz"]:
        text = run(*command, name, code=1).stderr
        assert f"'{name}' is read, and would be overwritten: give the name of another file" in text
    assert before == {name: (folder / name).read_bytes() for name in before}


PLACES = [
    (*TRAIN, "--export"),
    (*TRAIN, "--report"),
    ("export", "run", "-o"),
    ("predict", "run", "data.npz", "-o"),
    ("evaluate", "run", "data.npz", "-o"),
    ("report", "run", "-o"),
    ("compile", "model.onnx", "-o"),
    ("quantize", "model.onnx", "--data", "data.npz", "-o"),
    ("compare", "model.onnx", "--json"),
]


@pytest.mark.slow
@pytest.mark.parametrize("command", PLACES, ids=lambda command: command[0] + command[-1])
def test_a_place_for_a_result_is_checked_before_any_work(run, folder, command):
    """A folder in place of a file, and a place inside of a file."""
    run(*TRAIN, "-o", "run")
    ending = {"predict": ".csv", "evaluate": ".csv", "report": ".html"}.get(command[0], ".onnx")
    (folder / f"taken{ending}").mkdir()
    message = run(*command, f"taken{ending}", code=1).stderr
    assert f"{command[-1].replace('-o', '--output')}: 'taken{ending}' is a folder: give the name of a file" in message
    assert (folder / f"taken{ending}").is_dir()
    message = run(*command, f"data.npz/result{ending}", code=1).stderr
    assert "data.npz' is a file, and no folder" in message or "Not a directory" in message
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_the_results_of_a_run_that_is_overwritten_are_removed_and_nothing_else(run, folder, curves):
    pytest.importorskip("tensorboardX")
    options = ("--report", "run/first.html", "--profile", "--log", "tensorboard", "--tensorboard", "run/more")
    run(*TRAIN, "-o", "run", *options)
    for name in ("notes.txt", "events/mine.txt", "other.html"):
        (folder / "run" / name).write_text("mine")
    before = {path.relative_to(folder / "run") for path in (folder / "run").rglob("*") if path.is_file()}
    assert Path("first.html") in before
    assert Path("profile.csv") in before
    run(*TRAIN, "-o", "run", "--lr", "1e30", "--overwrite", code=1)
    after = {str(path.relative_to(folder / "run")) for path in (folder / "run").rglob("*") if path.is_file()}
    assert {"notes.txt", "events/mine.txt", "other.html"} <= after
    assert not after & {"first.html", "profile.csv", "profile.trace.json", "tuned.onnx", "checkpoints/best.safetensors"}
    assert not [name for name in after if "tfevents" in name]


@pytest.mark.slow
def test_a_full_disk_is_one_line_whatever_is_written(run, folder, monkeypatch):
    """At any file of a run: no traceback, and nothing half written."""
    flushed = file_writing.flush_to_disk
    for number in range(100):
        left = number

        def fill(path: Path) -> None:
            nonlocal left
            left -= not path.is_dir()
            if left < 0 and not path.is_dir():
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            flushed(path)

        monkeypatch.setattr(file_writing, "flush_to_disk", fill)
        result = CliRunner().invoke(app, [*TRAIN, "-o", str(number), "--epochs", "2"])
        assert not list((folder / str(number)).rglob("*.partial"))
        if result.exit_code == 0:
            break
        assert isinstance(result.exception, SystemExit)
        assert "No space left on device" in result.stderr
        first, *details = result.stderr.strip().splitlines()
        assert all(line.startswith("  ") for line in details), result.stderr
        assert first.startswith("error: ")
    assert number > 6
    assert (folder / str(number) / "tuned.onnx").is_file()


@pytest.mark.slow
def test_names_that_are_no_utf8_do_no_harm(run, folder):
    odd = os.fsdecode(b"d\xff.npz")
    os.replace("data.npz", odd)
    run("train", "model.onnx", "--data", odd, "-o", "run", "--threads", "1", "--batch-size", "8")
    assert "d\\\\udcff.npz" in (folder / "run/run.toml").read_text(encoding="utf-8")
    assert "epoch 2/2" in run("train", "-o", "run", "--resume", "--epochs", "2").stdout
    run("report", "run")
    run("predict", "run", odd, "-o", os.fsdecode(b"out\xfe.csv"))


@pytest.mark.slow
def test_fewer_classes_than_outputs_are_said_and_named(run, folder):
    ir.save(residual_network((1, 4, 4), classes=10, width=2, blocks=(1,)), folder / "model.onnx")
    arrays = np.load("data.npz")
    np.savez("data.npz", x=arrays["x"], y=np.array(["ant", "bee", "cat"])[arrays["y"]])
    with pytest.warns(ObjectiveWarning, match="the model has outputs for 10 classes, and the data have 3 classes: .*finetune"):
        run(*TRAIN, "-o", "run", "--epochs", "9", "--lr", "0.05")
    said = run("predict", "run", "data.npz", "--top", "10").stdout
    line = next(line for line in said.splitlines() if line.startswith("0 "))
    assert {"ant", "bee", "cat", "3", "9"} <= set(line.split())
