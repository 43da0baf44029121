"""``--augment`` and ``--data-workers`` on the command line, with images that are damaged: the run goes on and says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import burnish


def write(folder):
    for label, name in enumerate(("dark", "dim", "light")):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.random.default_rng(number).integers(80 * label, 80 * label + 60, (8, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    (folder / "images" / "dim" / "2.png").write_bytes(b"no image")
    (folder / "images" / "light" / "0.png").write_bytes(b"")


@pytest.mark.slow
def test_a_folder_with_damaged_images_trains_on_changed_ones(folder, run):
    write(folder)
    options = ["--data", "images", "--batch-size", "4", "--epochs", "2", "--output", "run", "--data-workers", "1"]
    done = run("train", "model.onnx", *options, "--augment", "crop,flip,rand_augment")
    assert "1 of 12 images are empty files and left out: images/light/0.png" in done.output
    assert (
        done.output.count("1 of 11 images cannot be read, and others of their classes take their places: images/dim/2.png") == 1
    )
    assert "waiting for data: " in done.output
    done = run("train", "model.onnx", *options, "--augment", "flip", "--resume", "--epochs", "3", code=1)
    assert "augment" in done.output


@pytest.mark.slow
def test_mixed_images_are_tuned_on_shares_of_classes(folder, run):
    write(folder)
    options = [
        "--data",
        "images",
        "--eval-data",
        "images",
        "--batch-size",
        "4",
        "--epochs",
        "2",
        "--output",
        "run",
        "--lr",
        "0.01",
    ]
    done = run("finetune", "model.onnx", *options, "--augment", "mixup:0.4,cutmix")
    assert "accuracy" in done.output
    evaluated = run("evaluate", "run", "images")
    assert "accuracy" in evaluated.output
    done = run("train", "model.onnx", "--data", "images", "--output", "other", "--augment", "mixup", code=1)
    assert "take cross_entropy:probabilities=true (--loss cross_entropy:probabilities=true)" in done.output
    done = run("train", "model.onnx", "--data", "data.npz", "--output", "other", "--augment", "flip", code=1)
    assert "changes to image files as they are read, and the data are of type ArrayDataset" in done.output


@pytest.mark.slow
def test_ctrl_c_ends_reading_processes_and_saves_the_run(folder, run):
    """Sent to the whole group, as a terminal sends it."""
    write(folder)
    options = ["--data", "images", "--epochs", "100000", "--batch-size", "4", "--augment", "crop", "--data-workers", "2"]
    command = [sys.executable, "-m", "burnish", "train", "model.onnx", *options, "--engine", "onnxruntime", "--output", "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch"):
        assert process.poll() is None
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 2
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 130
    assert "resume, and training goes on as if it had not stopped" in output
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []


@pytest.mark.slow
def test_finetune_in_python_changes_images(folder):
    write(folder)
    tuned = burnish.finetune(
        folder / "model.onnx", folder / "images", epochs=1, lr=0.01, augment="crop,flip", data_workers=1, engine="onnxruntime"
    )
    assert tuned.result.steps == 2  # eleven images
    assert (folder / "tuned.onnx").is_file()
