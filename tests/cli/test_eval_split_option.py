"""``--eval-split`` of the commands that train: what is printed and kept, stages, resuming, several workers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from burnish.training import read_checkpoint
from oracles.same_state import assert_same_state


def held(folder: str) -> dict[str, object]:
    return json.loads(Path(folder, "split.json").read_text())


def write_table(count: int = 40) -> None:
    generator = np.random.default_rng(0)
    rows = [f"{','.join(f'{value:.3f}' for value in generator.normal(size=16))},p{row // 4},{row % 3}" for row in range(count)]
    Path("table.csv").write_text("\n".join([",".join([*(f"f{place}" for place in range(16)), "patient", "label"]), *rows]))


def test_train_says_what_is_held_out_and_goes_on_with_it(run, folder):
    course = "train model.onnx --data data.npz --lr 0.01 --batch-size 4 --eval-split 0.25 -o run".split()
    result = run(*course, "--epochs", "2")
    assert "data.npz: 15 samples to train on, 5 to evaluate on" in result.output
    assert "held out 5 of 20 samples (stratified by 'y', seed 0)" in result.output
    assert "evaluation loss" in result.output
    assert len(held("run")["evaluation"]) == 5
    run(*course, "--epochs", "3", "--resume")
    run(*course[:-1], "whole", "--epochs", "3")
    assert held("whole") == held("run")
    first, second = (read_checkpoint(f"{name}/checkpoints/latest.safetensors").state for name in ("run", "whole"))
    assert_same_state(first, second)
    resumed = run("train", "model.onnx", "--resume", "-o", "run", "--epochs", "4")  # the option is that of the run
    assert "held out 5 of 20 samples" in resumed.output


def test_groups_of_a_table_are_no_feature(run, folder):
    write_table()
    result = run(*"train model.onnx --data table.csv --lr 0.01 --eval-split group:patient:0.3 -o run".split())
    assert "held out 12 of 40 samples (3 of 10 groups by 'patient', stratified by 'label', seed 0)" in result.output
    assert len(held("run")["groups"]) == 3
    judged = run("evaluate", "run", "table.csv")  # with the column of groups in it
    assert "table.csv: 40 samples" in judged.output
    assert "columns: read by their names: 'f0', 'f1'" in run("inspect", "run/tuned.onnx").output


def test_finetune_holds_out_the_same_part_in_each_stage(run, folder):
    course = "finetune model.onnx --data data.npz --lr 0.01 --epochs 3 --unfreeze 1,2 --eval-split 0.25 --seed 2 -o run".split()
    result = run(*course)
    assert result.output.count("held out 5 of 20 samples (stratified by 'y', seed 2)") >= 1
    assert held("run") == held("run/stages/1") == held("run/stages/2")
    assert "the best" in result.output
    record = json.loads(Path("run/run.json").read_text())
    assert record["result"]["tuned"]["data"] == "evaluation"
    resumed = run(*course, "--resume")
    assert "already finished" in resumed.output


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_evaluate_without_data_takes_what_the_run_held_out(run, folder, command):
    write_table()
    Path("table.csv").write_text(Path("table.csv").read_text().replace("f3,", "class,", 1).replace("label", "f3", 1))
    course = f"{command} model.onnx --data table.csv --label f3 --lr 0.01 --epochs 2 --eval-split group:patient:0.3 -o run"
    trained = run(*course.split())
    judged = run("evaluate", "run", *(["--latest"] if command == "train" else []))
    assert "table.csv: 12 samples" in judged.output
    assert "held out 12 of 40 samples (3 of 10 groups by 'patient', stratified by 'f3', seed 0)" in judged.output
    loss = next(line.split()[1] for line in judged.output.splitlines() if line.startswith("loss"))
    assert f"evaluation loss {loss}" in trained.output


def test_a_run_with_data_to_evaluate_on_is_judged_on_them(run, folder):
    data = np.load("data.npz")
    np.savez("other.npz", **{name: data[name][:6] for name in data})
    trained = run(*"train model.onnx --data data.npz --eval-data other.npz --lr 0.01 --epochs 1 -o run".split())
    judged = run("evaluate", "run")
    assert "other.npz: 6 samples" in judged.output
    loss = next(line.split()[1] for line in judged.output.splitlines() if line.startswith("loss"))
    assert f"evaluation loss {loss}" in trained.output
    assert "judged on other.npz" in run("report", "run").output


def test_a_report_judges_a_run_on_what_it_held_out(run, folder):
    run(*"train model.onnx --data data.npz --lr 0.01 --epochs 1 --eval-split 0.25 -o run".split())
    assert "judged on data.npz, held out 5 of 20 samples (stratified by 'y', seed 0)" in run("report", "run").output
    assert "data.npz, held out 5 of 20 samples" in Path("run/report.html").read_text(encoding="utf-8")


def test_evaluate_says_what_of_the_data_was_trained_on(run, folder):
    run(*"train model.onnx --data data.npz --lr 0.01 --eval-split 0.25 -o run".split())
    judged = run("evaluate", "run", "data.npz")
    assert "the run was trained on most of data.npz, and held out 5 of 20 samples" in judged.output
    run(*"train model.onnx --data data.npz --lr 0.01 -o other".split())
    assert "trained on most of" not in run("evaluate", "other", "data.npz").output
    refused = run("evaluate", "other", code=1)
    assert "'other' has no data to evaluate on (eval_split, --eval-split, --eval-data): name labelled data" in refused.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--eval-split 0", "eval_split='0' (--eval-split): a share that leaves samples on both sides lies between 0 and 1"),
        ("--eval-split 1.5", "eval_split='1.5' (--eval-split): a share that leaves samples on both sides lies between 0 and 1"),
        (
            "--eval-split group:nothing",
            "no column 'nothing' to take groups from (eval_split); there are 'x' [20, 4, 4], 'y'",
        ),
        ("--eval-split 0.2 --eval-data data.npz", "eval_split (--eval-split) holds out a part of the training data for that"),
    ],
)
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_what_is_refused(run, folder, command, options, message):
    result = run(command, "model.onnx", "--data", "data.npz", *options.split(), code=1)
    assert message in " ".join(result.output.split())


@pytest.mark.slow
def test_all_workers_hold_out_the_same_part(run, folder):
    write_table()
    course = "train model.onnx --data table.csv --lr 0.01 --engine torch --threads 1 --batch-size 8 --epochs 2"
    course += " --eval-split group:patient"
    run(*course.split(), "-o", "alone")
    run(*course.split(), "-o", "together", "--workers", "2")
    assert held("alone") == held("together")
    figures = [json.loads(Path(name, "run.json").read_text())["result"]["best"] for name in ("alone", "together")]
    assert figures[0]["value"] == pytest.approx(figures[1]["value"])
    run("train", "model.onnx", "-o", "together", "--resume", "--epochs", "3", "--workers", "2")
    assert held("alone") == held("together")
