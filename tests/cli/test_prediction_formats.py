"""``burnish predict`` on the screen and in files: several data, a table, CSV, JSON lines, a pipe that ends, and refusals."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from PIL import Image

import burnish
from oracles.tiny_pictures_models import SSD_TEXT, small_ssd, small_unet

X = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)


def exported(model, path, classes, **objective):
    """A file as a run exports it, that was not trained."""
    with burnish.Session(burnish.compile(model, optimizer="sgd", **objective)) as session:
        session.metadata["burnish.classes"] = classes
        session.export(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """``photos.onnx``, ``questions.onnx`` and ``values.onnx``."""
    models = tmp_path_factory.mktemp("models")
    cnn = burnish.models.create("cnn", classes=2, input_shape=(3, 4, 4))
    exported(cnn, models / "photos.onnx", '["ant", "bee, é"]', loss="cross_entropy")
    mlp = burnish.models.create("mlp", classes=3, input_shape=(4,))
    exported(mlp, models / "questions.onnx", '["red", "round", "big"]', loss="bce_with_logits")
    exported(mlp, models / "values.onnx", "[]", loss="mse")
    return models


@pytest.fixture
def files(folder, models):
    """The models, four photos, and a table of 30 rows."""
    shutil.copytree(models, folder, dirs_exist_ok=True)
    (folder / "photos").mkdir()
    for name in ("a b", "c", "d", "e"):
        pixels = np.random.default_rng(len(name) + ord(name[-1])).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{name}.png")
    (folder / "table.csv").write_text("\n".join(["a,b,c,d", *(",".join(map(repr, row)) for row in X.tolist())]) + "\n")
    return folder


def objects(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines_hold_what_python_returns(run, files):
    shown = objects(run("predict", "photos.onnx", "photos", "--format", "jsonl").stdout)
    with burnish.Predictor("photos.onnx") as predictor:
        assert shown == [found.as_dict() for found in predictor.predict("photos")]
    assert [*shown[0]] == ["name", "label", "score", "scores"]
    assert [*shown[0]["scores"]] == ["ant", "bee, é"]
    best = objects(run("predict", "photos.onnx", "photos", "--format", "jsonl", "--top", "1").stdout)
    assert [each["scores"] for each in best] == [{each["label"]: each["score"]} for each in shown]


def test_csv_on_the_screen_is_that_of_the_file(run, files):
    shown = run("predict", "photos.onnx", "photos", "--format", "csv", "-o", "p.csv").stdout
    written = (files / "p.csv").read_text(encoding="utf-8")
    assert shown.splitlines() == written.splitlines()
    header, *rows = csv.reader(io.StringIO(shown))
    assert header == ["file", "class", "probability"]
    assert [row[0] for row in rows] == ["photos/a b.png", "photos/c.png", "photos/d.png", "photos/e.png"]


def test_what_is_said_of_the_model_does_not_stand_between_the_lines(run, files):
    for form in ("csv", "jsonl"):
        result = run("predict", "photos.onnx", "photos", "--format", form)
        assert "the model 'photos.onnx'" not in result.stdout
        assert "the model 'photos.onnx'; photos: 4 samples" in result.stderr
    assert "the model 'photos.onnx'; photos: 4 samples" in run("predict", "photos.onnx", "photos", "--format", "table").stdout


def test_several_data_are_one_after_the_other(run, files):
    names = ["photos/e.png", "photos/c.png", "photos"]
    result = run("predict", "photos.onnx", *names, "--format", "csv")
    found = [row[0] for row in csv.reader(io.StringIO(result.stdout))][1:]
    assert found == ["photos/e.png", "photos/c.png", "photos/a b.png", "photos/c.png", "photos/d.png", "photos/e.png"]
    assert "photos/e.png and 2 more: 6 samples" in result.stderr
    tables = objects(run("predict", "values.onnx", "table.csv", "table.csv", "--format", "jsonl").stdout)
    assert [tables[index]["name"] for index in (0, 29, 30)] == ["table.csv:0", "table.csv:29", "table.csv:0"]
    assert tables[0]["values"] == tables[30]["values"]


def test_a_terminal_shows_every_sample(run, files, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    lines = run("predict", "values.onnx", "table.csv").stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[0].isdigit()] == list(map(str, range(30)))


def test_a_file_takes_the_place_of_the_screen(run, files):
    said = run("predict", "values.onnx", "table.csv", "-o", "sub/p.jsonl").stdout
    assert said.splitlines()[-1] == "sub/p.jsonl: 30 predictions"
    assert len(said.splitlines()) == 3
    assert len(objects((files / "sub/p.jsonl").read_text())) == 30


def test_several_labels_stand_in_a_column(run, files):
    header, *rows = csv.reader(io.StringIO(run("predict", "questions.onnx", "table.csv", "--format", "csv").stdout))
    assert header == ["row", "labels", "red", "round", "big"]
    for row in rows:
        assert row[1] == ";".join(name for name, number in zip(header[2:], row[2:], strict=True) if float(number) > 0.5)
    found = objects(run("predict", "questions.onnx", "table.csv", "--format", "jsonl").stdout)
    assert [";".join(each["label"]) for each in found] == [row[1] for row in rows]
    assert len({row[1] for row in rows}) > 1
    assert run("predict", "questions.onnx", "table.csv", "--top", "2").stdout.splitlines()[2].split()[:3] == [
        "row",
        "class",
        "probability",
    ]


@pytest.mark.slow
def test_boxes_and_pixels(run, folder):
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 80, 3), dtype=np.uint8)).save("wide.png")
    exported(small_ssd(), "ssd.onnx", '["rectangle", "circle"]', loss=SSD_TEXT, outputs=["boxes", "scores"], metrics=["coco_map"])
    (found,) = objects(run("predict", "ssd.onnx", "wide.png", "--format", "jsonl", "--score", "0.6").stdout)
    _, *rows = csv.reader(io.StringIO(run("predict", "ssd.onnx", "wide.png", "--format", "csv", "--score", "0.6").stdout))
    assert len(found["boxes"]) > 1
    assert [[box["label"], box["score"], *box["box"]] for box in found["boxes"]] == [
        [row[1], *map(float, row[2:])] for row in rows
    ]
    none = run("predict", "ssd.onnx", "wide.png", "--format", "jsonl", "--score", "1")
    assert objects(none.stdout) == [{"name": "wide.png", "boxes": []}]
    assert "; none in 1 picture of 1" in none.stderr
    exported(small_unet(classes=3), "unet.onnx", '["sky", "tree", "road"]', loss="cross_entropy")
    (mask,) = objects(run("predict", "unet.onnx", "wide.png", "--format", "jsonl").stdout)
    assert sum(mask["scores"].values()) == pytest.approx(1)
    assert mask["scores"][mask["label"]] == mask["score"] == max(mask["scores"].values())


def test_numbers_that_json_does_not_have_are_null(run, folder):
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 2]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Log", ["x"], ["y"])], "log", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), "log.onnx")
    np.savez("data.npz", x=np.array([[-1.0, 0.0], [1.0, 1.0]], np.float32))
    first, second = objects(run("predict", "log.onnx", "data.npz", "--format", "jsonl").stdout)
    assert (first["values"], second["values"]) == ([None, None], [0.0, 0.0])


def test_names_steer_no_terminal(run, files):
    (files / "photos" / "c.png").rename(files / "photos" / "c\u202e\x1b[31m.png")
    for form, written in (("jsonl", "c\\u202e\\u001b[31m.png"), ("csv", "c\\u202e\\x1b[31m.png")):
        text = run("predict", "photos.onnx", "photos", "--format", form).stdout
        assert written in text
        assert not {"\u202e", "\x1b"} & {*text}
    assert any(
        "\u202e\x1b" in each["name"] for each in objects(run("predict", "photos.onnx", "photos", "--format", "jsonl").stdout)
    )


@pytest.mark.parametrize("form", ["jsonl", *(pytest.param(form, marks=pytest.mark.slow) for form in ("csv", "table"))])
def test_a_reader_that_goes_away_ends_it_quietly(files, form):
    lines = "\n".join(["a,b,c,d", *["1,2,3,4"] * 6_000]) + "\n"
    (files / "long.csv").write_text(lines)
    command = [sys.executable, "-m", "burnish", "predict", "values.onnx", "long.csv", "--format", form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert "error" not in errors.lower()


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("photos", "--format", "xml"), "--format xml: predictions are printed as table, csv or jsonl", 2),
        (("photos", "-o", "p.txt"), "--output p.txt: predictions are written as .csv, .jsonl or .npz", 2),
        (("photos/c.png", "nothing.png"), "nothing.png: no such file or folder", 1),
        (("*.jpg",), "*.jpg: no such file or folder", 1),
        (("photos", "--top", "3"), "the model has 2 classes, and 3 of them are to be shown: ask for 2 or fewer", 1),
        (("photos", "--score", "2"), "score=2.0: give a number from 0 to 1, such as 0.25", 1),
        (("table.csv",), "'x' wants samples of shape [3, 4, 4], and those of the data have shape [4]", 1),
    ],
)
def test_what_is_refused_of_formats(run, files, arguments, message, code):
    result = run("predict", "photos.onnx", *arguments, code=code)
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_the_folder_of_a_run_predicts_as_its_file_and_as_the_command(run, files):
    for name, pixel in (("dark", 40), ("light", 200)):
        (files / "classes" / name).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(np.full((4, 4, 3), pixel + number, np.uint8)).save(files / "classes" / name / f"{number}.png")
    run("finetune", "photos.onnx", "--data", "classes", "--eval-split", "0.25", "--epochs", "2", "--lr", "0.01", "-o", "run")
    shown = objects(run("predict", "run", "classes", "--format", "jsonl").stdout)
    for path in ("run", "run/tuned.onnx", "run/checkpoints/best.safetensors"):
        with burnish.Predictor(path, threads=1) as predictor:
            found = predictor.predict("classes", batch_size=3)
            assert predictor.classes == ("dark", "light")
            assert {*predictor.evaluate("classes")} == {"loss", "accuracy"}
        assert [each.name for each in found] == [each["name"] for each in shown]
        np.testing.assert_allclose(
            [each.scores for each in found], [[*each["scores"].values()] for each in shown], rtol=1e-4, atol=1e-7
        )
