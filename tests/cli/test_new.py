"""``burnish new``: the file it writes trains, what it says, and what it refuses."""

from __future__ import annotations

import onnx
import pytest

from burnish.models import create


@pytest.mark.parametrize(
    ("name", "shape", "line"),
    [
        ("mlp", "4", "17,539 parameters, from x [batch, 4] to logits [batch, 3]"),
        ("cnn", "3x64x64", "x [batch, 3, 64, 64] to logits [batch, 3]"),
        ("resnet", "1x8x8", "x [batch, 1, 8, 8] to logits [batch, 3]"),
        ("unet", "3x16x16", "x [batch, 3, 16, 16] to logits [batch, 3, 16, 16]"),
        ("ssd", "3x16x16", "x [batch, 3, 16, 16] to boxes [batch, 80, 4], scores [batch, 80, 4]"),
        ("transformer", "8", "input_ids [batch, tokens], attention_mask [batch, tokens] to logits [batch, 3]"),
        ("gpt", "8", "input_ids [batch, tokens] to logits [batch, tokens, 20]"),
        ("lstm", "5x2", "x [batch, 5, 2] to logits [batch, 3]"),
    ],
)
def test_each_family_is_written(run, folder, name, shape, line):
    vocabulary = ("--vocabulary", "20") if name in ("transformer", "gpt") else ()
    classes = None if name == "gpt" else 3
    size = () if classes is None else ("--classes", str(classes))
    printed = run("new", name, *size, "--input", shape, "-o", "models/first.onnx", "--seed", "7", *vocabulary).stdout
    created = create(
        name, classes=classes, input_shape=[*map(int, shape.split("x"))], seed=7, vocabulary=20 if vocabulary else None
    )
    written = onnx.load("models/first.onnx")
    assert {tensor.name: tensor.raw_data for tensor in written.graph.initializer} == {
        tensor.name: tensor.raw_data for tensor in created.graph.initializer
    }
    assert [value.name for value in written.graph.input] == [value.name for value in created.graph.input]
    assert line in printed
    assert f"models/first.onnx: {name}, " in printed
    assert "next: burnish finetune models/first.onnx --data " in printed


def test_running_statistics_are_no_parameters(run, folder):
    convolutions = 9 * (3 * 16 + 16 * 32 + 32 * 64)
    weights = convolutions + 2 * (16 + 32 + 64) + 64 * 3 + 3
    assert f"cnn, {weights:,} parameters" in run("new", "cnn", "--classes", "3", "--input", "3x8x8", "-o", "cnn.onnx").stdout


def test_what_it_writes_trains(run, folder):
    run("new", "cnn", "--classes", "3", "--input", "1x4x4", "--output", "cnn.onnx")
    assert "runs/cnn/tuned.onnx" in run("train", "cnn.onnx", "--data", "data.npz", "--epochs", "1").stdout


def test_a_file_is_not_overwritten_unasked(run, folder):
    before = (folder / "model.onnx").read_bytes()
    arguments = ("new", "mlp", "--classes", "3", "--input", "4", "--output", "model.onnx")
    printed = run(*arguments, code=1).stderr
    assert "error: 'model.onnx' is there already: replace it (--overwrite), or name another file (--output)" in printed
    assert (folder / "model.onnx").read_bytes() == before
    run(*arguments, "--overwrite")
    assert (folder / "model.onnx").read_bytes() != before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("mpl", "--classes", "3", "--input", "4"),
            1,
            "name must be 'mlp', 'cnn', 'resnet', 'unet', 'ssd', 'transformer', 'gpt' or 'lstm'",
        ),
        (("cnn", "--classes", "0", "--input", "1x8x8"), 2, "--classes"),
        (("cnn", "--classes", "3", "--input", "1,8,8"), 2, "--input 1,8,8: give whole numbers with x between, such as 3x64x64"),
        (("cnn", "--classes", "3", "--input", "1x-8x8"), 2, "--input 1x-8x8: give whole numbers with x between"),
        (("cnn", "--classes", "3", "--input", "8"), 1, "cnn: input_shape=(8,) has 1 dimension; give (channels, height, width)"),
        (
            ("unet", "--classes", "3", "--input", "1x12x8"),
            1,
            "the height 12 is no multiple of 8, as it is halved 3 times; give 16",
        ),
        (("mlp", "--input", "4"), 1, "mlp: the number of classes is missing: give classes=3 (--classes 3) or another"),
        (("gpt", "--classes", "3", "--input", "4"), 1, "gpt: classes=3: it has a score for each token of its vocabulary"),
        (("mlp", "--classes", "3", "--input", "4", "--vocabulary", "9"), 1, "vocabulary=9 is for a transformer or a gpt"),
        (("mlp", "--classes", "3", "--input", "4", "--output", "model.pt"), 2, "a model is written as .onnx"),
    ],
)
def test_what_cannot_be_made_is_refused(run, folder, arguments, code, message):
    output = () if "--output" in arguments else ("--output", "new.onnx")
    printed = " ".join(run("new", *arguments, *output, code=code).stderr.replace("│", " ").split())
    assert message in printed
    assert not (folder / "new.onnx").exists()
