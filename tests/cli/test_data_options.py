"""Options that have a meaning for some kinds of data alone."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

TRAIN = ("train", "model.onnx", "--threads", "1", "--batch-size", "5")


@pytest.fixture
def images(folder):
    image = pytest.importorskip("PIL.Image")
    for name in ("a", "b", "c"):
        (folder / "images" / name).mkdir(parents=True)
        image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / "images" / name / "0.png")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            (*TRAIN, "--data", "data.npz", "--label", "y"),
            "--label y names the column of a table (.csv, .parquet) that holds the labels, and 'data.npz' is an .npz file, whose "
            "labels are the array y",
        ),
        (
            (*TRAIN, "--data", "images", "--label", "y"),
            "and 'images' is a folder of images, whose classes are its subfolders: leave it out",
        ),
        (
            (*TRAIN, "--data", "data.npz", "--image-size", "4", "4"),
            "--image-size is what the files in a folder of images are resized to, and 'data.npz' is an .npz file, whose samples "
            "have a shape already: leave it out",
        ),
        (
            ("compare", "model.onnx", "--label", "y"),
            "--label y names the column of a table that holds the labels, and no data are",
        ),
        (("compare", "model.onnx", "--data", "data.npz", "--label", "y"), "'data.npz' is an .npz file"),
        (
            (*TRAIN, "--data", "data.npz", "--missing", "drop"),
            "--missing drop is for rows of a table (.csv, .parquet), and 'data.npz' is an .npz file: leave it out",
        ),
        (("evaluate", "model.onnx", "images", "--missing", "drop"), "and 'images' is a folder of images: leave it out"),
        (
            (*TRAIN, "--data", "data.npz", "--columns", "standardize"),
            "--columns standardize is for a table (.csv, .parquet), and 'data.npz' is an .npz file: leave it out",
        ),
        ((*TRAIN, "--data", "data.npz", "--batch-size", "1_0"), "'1_0' is no number in the digits 0 to 9"),
        ((*TRAIN, "--data", "data.npz", "--output", ""), "Invalid value for '--output': it is empty: give a value, or"),
        ((*TRAIN, "--data", " "), "Invalid value for '--data': it is empty: give a value, or leave it out"),
        (("inspect", ""), "Invalid value for 'MODEL': it is empty: give a value"),
        ((*TRAIN, "--data", "images", "--image-size", "4", "1_6"), "'1_6' is no number in the digits 0 to 9"),
        ((*TRAIN, "--data", "data.npz", "--sample-axis", "²"), "--sample-axis ²: write NAME=AXIS"),
        (
            (*TRAIN, "--data", "data.npz", "--worker-timeout", "5"),
            "--worker-timeout says how long workers wait for each other, and one alone trains here",
        ),
    ],
)
def test_options_without_a_meaning_are_refused(run, images, command, message):
    assert message in " ".join(run(*command, code=2).output.replace("│", " ").split())


@pytest.mark.parametrize("command", ["train", "finetune", "predict"])
def test_a_pipe_as_data_is_named(run, folder, command):
    os.mkfifo(folder / "pipe")
    given = ("pipe",) if command == "predict" else ("--data", "pipe")
    assert "error: pipe: it is a pipe or a device" in run(command, "model.onnx", *given, code=1).output


@pytest.mark.slow
def test_a_label_for_one_of_two_kinds_of_data_is_taken(run, folder):
    arrays = np.load("data.npz")
    rows = ["kind," + ",".join(f"p{index}" for index in range(16))]
    rows += [f"{label}," + ",".join(map(str, image.reshape(-1))) for label, image in zip(arrays["y"], arrays["x"], strict=True)]
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    of_table = run(*TRAIN, "--data", "table.csv", "--label", "kind", "--eval-data", "data.npz", "--output", "of_table")
    of_arrays = run(*TRAIN, "--data", "data.npz", "--eval-data", "data.npz", "--output", "of_arrays")
    evaluated = re.findall(r"evaluation loss \S+ accuracy \S+", of_table.stdout)
    assert len(evaluated) == 1
    assert evaluated == re.findall(r"evaluation loss \S+ accuracy \S+", of_arrays.stdout)


@pytest.mark.slow
def test_another_size_than_the_model_s_is_refused(run, images):
    result = run(*TRAIN, "--data", "images", "--image-size", "8", "8", code=1)
    assert "takes images of 4 x 4, and --image-size says 8 x 8: leave it out" in result.output
    run(*TRAIN, "--data", "images", "--image-size", "4", "4")
