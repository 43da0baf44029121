"""Folders of .wav files on the command line: what a run says and keeps of them, and a file that is predicted by it."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest


def write_sounds(count: int = 6) -> None:
    generator = np.random.default_rng(0)
    for name, frequency in (("high", 2000), ("low", 300), ("middle", 900)):
        for number in range(count):
            write(Path("sounds", name, f"{number}.wav"), frequency * generator.uniform(0.9, 1.1))


def write(path: Path, frequency: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = 0.5 * np.sin(2 * np.pi * frequency * np.arange(2000) / 8000)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())


LINE = (
    "sound: mono, 8,000 samples a second, cut or padded to 0.25 s; log-mel spectrogram: 4 bands from 100 to 4000 Hz, 4 frames, "
    "windows of 512 samples every 500"
)


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_a_run_keeps_what_it_does_to_sounds(run, folder, command):
    write_sounds()
    write(Path("one.wav"), 900)
    course = [command, *"model.onnx --data sounds --sound fmin=100 --eval-split 0.34 --lr 0.05 --epochs 2 -o run".split()]
    result = run(*course)
    assert LINE in result.output
    assert "sounds: 12 samples of 3 classes to train on, 6 to evaluate on" in result.output
    record = json.loads(Path("run/run.json").read_text())
    assert (record["sound"]["rate"], record["sound"]["hop"], record["classes"]) == (8000, 500, ["high", "low", "middle"])
    predicted = run("predict", "run", "one.wav")
    assert f"{LINE} (as recorded with the model)" in predicted.output
    assert "one.wav" in predicted.output.splitlines()[-1]
    of_file = run("predict", "run/tuned.onnx", "one.wav")
    assert of_file.output.splitlines()[-1].split()[:2] == predicted.output.splitlines()[-1].split()[:2]
    assert f"{LINE} (as recorded with the model)" in run("evaluate", "run", "sounds").output
    assert LINE in run("inspect", "run/tuned.onnx").output
    resumed = run(command, "model.onnx", "--resume", "-o", "run", "--epochs", "3")
    assert LINE in resumed.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data sounds --sound rat=8000", "sound has no option 'rat' (did you mean 'rate'?)"),
        ("--data sounds --sound bands=9", "sound: bands=9, and the model's input 'x' of shape [batch, 1, 4, 4] takes 4 bands"),
        (
            "--data data.npz --sound rate=8000",
            "holds no sounds, and sound (--sound) says what is done to .wav files",
        ),
        ("--data sounds --pixels unit", "--pixels"),
        ("--data sounds --eval-split group:speaker", "a folder of .wav files has no columns, and a group is the value of one"),
    ],
)
def test_what_is_refused(run, folder, options, message):
    write_sounds(2)
    result = run("train", "model.onnx", *options.split(), code=2 if "pixels" in options else 1)
    assert message in " ".join(result.output.split())


def test_a_file_that_is_cut_off(run, folder):
    write_sounds(2)
    run(*"train model.onnx --data sounds --lr 0.01 -o run".split())
    path = Path("sounds/low/0.wav")
    path.write_bytes(path.read_bytes()[:1000])
    result = run("predict", "run", str(path), code=1)
    assert "is cut off: its header says 4,000 bytes of sound, and 956 follow; fetch or write it again" in result.output
