"""Options that say what is done to pixels: stated, written down, kept by a resumed run, read again from an exported model."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from PIL import Image

from burnish.data import DataDescription
from burnish.data.preprocessing import Preprocessing, read_pixels
from burnish.models import residual_network
from burnish.training import read_checkpoint

TRAIN = ("train", "color.onnx", "--data", "images", "--threads", "1", "--batch-size", "4")
IMAGENET = "(pixel / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]"
CROPPED = "shorter side resized to 5 (bilinear), 4 x 4 cut out of the centre, RGB, NCHW"


@pytest.fixture
def images(folder):
    generator = np.random.default_rng(0)
    for level, name in enumerate(("ant", "bee", "cat")):
        (folder / "images" / name).mkdir(parents=True)
        for index in range(3):
            pixels = generator.integers(60 * level, 60 * level + 90, (7, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{index}.png")
    ir.save(residual_network((3, 4, 4), classes=3, width=2, blocks=(1,)), folder / "color.onnx")
    return folder


def described(path) -> DataDescription:
    return DataDescription.read({entry.key: entry.value for entry in onnx.load(path).metadata_props})


@pytest.mark.slow
def test_a_run_says_what_it_does_to_pixels(run, images):
    text = run(*TRAIN).stdout
    assert "pixels: resized to 4 x 4 (bilinear), RGB, NCHW, values pixel / 255 (--pixels for another, such as imagenet)\n" in text
    text = run(*TRAIN, "-o", "other", "--pixels", "imagenet").stdout
    assert f"pixels: {CROPPED}, values {IMAGENET}\n" in text


@pytest.mark.slow
def test_every_option_has_its_part(run, images):
    options = ("--pixel-scale", "1/127.5", "--pixel-mean", "1", "--pixel-std", "0.5,0.25,0.125", "--interpolation", "bicubic")
    more = ("--resize", "crop:6", "--channels", "bgr", "--layout", "NCHW")
    assert "shorter side resized to 6 (bicubic), 4 x 4 cut out of the centre, BGR" in run(*TRAIN, *options, *more).stdout
    known = described(images / "runs/color/tuned.onnx").preprocessing
    assert known == Preprocessing(
        scale=1 / 127.5,
        mean=(1.0,),
        std=(0.5, 0.25, 0.125),
        interpolation="bicubic",
        resize="crop",
        shorter_side=6,
        size=(4, 4),
        channels="bgr",
        layout="NCHW",
    )


@pytest.mark.slow
def test_what_was_done_is_written_down(run, images):
    run(*TRAIN, "--pixels", "imagenet")
    record = json.loads((images / "runs/color/run.json").read_text())
    expected = DataDescription(read_pixels(record["pixels"]), tuple(record["classes"]))
    assert expected.preprocessing.text() == f"{CROPPED}, values {IMAGENET}"
    assert expected.classes == ("ant", "bee", "cat")
    assert described(images / "runs/color/tuned.onnx") == expected
    assert DataDescription.read(read_checkpoint(images / "runs/color/checkpoints/latest.safetensors").metadata) == expected
    for arguments in (("runs/color",), ("runs/color", "--training"), ("runs/color/checkpoints/latest.safetensors",)):
        run("export", *arguments, "-o", "exported.onnx")
        assert described(images / "exported.onnx") == expected
        (images / "exported.onnx").unlink()
    text = run("inspect", "runs/color/tuned.onnx").stdout
    assert f"pixels: {CROPPED}, values {IMAGENET}\n" in text
    assert "classes: ant, bee, cat\n" in text
    assert json.loads(run("inspect", "runs/color/tuned.onnx", "--json").stdout)["classes"] == ["ant", "bee", "cat"]


@pytest.mark.slow
def test_a_resumed_run_does_the_same_or_is_refused(run, images):
    run(*TRAIN, "--pixels", "imagenet")
    said = " ".join(run(*TRAIN, "--pixels", "raw", "--resume", "--epochs", "2", code=1).stderr.split())
    assert "--pixels raw (the run was started with imagenet): a run goes on as it was started: leave it out" in said
    text = run(*TRAIN, "--resume", "--epochs", "2").stdout
    assert f"values {IMAGENET}" in text
    assert "epoch 2/2" in text


@pytest.mark.slow
def test_a_model_is_trained_again_as_it_was_trained(run, images):
    run(*TRAIN, "--pixels", "imagenet", "--no-fold")
    tuned = images / "runs/color/tuned.onnx"
    text = run("train", str(tuned), "--data", "images", "-o", "again").stdout
    assert f"pixels: {CROPPED}, values {IMAGENET} (as recorded with the model)\n" in text
    assert described(images / "again/tuned.onnx") == described(tuned)
    text = run("train", str(tuned), "--data", "images", "-o", "changed", "--interpolation", "box").stdout
    assert (
        f"resized to 5 (box), 4 x 4 cut out of the centre, RGB, NCHW, values {IMAGENET} (as recorded with the model, but" in text
    )
    text = run(*TRAIN, "-o", "from", "--start-from", "runs/color").stdout
    assert f"values {IMAGENET} (as recorded with the model)" in text
    run("compare", str(tuned), "--data", "images", "--steps", "1")


@pytest.mark.slow
def test_arrays_of_bytes_are_pixels(run, images):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    np.savez("bytes.npz", x=pixels, y=np.array(["a", "b", "c"] * 2))
    text = run("train", "color.onnx", "--data", "bytes.npz", "--pixels", "-1..1", "--eval-data", "bytes.npz").stdout
    assert "pixels: values (pixel / 255 - 0.5) / 0.5\n" in text
    assert described(images / "runs/color/tuned.onnx").preprocessing == read_pixels("-1..1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("--pixels", "imagent"), "there is no 'imagent' (did you mean 'imagenet'?)", 1),
        (("--pixel-scale", "1/0"), "--pixel-scale 1/0: give a number, such as 0.5 or 1/255", 2),
        (("--pixel-mean", "1,x"), "--pixel-mean x: give a number", 2),
        (("--resize", "crop:3"), "4 x 4 cannot be cut out of an image whose shorter side is 3", 1),
        (("--channels", "gray"), "takes 3 channels, and the pixels are to be gray", 1),
    ],
)
def test_options_that_mean_nothing(run, images, arguments, message, code):
    result = run(*TRAIN, *arguments, code=code)
    assert message in " ".join(result.output.replace("│", " ").split())


def test_pixels_of_a_table_are_refused(run, folder):
    (folder / "table.csv").write_text("a,y\n1,0\n")
    result = run("train", "model.onnx", "--data", "table.csv", "--pixel-mean", "0.5", code=2)
    assert "--pixel-mean says what is done to the pixels of images and of arrays of bytes, and 'table.csv' is a .csv file" in (
        " ".join(result.output.replace("│", " ").split())
    )
