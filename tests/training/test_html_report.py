"""The report of a run: its figures are those of the run, its pictures those of the data, and nothing in a name escapes."""

from __future__ import annotations

import base64
import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.data.preprocessing import Preprocessing
from burnish.installing import install_command
from burnish.models import residual_network
from burnish.training import Session, Trainer, run_folder
from burnish.training.callbacks import HtmlReport
from burnish.training.html_report.charts import LEFT, WIDTH, Line, line_chart
from burnish.training.html_report.contents import Contents, Example, Judgement, stages_before, with_stages
from burnish.training.html_report.page import _shortened, report_page
from burnish.training.html_report.pictures import pixels_of, png
from burnish.training.html_report.samples import judge
from burnish.training.trained_model import model_of_session, open_model
from oracles.small_networks import Network
from oracles.tiny_program import tiny_batch, tiny_program

Image = pytest.importorskip("PIL.Image")
CLASSES = ("owl & <b>dog", "<script>alert(1)<script>", "\u202ecat")
VOID = {"meta", "img", "br", "line", "polyline", "rect"}


class Page(HTMLParser):
    """Reads a page: its elements, its texts, and whether each element is closed."""

    def __init__(self, content: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing takes longer than all of these runs."""
    monkeypatch.setattr(run_folder, "draw_curves", lambda rows, path, names: None)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with a run on images, in classes whose names are markup, and the report that it wrote."""
    folder = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(0)
    for index, name in enumerate(CLASSES):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.clip(rng.normal(40 + 80 * index, 30, (8, 8)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    ir.save(residual_network(classes=3, width=4, blocks=(1,)), folder / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "draw_curves", lambda rows, path, names: None)
        data = ["--data", folder / "images", "--eval-data", folder / "images"]
        course = ["--epochs", 2, "--batch-size", 4, "--lr", 0.01, "--freeze", "stem.*"]
        command = ["train", folder / "model.onnx", *data, *course, "--output", folder / "run", "--report", folder / "own.html"]
        result = CliRunner().invoke(app, [str(word) for word in command])
    assert result.exit_code == 0, result.output
    assert f"{folder / 'own.html'}: the report of the run" in result.output
    return folder


@pytest.fixture(scope="module")
def page(run) -> Page:
    return Page((run / "own.html").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_no_name_is_markup_and_nothing_is_fetched(run, page):
    assert page.open == []
    assert not page.tags & {"script", "link", "iframe", "object", "form", "a"}
    assert CLASSES[0] in page.text
    assert CLASSES[1] in page.text
    assert "\\u202ecat" in page.text
    assert "\u202e" not in page.text
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    policy = next(values["content"] for tag, values in page.elements if tag == "meta" and "http-equiv" in values)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert "url(" not in (run / "own.html").read_text()


def test_figures_are_those_of_the_run(run, page):
    rows = run_folder.MetricsTable(run / "run" / "metrics.csv", ["loss", "accuracy"], 10**9).rows
    assert f"{rows[-1]['eval_loss']:.4f}loss" in page.text
    assert f"{rows[-1]['eval_accuracy']:.4f}accuracy" in page.text
    assert f"{round(18 * rows[-1]['eval_accuracy'])} of 18 right" in page.text
    charts = [values["aria-label"] for tag, values in page.elements if tag == "svg"]
    assert charts == ["loss", "accuracy", "learning rate", "samples in a second"]
    for section in ("What was trained", "Configuration", "Environment", "peak memory of the process", "planned peak of a step"):
        assert section in page.text
    assert "frozen: 44 numbers in 3 tensors" in page.text
    assert 'freeze = ["stem.*"]' in page.text
    assert "onnxruntime" in page.text


def test_the_matrix_and_the_worst_examples_are_those_of_the_predictions(run, page):
    from burnish.data import open_dataset

    model = open_model(run / "run")
    dataset = open_dataset(str(run / "images"), model.to_evaluate, classes=model.described.classes)
    judgement = judge(model, dataset, batch_size=5, worst=4)
    logits = model.predict(dataset)["logits"].astype(np.float64)
    labels = dataset.batch(np.arange(18))["labels"]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = np.zeros((3, 3), int)
    for label, row in zip(labels, logits, strict=True):
        expected[label, row.argmax()] += 1
    np.testing.assert_array_equal(judgement.confusion, expected)
    losses = np.where(logits.argmax(1) == labels, 0, -np.log(probabilities[np.arange(18), labels]))
    order = [index for index in np.argsort(-losses, kind="stable")[:4] if losses[index] > 0]
    assert [example.index for example in judgement.worst] == order
    for example in judgement.worst:
        name = CLASSES[labels[example.index]] if "\u202e" not in example.truth else "\u202ecat"
        assert example.truth == name
        assert example.probability == pytest.approx(probabilities[example.index, labels[example.index]])
        path = sorted((run / "images" / name).iterdir())[example.index % 6]
        np.testing.assert_array_equal(example.pixels, np.asarray(Image.open(path)))
    shown = [values["src"] for tag, values in page.elements if tag == "img"]
    decoded = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown[0].partition(",")[2]))))
    np.testing.assert_array_equal(decoded, judgement.worst[0].pixels)


@pytest.mark.slow
def test_the_command_reports_a_run_from_its_folder(run, page):
    result = CliRunner().invoke(app, ["report", str(run / "run")])
    assert result.exit_code == 0, result.output
    again = Page((run / "run" / "report.html").read_text(encoding="utf-8"))
    for title in ("loss", "best accuracy", "steps", "peak memory of the process"):
        assert re.search(rf"[\d.]+( MB| GB| \(epoch \d\))?{title}", again.text), title
    assert [values for tag, values in again.elements if tag == "img"] == [values for tag, values in page.elements if tag == "img"]
    refused = CliRunner().invoke(app, ["report", str(run / "images")])
    assert refused.exit_code == 1
    assert "is not the folder of a run: give the folder that burnish train or finetune wrote" in refused.output


def test_a_report_of_values_shows_those_that_are_far_off(tmp_path):
    network = Network("regression", (3,))
    program = burnish.compile(network.model(network.dense("head", network.input, 3, 1)), loss="mse", optimizer="sgd")
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(12, 3)).astype(np.float32), "targets": rng.normal(size=(12, 1)).astype(np.float32)}
    data["targets"][7] = 100
    report = HtmlReport(tmp_path / "report.html", title="values")
    Trainer(program, data, batch_size=4, lr=1e-6, run_directory=tmp_path / "run", progress=False, callbacks=[report]).run()
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "sample 7, error" in page.text
    assert page.text.index("sample 7,") < page.text.index("sample", page.text.index("sample 7,") + 7)
    assert "is 100" in page.text
    assert "Confusion matrix" not in page.text


@pytest.mark.slow
def test_features_that_are_computed_once_are_shown_as_the_images_that_they_are_of(run, tmp_path):
    command = ["finetune", run / "model.onnx", "--data", run / "images", "--freeze-until", "head", "--lr", 0.001, "--epochs", 1,
               "--output", tmp_path / "run", "--report", tmp_path / "report.html", "--profile"]  # fmt: skip
    result = CliRunner().invoke(app, [str(word) for word in command])
    assert result.exit_code == 0, result.output
    assert "features: computed once" in result.output
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "img" in page.tags
    assert "of 18 right" in page.text


@pytest.mark.slow
def test_batches_as_they_come_are_reported_without_examples(tmp_path):
    from burnish.data.batches import Batches
    from burnish.training.callbacks import TensorBoard

    pytest.importorskip("tensorboardX")
    callbacks = [HtmlReport(tmp_path / "report.html"), TensorBoard(tmp_path / "events")]
    batches = Batches([tiny_batch(4, seed) for seed in range(3)])
    Trainer(tiny_program(), batches, run_directory=tmp_path / "run", progress=False, callbacks=callbacks).run()
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "the data come as batches, in which no sample has a place of its own" in page.text


def test_a_run_that_an_error_stopped_is_reported(tmp_path):
    data = tiny_batch(20)
    data["x"][-1] = np.nan
    trainer = Trainer(
        tiny_program(),
        data,
        batch_size=1,
        run_directory=tmp_path / "run",
        progress=False,
        callbacks=[HtmlReport(tmp_path / "r.html")],
    )
    with pytest.raises(burnish.errors.NonFiniteLossError):
        trainer.run()
    assert "Stopped before its last epoch: The loss at step" in Page((tmp_path / "r.html").read_text()).text


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_pictures_are_read_back_by_others(mode):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7) if mode == "L" else (5, 7, 3)).astype(np.uint8)
    with Image.open(io.BytesIO(png(pixels))) as image:
        assert image.mode == mode
        np.testing.assert_array_equal(np.asarray(image), pixels)


def test_without_pillow_a_sentence_takes_the_place_of_pictures(monkeypatch):
    pixels = np.zeros((4, 4), np.uint8)
    judgement = Judgement(3, ("a", "b"), None, (Example(2, "a", "b", 0.25, 1.5, pixels, ""),))
    contents = Contents("pictures", [], tiny_program(), 1, judgement=judgement, data="data")
    assert report_page(contents).count("<img ") == 1
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    page = Page(report_page(contents))
    assert "img" not in page.tags
    assert "None is shown: pictures of samples need Pillow, which is not installed" in page.text
    assert f"which is not installed ({install_command('PIL')})" in page.text
    assert "said b, is a, which it gives 25.0%sample 2, error 1.5" in page.text.replace("\n", "")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_what_was_done_to_pixels_is_undone(layout, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3)).astype(np.uint8)
    done = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), channels=channels, layout=layout)
    values = pixels[..., ::-1] if channels == "bgr" else pixels
    sample = (values * done.scale - np.array(done.mean)) / np.array(done.std)
    sample = sample.transpose(2, 0, 1) if layout == "NCHW" else sample
    np.testing.assert_array_equal(pixels_of(sample.astype(np.float32), done), pixels)


def test_what_is_no_image_has_no_picture():
    assert pixels_of(np.zeros((4, 8)), None) is None
    assert pixels_of(np.zeros((2, 8, 8)), None) is None
    np.testing.assert_array_equal(pixels_of(np.array([[[1.0, 3.0]]]), None), [[0, 255]])


def test_a_chart_of_any_numbers():
    points = [(float(step), value) for step, value in enumerate([1e-9, float("nan"), 2e-9, float("inf")])]
    drawn = line_chart("a < b", [Line("one", points), Line("none", [])])
    assert "a &lt; b" in drawn
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert drawn.count("<circle") == 2
    second = line_chart("second", [Line("none", []), Line("one", points)])
    assert "line line-1" in second  # in its own colour, with its name
    assert "line line-0" not in second
    assert ">one<" in second
    assert ">none<" not in second
    assert line_chart("empty", [Line("none", [])]) == ""
    long = line_chart("long", [Line("x", [(float(step), 5.0) for step in range(10_000)])])
    assert len(long) < 30_000
    assert re.search(rf'points="{LEFT}\.0,', long)


def test_labels_of_a_chart_are_whole_apart_and_within():
    """In Chromium 1,250 was cut at the edge, and figures that differ in their fifth digit had one label."""
    for last in (1, 2, 7, 1_250, 99_999, 1_234_567):
        drawn = line_chart("steps", [Line("x", [(1.0, 20_000.1), (float(last), 20_000.6)])])
        labels = re.findall(r'x="([\d.]+)" y="([\d.]+)" text-anchor="(middle|end)">([^<]*)</text>', drawn)
        across = [(float(x), text) for x, _, anchor, text in labels if anchor == "middle"]
        up = [text for x, _, anchor, text in labels if anchor == "end" and float(x) < LEFT]
        for x, text in across:
            assert x + len(text) * 6.7 / 2 <= WIDTH, (last, text)
            assert float(text.replace(",", "")).is_integer()
        assert len({*up}) == len(up) > 3
        assert all(len(text) * 6.7 <= LEFT - 6 for text in up)


def test_long_names_of_classes_are_shortened_beside_the_matrix():
    names = [f"Canis familiaris, of the breed that is number {number}" for number in range(3)]
    judgement = Judgement(3, tuple(names), np.eye(3, dtype=np.int64), ())
    shown = report_page(Contents("names", [], tiny_program(), 1, judgement=judgement, data="data"))
    for number, name in enumerate(names):
        assert shown.count(f'title="{name}"') == 2
        assert shown.count(f">{_shortened(name)}<") == 2
        assert len(_shortened(name)) <= 29
        assert _shortened(name).endswith(f"number {number}")
    assert _shortened("owl") == "owl"


class Masks:
    """Pictures and masks."""

    def __init__(self, x, masks):
        self.arrays = {"x": x, "labels": masks}

    def __len__(self):
        return len(self.arrays["x"])

    def batch(self, indices):
        return {name: array[indices] for name, array in self.arrays.items()}


def test_masks_are_judged_by_their_pixels():
    """A model that says what the channels of the picture say, of which the second sample has two exchanged."""
    network = Network("pixels", [3, 4, 4])
    weights = network.weight("head.weight", np.eye(3).reshape(3, 3, 1, 1))
    program = burnish.compile(network.model(network.builder.op("Conv", network.input, weights)), metrics=("mean_iou",))
    masks = (np.arange(32).reshape(2, 4, 4) % 3).astype(np.int64)
    x = np.eye(3, dtype=np.float32)[masks].transpose(0, 3, 1, 2)
    x[1] = x[1, [0, 2, 1]]
    masks[0, 0, 0] = -100  # which the loss ignores
    model = model_of_session("the model", Session(program))
    judgement = judge(model, Masks(x, masks))
    assert judgement.of_pixels
    wrong = int((masks[1] > 0).sum())
    np.testing.assert_array_equal(judgement.confusion.sum(axis=1), np.bincount(masks[masks >= 0], minlength=3))
    assert judgement.confusion.trace() == 31 - wrong
    (example,) = judgement.worst
    assert example.index == 1
    assert {example.truth, example.said} == {"1", "2"}
    assert example.error == pytest.approx(wrong / 16)
    assert example.pixels.shape == (4, 3 * 4 + 2 * 2, 3)
    right, said = example.pixels[:, 6:10], example.pixels[:, 12:]
    np.testing.assert_array_equal((right != said).any(axis=2), masks[1] > 0)
    smaller = judge(model, Masks(x, masks[:, ::2, ::2]))
    assert smaller.confusion is None
    assert "is of another size than the masks" in smaller.missing


def test_masks_of_yes_or_no_are_judged_by_their_pixels():
    network = Network("pixels", [1, 4, 4])
    output = network.builder.op("Conv", network.input, network.weight("head.weight", np.ones((1, 1, 1, 1))))
    program = burnish.compile(network.model(output), loss="bce_with_logits", metrics=("mean_iou",))
    masks = (np.arange(32).reshape(2, 1, 4, 4) % 3 == 0).astype(np.float32)
    x = 2 * masks - 1
    x[1, 0, :2] = -1  # a no
    data = Masks(x, masks)
    data.arrays["targets"] = data.arrays.pop("labels")
    judgement = judge(model_of_session("the model", Session(program)), data)
    missed = int(masks[1, 0, :2].sum())
    assert judgement.of_pixels
    np.testing.assert_array_equal(judgement.confusion, [[(masks == 0).sum(), 0], [missed, masks.sum() - missed]])
    (example,) = judgement.worst
    assert (example.index, example.truth, example.said) == (1, "1", "0")


def test_stages_are_one_run(tmp_path):
    """The second begins its counts anew; the best epoch is one of the first's."""
    columns = ("step", "epoch", "samples", "seconds", "lr", "loss")
    rows = [dict(zip(columns, (step, 1 + step // 3, 8 * step, 0.5 * step, 0.1, 1 / step), strict=True)) for step in (1, 2, 3)]
    for number in (1, 2):
        table = tmp_path / "stages" / str(number) / "metrics.csv"
        table.parent.mkdir(parents=True)
        lines = [",".join(columns), *(",".join(map(repr, row.values())) for row in rows)]
        table.write_text("\n".join(lines) + "\n")
    stages = stages_before(tmp_path)
    assert [stage.name for stage in stages] == ["1", "2"]
    joined, best = with_stages(stages, rows, {"epoch": 2, "metric": "loss", "value": 0.1, "stage": 2})
    assert [row["step"] for row in joined] == [*range(1, 10)]
    assert [row["epoch"] for row in joined] == [1, 1, 2, 3, 3, 4, 5, 5, 6]
    assert joined[-1]["samples"] == 72
    assert joined[-1]["seconds"] == 4.5
    assert best["epoch"] == 4
    assert with_stages(stages, rows, {"epoch": 1, "metric": "loss", "value": 0.1})[1]["epoch"] == 5
    assert with_stages([], rows, None) == (rows, None)
