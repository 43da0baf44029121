"""``burnish predict``: the same of a run, its checkpoint and its export; what it prints, writes and refuses."""

from __future__ import annotations

import csv
import shutil

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from burnish.graph import Builder
from burnish.models import residual_network
from oracles.combinations import spread

TRAIN = ("train", "color.onnx", "--data", "images", "--threads", "1", "--batch-size", "4", "-o", "run")


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


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read(path) -> np.ndarray:
    """An image of 7 x 6 as the preset imagenet brings it to 4 x 4: the shorter side to 5, the centre cut out."""
    image = Image.open(path).resize((5, int(5 * 7 / 6)), Image.Resampling.BILINEAR)
    pixels = np.asarray(image.crop((0, 0, 4, 4)), np.float64) / 255
    return ((pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).transpose(2, 0, 1)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponential = np.exp(logits.astype(np.float64))
    return exponential / exponential.sum(axis=1, keepdims=True)


@pytest.mark.slow
def test_a_run_its_checkpoint_and_its_export_agree(run, images):
    run(*TRAIN, "--pixels", "imagenet", "--epochs", "2")
    shutil.copy("run/checkpoints/latest.safetensors", "apart.safetensors")
    sources = {
        "run": ("run",),
        "checkpoint": ("run/checkpoints/latest.safetensors",),
        "apart": ("apart.safetensors", "--program", "run/program"),
        "exported": ("run/tuned.onnx",),
        "torch": ("run/tuned.onnx", "--engine", "torch"),
        "reference": ("run", "--engine", "reference", "--batch-size", "2"),
    }
    for name, arguments in sources.items():
        text = run("predict", *arguments, "images", "--top", "3", "-o", f"{name}.csv").stdout
        assert "values (pixel / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225] (as recorded with the model)" in text
        assert "output 'logits': trained with cross_entropy; softmax makes probabilities of it" in text
    session = onnxruntime.InferenceSession("run/tuned.onnx", providers=["CPUExecutionProvider"])
    files = sorted((images / "images").rglob("*.png"))
    expected = softmax(session.run(None, {"x": np.stack([read(file) for file in files]).astype(np.float32)})[0])
    for name in sources:
        found = rows(images / f"{name}.csv")
        assert [row["file"] for row in found] == [str(file.relative_to(images)) for file in files]
        for row, probabilities in zip(found, expected, strict=True):
            order = np.argsort(-probabilities)
            assert [row["class"], row["class_2"], row["class_3"]] == [("ant", "bee", "cat")[index] for index in order]
            shown = [float(row[column]) for column in ("probability", "probability_2", "probability_3")]
            np.testing.assert_allclose(shown, probabilities[order], rtol=2e-5)


@pytest.mark.slow
def test_what_is_printed(run, images, monkeypatch):
    run(*TRAIN)
    lines = run("predict", "run", "images/bee/1.png").stdout.splitlines()
    assert lines[0] == "the run 'run', latest state after 3 steps; images/bee/1.png: 1 sample"
    assert lines[1].startswith("pixels: resized to 4 x 4 (bilinear), RGB, NCHW, values pixel / 255 (as recorded")
    assert lines[3].split() == ["file", "class", "probability"]
    name, shown, probability = lines[4].split()
    assert name == "images/bee/1.png"
    assert shown in ("ant", "bee", "cat")
    assert 1 / 3 <= float(probability) <= 1
    for index in range(30):
        shutil.copy("images/ant/0.png", f"images/ant/more{index}.png")
    everything = run("predict", "run", "images").stdout.splitlines()
    assert len([line for line in everything if "images" in line.split()[0] and ".png" in line.split()[0]]) == 39
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert run("predict", "run", "images").stdout.count(".png") == 39
    monkeypatch.delenv("FORCE_COLOR")
    assert "the run 'run', best state" in run("predict", "run", "images/ant", "--best").stdout


@pytest.mark.slow
def test_a_folder_of_images_needs_no_classes(run, images):
    run(*TRAIN)
    (images / "flat").mkdir()
    shutil.copy("images/cat/0.png", "flat/b.png")
    shutil.copy("images/ant/0.png", "flat/a.png")
    run("predict", "run", "flat", "-o", "flat.csv")
    assert [row["file"] for row in rows(images / "flat.csv")] == ["flat/a.png", "flat/b.png"]


@pytest.mark.slow
def test_numbers_for_a_model_of_images_are_taken_as_they_are(run, images):
    run(*TRAIN, "--pixels", "imagenet")
    files = sorted((images / "images").rglob("*.png"))
    np.savez("numbers.npz", x=np.stack([read(file) for file in files]).astype(np.float32))
    text = run("predict", "run", "numbers.npz", "-o", "numbers.csv").stdout
    assert "pixels: none, the numbers are taken as they are; those of images are (pixel / 255 - [0.485, 0.456, 0.406])" in text
    run("predict", "run", "images", "-o", "images.csv")
    found, expected = ([float(row["probability"]) for row in rows(images / f"{name}.csv")] for name in ("numbers", "images"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_names_of_classes_are_no_markup(run, images):
    (images / "images/ant").rename(images / "images/[red]ant[bold]")
    run(*TRAIN)
    text = run("predict", "run", "images", "--top", "3").stdout
    assert "[red]ant[bold]" in text
    assert "images/[red]ant[bold]/0.png" in text


def linear(path, columns: int, results: int, ending: str | None = None, batch: int | str = "batch") -> np.ndarray:
    """Write ``y = x w``, with a final node; returns w."""
    weight = np.random.default_rng(1).normal(size=(columns, results)).astype(np.float32)
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["m" if ending else "y"])]
    if ending:
        nodes.append(onnx.helper.make_node(ending, ["m"], ["y"]))
    graph = onnx.helper.make_graph(
        nodes,
        "linear",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [batch, columns])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [batch, results])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), path)
    return weight


X = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)


def write_tables(folder, columns: str) -> None:
    names = columns.split(",")
    arrays = {"a": X[:, 0], "b": X[:, 1], "y": np.arange(5), "c": np.arange(5)}
    chosen = {name: arrays[name] for name in names}
    pyarrow.parquet.write_table(pyarrow.table(chosen), folder / "table.parquet")
    lines = zip(*(array.tolist() for array in chosen.values()), strict=True)
    (folder / "table.csv").write_text("\n".join([columns, *(",".join(map(repr, line)) for line in lines)]) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["a,b", "a,b,y", "y,a,b", "a,b,c"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_with_and_without_labels(run, folder, columns, kind):
    weight = linear(folder / "linear.onnx", 2, 3)
    write_tables(folder, columns)
    text = run("predict", "linear.onnx", f"table.{kind}", "-o", "p.csv").stdout
    assert "output 'y': the model does not say what it is (--activation softmax or sigmoid" in text
    found = rows(folder / "p.csv")
    assert list(found[0]) == ["row", "y[0]", "y[1]", "y[2]"]
    assert [row["row"] for row in found] == ["0", "1", "2", "3", "4"]
    np.testing.assert_allclose([[float(row[f"y[{index}]"]) for index in range(3)] for row in found], X @ weight, rtol=1e-5)


@pytest.mark.slow
def test_values_of_a_regression_that_was_trained(run, folder):
    linear(folder / "linear.onnx", 2, 1)
    np.savez("data.npz", x=X, y=X.sum(axis=1, keepdims=True))
    run("train", "linear.onnx", "--data", "data.npz", "--loss", "mse", "-o", "run")
    text = run("predict", "run", "data.npz", "-o", "p.csv").stdout
    assert "output 'y': trained with mean_squared_error\n" in text
    session = onnxruntime.InferenceSession("run/tuned.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": X})[0][:, 0]
    np.testing.assert_allclose([float(row["y"]) for row in rows(folder / "p.csv")], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "loss", "line", "expected"),
    [
        ("Softmax", None, "probabilities, by Softmax", lambda m: softmax(m)),
        ("Sigmoid", None, "probabilities, by Sigmoid", lambda m: 1 / (1 + np.exp(-m))),
        ("LogSoftmax", None, "logarithms of probabilities, by LogSoftmax", lambda m: softmax(m)),
        (None, "cross_entropy", "trained with cross_entropy; softmax makes", lambda m: softmax(m)),
        ("Softmax", "cross_entropy", "probabilities, by Softmax", lambda m: softmax(m)),
        (None, "bce_with_logits", "trained with bce_with_logits; sigmoid makes", lambda m: 1 / (1 + np.exp(-m))),
        ("Sigmoid", "bce_with_logits", "probabilities, by Sigmoid", lambda m: 1 / (1 + np.exp(-m))),
        ("LogSoftmax", "nll", "logarithms of probabilities, trained with nll; exp makes", lambda m: softmax(m)),
    ],
)
def test_what_an_output_is(run, folder, ending, loss, line, expected):
    """The same of the file itself, of a run with a loss, and of what that exports, at a rate of nearly nothing."""
    weight = linear(folder / "linear.onnx", 2, 3, ending)
    sources = ["linear.onnx"]
    if loss is not None:
        labels = np.eye(3, dtype=np.float32)[np.arange(5) % 3] if loss == "bce_with_logits" else np.arange(5) % 3
        np.savez("data.npz", x=X, y=labels)
        run("train", "linear.onnx", "--data", "data.npz", "--loss", loss, "--lr", "1e-12", "-o", "run")
        sources = ["run", "run/tuned.onnx"]
    np.savez("new.npz", x=X)
    for source in sources:
        text = run("predict", source, "new.npz", "--top", "3", "-o", "p.csv").stdout
        assert line in text
        probabilities = expected((X @ weight).astype(np.float64))
        for row, wanted in zip(rows(folder / "p.csv"), probabilities, strict=True):
            order = np.argsort(-wanted)
            assert [row[name] for name in ("class", "class_2", "class_3")] == [str(index) for index in order]
            shown = [float(row[name]) for name in ("probability", "probability_2", "probability_3")]
            np.testing.assert_allclose(shown, wanted[order], rtol=1e-4, atol=1e-6)


def test_one_question(run, folder):
    weight = linear(folder / "linear.onnx", 2, 1)
    np.savez("data.npz", x=X, y=(np.arange(5) % 2).astype(np.float32)[:, None])
    run("predict", "linear.onnx", "data.npz", "--activation", "sigmoid", "-o", "p.csv")
    expected = 1 / (1 + np.exp(-(X @ weight)[:, 0]))
    np.testing.assert_allclose([float(row["probability"]) for row in rows(folder / "p.csv")], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("activation", "columns"), [("softmax", ["row", "class", "probability"]), ("none", ["row", "y[0]", "y[1]"])]
)
def test_the_activation_asked_for(run, folder, activation, columns):
    linear(folder / "linear.onnx", 2, 2)
    np.savez("data.npz", x=X)
    run("predict", "linear.onnx", "data.npz", "--activation", activation, "-o", "p.csv")
    assert list(rows(folder / "p.csv")[0]) == columns


@pytest.mark.slow
def test_a_model_of_a_fixed_batch_reads_any_number(run, folder):
    weight = linear(folder / "linear.onnx", 2, 1, batch=2)
    np.savez("data.npz", x=X)
    run("predict", "linear.onnx", "data.npz", "-o", "p.csv")
    np.testing.assert_allclose([float(row["y"]) for row in rows(folder / "p.csv")], (X @ weight)[:, 0], rtol=1e-5)


@pytest.mark.slow
def test_arrays_that_nothing_reads_are_named(run, folder):
    linear(folder / "linear.onnx", 2, 1)
    np.savez("more.npz", x=X, y=X[:, :1], mask=X)
    for command in (("predict", "linear.onnx", "more.npz"), ("evaluate", "linear.onnx", "more.npz", "--loss", "mse")):
        assert run(*command).stdout.splitlines()[1] == "more.npz: nothing reads the array 'mask'"
    train = ("train", "linear.onnx", "--data", "more.npz", "--loss", "mse", "--eval-data", "more.npz")
    assert run(*train).stdout.count("more.npz: nothing reads the array 'mask'") == 2
    compare = ("compare", "linear.onnx", "--data", "more.npz", "--loss", "mse", "--steps", "1")
    assert run(*compare).stdout.count("more.npz: nothing reads the array 'mask'") == 1


def test_outputs_as_they_are(run, folder):
    weight = linear(folder / "linear.onnx", 2, 3)
    np.savez("data.npz", x=X)
    text = run("predict", "linear.onnx", "data.npz", "-o", "sub/p.npz").stdout
    assert "sub/p.npz: the outputs as they are, y [5, 3]" in text
    np.testing.assert_allclose(np.load("sub/p.npz")["y"], X @ weight, rtol=1e-5)


@pytest.mark.slow
def test_averages_as_the_run_exported(run, images):
    run(*TRAIN, "--average", "ema:decay=0.5", "--lr", "0.5")
    for source, options in (("run", ()), ("run/tuned.onnx", ()), ("run", ("--no-average",))):
        run("predict", source, "images", *options, "-o", f"{len(options)}{source[-4:]}.csv")
    averaged, exported, plain = (rows(images / name) for name in ("0run.csv", "0onnx.csv", "1run.csv"))
    shown = [[float(row["probability"]) for row in table] for table in (averaged, exported, plain)]
    np.testing.assert_allclose(shown[0], shown[1], rtol=2e-5)
    assert np.abs(np.subtract(shown[0], shown[2])).max() > 1e-3
    assert "the average of its weights" in run("predict", "run", "images").stdout


@spread(
    ("arguments", "message", "code"),
    [
        (("nothing.onnx", "images"), "nothing.onnx", 1),
        (("folder", "images"), "'folder' holds no latest.safetensors: the run has not saved anything yet", 1),
        (("color.onnx", "nothing.png"), "nothing.png: no such file or folder", 1),
        (("color.onnx", "folder"), "folder: no images; .bmp", 1),
        (("color.onnx", "damaged.png"), "damaged.png: damaged, or no image", 1),
        (("color.onnx", "notes.md"), "burnish does not read '.md' files", 1),
        (("color.onnx", "notes.txt"), "texts become tokens by a tokenizer: name one", 1),
        (("color.onnx", "other.npz"), "no array 'x' for the model's input 'x'; the file has 'z' [3]", 1),
        (("color.onnx", "data.npz"), "'x' wants samples of shape [3, 4, 4], and those of the data have shape [4, 4]", 1),
        (("color.onnx", "images", "--outputs", "scores"), "outputs: the model has no output 'scores'; it has 'logits'", 1),
        (("color.onnx", "images", "--activation", "relu"), "there is no 'relu'; choose among softmax, sigmoid, none", 1),
        (("color.onnx", "images", "--top", "4"), "the model has 3 classes, and 4 of them are to be shown", 1),
        (("color.onnx", "images", "--best"), "best: 'color.onnx' is one model: leave it out", 1),
        (("color.onnx", "images", "--average"), "average: 'color.onnx' holds one set of weights", 1),
        (("color.onnx", "images", "-o", "p.txt"), "--output p.txt: predictions are written as .csv, .jsonl or .npz", 2),
        (("model.onnx", "data.npz", "--pixels", "raw"), "its numbers are taken as they are ('x' float32)", 1),
    ],
    test=5,
)
def test_what_is_refused(run, images, arguments, message, code):
    (images / "folder").mkdir()
    (images / "damaged.png").write_bytes(b"no image")
    for name in ("notes.md", "notes.txt"):
        (images / name).write_text("no data")
    np.savez("other.npz", z=np.zeros(3))
    result = run("predict", *arguments, code=code)
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_an_output_that_no_table_has_a_row_for(run, folder):
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 1, 4, 4]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="dense")
    builder = Builder(graph)
    result = builder.op("Relu", builder.tensor(x)).value
    result.name = "mask"
    graph.outputs.append(result)
    ir.save(ir.Model(graph, ir_version=9), folder / "dense.onnx")
    result = run("predict", "dense.onnx", "data.npz", code=1)
    assert "the output 'mask' has shape [1, 4, 4] for each sample, which no table has a row for: write" in result.stderr
    run("predict", "dense.onnx", "data.npz", "-o", "p.npz")
    assert np.load("p.npz")["mask"].shape == (20, 1, 4, 4)
