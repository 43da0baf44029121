"""Fine-tuning on values and on several labels: what is learned of which data, the head, units, figures, and the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish import losses
from burnish.data import open_dataset
from burnish.errors import ConfigurationError, DataError
from burnish.finetuning.labels import Labels, kind_of
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.preparation import Transfer, transfer
from burnish.models import create, mlp
from burnish.training import open_model
from burnish.training.html_report.contents import Judgement
from burnish.training.html_report.samples import judge
from burnish.training.predictions import read_answer
from burnish.training.trained_model import model_of_session
from oracles.small_networks import Network

TUNED = {"epochs": 1, "lr": 0.01, "threads": 1, "batch_size": 16}
SAMPLES = 48


def samples(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(SAMPLES, 4)).astype(np.float32)


def prices(x: np.ndarray) -> np.ndarray:
    return 300_000 + 90_000 * x[:, 0] - 20_000 * x[:, 1].astype(np.float64)


def small(classes: int = 3, activation: str | None = None) -> ir.Model:
    network = Network("small", [4])
    scores = network.dense("head", network.builder.op("Tanh", network.dense("first", network.input, 4, 8)), 8, classes)
    if activation is not None:
        scores = network.builder.op(activation, scores)
    return network.model(scores)


def made(model: Any, data: Any, **options: Any) -> Transfer:
    return transfer(model, data, FinetuneOptions(**options))[0]


def run(path: Path, x: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(path).run(None, {"x": x})[0]


@pytest.mark.parametrize(
    ("labels", "loss", "outputs", "kind"),
    [
        (np.array(["a", "b"]), None, 3, "classes"),
        (np.array([0.5, 1.0, 2.0]), None, 3, "values"),
        (np.array([0.0, 1.0, 2.0]), None, 3, "classes"),
        (np.array([0, 1, 2]), None, 1, "values"),
        (np.array([0, 1, 1]), None, 1, "classes"),
        (np.arange(100), None, 10, "values"),
        (np.arange(100), None, 100, "classes"),
        (np.arange(100) % 10, None, 3, "classes"),
        (np.array([True, False]), None, 3, "classes"),
        (np.array([[1, 0, 1], [0, 0, 1]]), None, 3, "questions"),
        (np.array([[1, 0, 0], [0, 0, 1]]), None, 3, "classes"),
        (np.array([[1.5, 0], [0, 2]]), None, 3, "values"),
        (np.arange(100), "cross_entropy", 10, "classes"),
        (np.array([0, 1, 2]), "huber:delta=2", 3, "values"),
        (np.array([0, 1, 1]), "binary_focal", 1, "questions"),
    ],
)
def test_labels_tell_what_is_learned(labels, loss, outputs, kind):
    asked = None if loss is None else losses.get(loss)
    assert kind_of(Labels(labels), asked, outputs)[0] == kind
    assert kind_of(Labels(None, ("tags",), True), None, outputs)[0] == "questions"
    assert kind_of(None, None, outputs)[0] == "classes"


@pytest.fixture(scope="module")
def priced(tmp_path_factory) -> burnish.Finetuned:
    folder = tmp_path_factory.mktemp("prices")
    x = samples()
    options = {**TUNED, "epochs": 40, "lr": 0.05, "seed": 1}
    return burnish.finetune(small(), (x, prices(x)), eval_data=(x, prices(x)), output=folder / "tuned.onnx", **options)


def test_values_are_learned_standardized_and_predicted_in_their_own_units(priced):
    x = samples()
    assert priced.notes[0].startswith("task: values, as the labels hold numbers with fractions: mean_squared_error of 'logits'")
    assert (
        "targets are standardized for training (mean 2.982e+05, standard deviation 8.403e+04), and the file gives"
        in priced.notes[0]
    )
    assert "say so (loss='cross_entropy'" in priced.notes[0]
    assert priced.notes[1].endswith("1 value; the file had 3")
    predicted = run(priced.path, x)
    assert predicted.shape == (SAMPLES, 1)
    error = np.abs(predicted[:, 0] - prices(x)).mean()
    assert error < 20_000
    assert priced.result.best["metric"] == "mean_absolute_error"
    opened = open_model(priced.path)
    figures = opened.evaluate(open_as_evaluated(opened, x))
    assert figures["mean_absolute_error"] == pytest.approx(error, rel=1e-5)
    spread = ((prices(x) - prices(x).mean()) ** 2).sum()
    assert figures["r2"] == pytest.approx(1 - ((predicted[:, 0] - prices(x)) ** 2).sum() / spread, abs=1e-5)
    assert figures["loss"] == pytest.approx(1 - figures["r2"], abs=1e-5)  # in units of the standard deviation
    answer = read_answer(opened)
    assert (answer.kind, answer.text()) == ("values", "output 'logits': trained with mean_squared_error")


def open_as_evaluated(opened, x: np.ndarray):
    from burnish.data import as_dataset

    return as_dataset((x, prices(x)), opened.to_evaluate)


def test_a_head_of_as_many_values_stays_as_it_is(priced, tmp_path):
    """Whatever the mean of other data is; and of another unit the head goes on to give standardized values."""
    x = samples()
    before = run(priced.path, x)
    options = {**TUNED, "lr": 1e-12}
    same = burnish.finetune(priced.path, (x[:20], prices(x)[:20]), output=tmp_path / "same.onnx", **options)
    assert same.notes[1].endswith("stays, as the file gives 1 value for each sample")
    np.testing.assert_allclose(run(same.path, x), before, rtol=1e-5)
    assert [node.op_type for node in onnx.load(same.path).graph.node][-4:] == ["Constant", "Mul", "Constant", "Add"]
    assert sum(node.op_type == "Mul" for node in onnx.load(same.path).graph.node) == 1
    thousands = burnish.finetune(priced.path, (x, prices(x) / 1000), output=tmp_path / "thousands.onnx", **options)
    np.testing.assert_allclose(run(thousands.path, x), before / 1000, rtol=1e-4)
    new = burnish.finetune(priced.path, (x, prices(x)), head="new", output=tmp_path / "new.onnx", **options)
    assert "re-initialized" in new.notes[1]


@pytest.mark.parametrize("activation", ["Softmax", pytest.param("Sigmoid", marks=pytest.mark.slow)])
def test_what_makes_probabilities_is_taken_out_for_values(activation, tmp_path):
    x = samples()
    tuned = burnish.finetune(small(1, activation), (x, prices(x)), output=tmp_path / "tuned.onnx", **TUNED)
    assert activation not in {node.op_type for node in onnx.load(tuned.path).graph.node}
    assert abs(run(tuned.path, x).mean() - 300_000) < 60_000


def test_what_bounds_values_stays_and_they_are_learned_as_they_are():
    x = samples()
    prepared = made(small(1, "Relu"), (x, np.abs(x[:, 0])))
    assert "targets are learned as they are, as something behind the head bounds" in prepared.notes[0]
    assert prepared.task.loss == losses.get("mse")


def houses(folder: Path, rows: int = SAMPLES) -> Path:
    x = samples()[:rows]
    lines = ["area,rooms,price,rent,garden,tags"]
    for first, second, *_ in x:
        tags = ";".join(tag for tag, there in (("big", first > 0), ("old", second > 0.5)) if there)
        lines.append(f"{1e4 * first:.1f},{second:.3f},{3e5 + 9e4 * first:.0f},{900 + 100 * second:.0f},{int(first > 0)},{tags}")
    (folder / "houses.csv").write_text("\n".join(lines) + "\n")
    return folder / "houses.csv"


def columns_of(path: Path, *names: str) -> Path:
    header, *lines = [line.split(",") for line in path.read_text().splitlines()]
    kept = [header.index(name) for name in names]
    out = path.with_name("-".join(names) + ".csv")
    out.write_text("\n".join(",".join(line[place] for place in kept) for line in (header, *lines)) + "\n")
    return out


def judged_in_training(file: Path, data: Path) -> Judgement:
    """What a report says of a run that begins with a file."""
    opened = open_model(file)
    session = burnish.Session(burnish.compile(file, loss=opened.options["loss"], optimizer="sgd"))
    model = model_of_session("the run", session)
    return judge(model, open_dataset(data, model.to_evaluate))


def test_several_columns_are_several_values(tmp_path):
    path = columns_of(houses(tmp_path), "area", "price", "rooms", "rent")
    tuned = burnish.finetune(
        create("mlp", classes=2, input_shape=(2,)),
        path,
        label="price,rent",
        loss="huber",
        output=tmp_path / "tuned.onnx",
        **TUNED,
    )
    assert tuned.notes[0].startswith("task: values of 'price', 'rent', as huber compares values: huber of 'logits'")
    assert any("takes raw columns: 'x', one row for each sample, in the order area, rooms" in note for note in tuned.notes)
    raw = np.array([[1e4, 0.5], [-2e4, np.nan]], np.float32)
    predicted = run(tuned.path, raw)
    assert np.isfinite(predicted).all()
    assert (np.abs(predicted.mean(axis=0) / [3e5, 900] - 1) < 1).all()
    opened = open_model(tuned.path)
    figures = opened.evaluate(open_dataset(path, opened.to_evaluate))  # which columns are labels, the file says
    assert {"loss", "mean_absolute_error", "r2"} <= figures.keys()
    assert opened.described.labels.columns == ("price", "rent")
    with burnish.Predictor(tuned.path) as predictor:
        rows = predictor.predict(path)
        one = predictor.predict({"area": 1e4, "rooms": 0.5})
    assert len(rows) == SAMPLES
    np.testing.assert_allclose(one.values, predicted[0], rtol=1e-6)
    judged = judged_in_training(tuned.path, path)
    assert (judged.missing, len(judged.worst), judged.confusion) == ("", 12, None)


@pytest.mark.parametrize(
    "way", [pytest.param("columns", marks=pytest.mark.slow), "separator", pytest.param("lists", marks=pytest.mark.slow), "arrays"]
)
def test_labels_of_yes_or_no(way, tmp_path):
    x = samples()
    right = np.stack([x[:, 0] > 0, x[:, 1] > 0.5], axis=1).astype(np.int64)
    data: Any = (x, right)
    options: dict[str, Any] = {}
    names = ("big", "old")
    if way == "lists":
        data = (x, [[name for name, is_there in zip(names, row, strict=True) if is_there] for row in right])
    if way in ("columns", "separator"):
        data = {f"feature{index}": x[:, index] for index in range(4)}
        data |= dict(zip(names, right.T, strict=True)) if way == "columns" else {}
        options = {"label": "big,old"}
    if way == "separator":
        data["tags"] = np.array([";".join(name for name, there in zip(names, row, strict=True) if there) for row in right])
        options = {"label": "tags", "label_separator": ";"}
    tuned = burnish.finetune(small(), data, output=tmp_path / "tuned.onnx", **{**TUNED, "lr": 0.5, "epochs": 12}, **options)
    assert tuned.notes[0].startswith("task: yes or no for each of 2 labels")
    assert tuned.notes[1].endswith("re-initialized for 2 scores; the file had 3")
    assert {"f1:macro", "accuracy"} <= tuned.result.metrics.keys()
    opened = open_model(tuned.path)
    answer = read_answer(opened)
    assert (answer.kind, answer.activation) == ("questions", "sigmoid")
    numbers = answer.numbers(run(tuned.path, x))
    assert ((numbers > 0.5) == right).mean() > 0.8
    called = names if way != "arrays" else ("0", "1")
    with burnish.Predictor(tuned.path) as predictor:
        for prediction, row in zip(predictor.predict(x), numbers, strict=True):
            assert prediction.label == tuple(name for name, p in zip(called, row, strict=True) if p > 0.5)


def test_labels_of_yes_or_no_are_evaluated_and_reported(tmp_path):
    path = columns_of(houses(tmp_path), "area", "rooms", "tags")
    tuned = burnish.finetune(
        create("mlp", classes=2, input_shape=(2,)),
        path,
        label="tags",
        label_separator=";",
        output=tmp_path / "tuned.onnx",
        **TUNED,
    )
    opened = open_model(tuned.path)
    assert opened.described.classes == ("big", "old")
    dataset = open_dataset(path, opened.to_evaluate)  # the separator too is in the file
    assert 0 <= opened.evaluate(dataset)["f1:macro"] <= 1
    judged = judged_in_training(tuned.path, path)
    assert judged.missing == ""
    assert {example.truth for example in judged.worst} <= {"none", "big", "old", "big, old"}
    path.write_text(path.read_text().replace("big", "huge", 1))
    with pytest.raises(DataError, match="label 'huge' is not among those that are trained: big, old; remove it"):
        open_dataset(path, opened.to_evaluate)


def test_a_softmax_becomes_a_sigmoid_for_labels_of_yes_or_no(tmp_path):
    x = samples()
    tuned = burnish.finetune(small(3, "Softmax"), (x, (x[:, :3] > 0).astype(int)), output=tmp_path / "tuned.onnx", **TUNED)
    kinds = [node.op_type for node in onnx.load(tuned.path).graph.node]
    assert ("Sigmoid" in kinds, "Softmax" in kinds) == (True, False)
    assert read_answer(open_model(tuned.path)).text().startswith("output 'logits': probabilities, by Sigmoid")


@dataclass
class Columns:
    """The columns of a ``datasets.Dataset`` as lists, as it gives them."""

    columns: Mapping[str, list[Any]]
    features: Mapping[str, Any]

    @property
    def column_names(self) -> list[str]:
        return [*self.columns]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: str) -> list[Any]:
        return self.columns[key]


def test_a_data_set_of_hugging_face_with_lists_of_labels_or_values():
    @dataclass
    class ClassLabel:
        names: list[str]

    @dataclass
    class Sequence:
        feature: ClassLabel

    x = [row.tolist() for row in samples()]
    lists = [[0], [0, 2], []] * (SAMPLES // 3)
    source = Columns({"x": x, "label": lists}, {"label": Sequence(ClassLabel(["cat", "dog", "owl"]))})
    prepared, dataset = transfer(small(), source)
    assert prepared.notes[0].startswith("task: yes or no for each of 3 labels (cat, dog, owl)")
    assert dataset.batch(np.arange(3))["targets"].tolist() == [[1, 0, 0], [1, 0, 1], [0, 0, 0]]
    values = Columns({"x": x, "score": [float(row[0]) for row in x]}, {})
    prepared, dataset = transfer(small(), values, FinetuneOptions(label="score"))
    assert prepared.notes[0].startswith("task: values of 'score', as the label 'score' holds numbers")
    assert dataset.batch(np.arange(2))["targets"].shape == (2, 1)


def test_what_cannot_be_is_named(tmp_path):
    x, path = samples(), houses(tmp_path)
    model = create("mlp", classes=2, input_shape=(3,))
    with pytest.raises(DataError, match="data: all samples have the target 5, and nothing can be learned"):
        made(small(), (x, np.full(SAMPLES, 5.0)), loss="mse")
    with pytest.raises(DataError, match=r"no column 'prize' \(did you mean 'price'\?\); choose among area"):
        made(model, path, label="price,prize")
    with pytest.raises(DataError, match="the label columns price,price name one twice"):
        made(model, path, label="price,price")
    with pytest.raises(DataError, match="column 'tags' is one of several label columns and holds text"):
        made(model, path, label="price,tags", loss="mse", label_separator=";")
    with pytest.raises(DataError, match=r"the label columns 'price', 'rent' are values, .* and the loss compares with one class"):
        made(model, columns_of(path, "area", "rooms", "garden", "price", "rent"), label="price,rent", loss="cross_entropy")
    with pytest.raises(DataError, match=r"the labels are text, .* where a text holds several labels, say what stands between"):
        made(model, columns_of(path, "area", "rooms", "rent", "tags"), label="tags", loss="bce_with_logits", missing="drop")
    with pytest.raises(
        ConfigurationError, match=r"values are to be learned .* has shape .*: fine-tuning learns one row of values"
    ):
        made(sequences(), (np.zeros((8, 5, 4), np.float32), np.zeros((8, 5, 3))), loss="mse")
    with pytest.raises(DataError, match=r"the labels are lists, and the loss compares with one class"):
        made(small(), (x, [["a"], ["a", "b"]] * (SAMPLES // 2)), loss="cross_entropy")


def sequences() -> ir.Model:
    network = Network("sequences", [5, 4])
    return network.model(network.dense("head", network.input, 4, 3))


def test_a_classifier_of_names_that_learns_values_says_nothing_of_classes():
    x = samples()
    model = mlp((4,), 3)
    model.metadata_props["burnish.classes"] = '["a", "b", "c"]'
    assert "burnish.classes" not in made(model, (x, prices(x))).model.metadata_props


def test_values_in_a_file_of_their_own(tmp_path):
    x = samples()
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "prices.npy", prices(x))
    prepared = made(small(), tmp_path / "x.npy", label=str(tmp_path / "prices.npy"))
    assert prepared.notes[0].startswith("task: values, as the labels hold numbers with fractions")
