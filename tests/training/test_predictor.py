"""``Predictor``, ``Prediction`` and ``Finetuned.predict``: what is predicted of what, and what is refused."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

import burnish
from burnish.errors import ConfigurationError, DataError, DataWarning, EngineError, InputError
from oracles.small_tokenizers import text_of, word_tokenizer
from oracles.tiny_pictures_models import SSD_TEXT, small_ssd, small_unet

pytestmark = pytest.mark.filterwarnings("ignore::burnish.errors.NothingLearnedWarning")
GENERATOR = np.random.default_rng(0)
PICTURES = GENERATOR.integers(0, 256, (3, 6, 5, 3), dtype=np.uint8)
X = GENERATOR.normal(size=(5, 4)).astype(np.float32)


def exported(model, path: Path, classes: str | None = None, **objective) -> Path:
    """A file as a run exports it, that was not trained."""
    with burnish.Session(burnish.compile(model, optimizer="sgd", **objective)) as session:
        if classes is not None:
            session.metadata["burnish.classes"] = classes
        session.export(path)
    return path


def run(path: Path, x: np.ndarray) -> np.ndarray:
    """The first output of a file."""
    return onnxruntime.InferenceSession(path).run(None, {"x": x})[0]


def softmax(logits: np.ndarray) -> np.ndarray:
    exponential = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    return exponential / exponential.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("predictor")
    for number, pixels in enumerate(PICTURES):
        (folder / "photos").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
    cnn = burnish.models.create("cnn", classes=3, input_shape=(3, 6, 5))
    exported(cnn, folder / "photos.onnx", '["ant", "bee", "cat"]', loss="cross_entropy")
    mlp = burnish.models.create("mlp", classes=3, input_shape=(4,))
    exported(mlp, folder / "questions.onnx", '["red", "round", "big"]', loss="bce_with_logits")
    exported(mlp, folder / "values.onnx", loss="mse")
    return folder


@pytest.fixture(scope="module")
def photos(folder):
    with burnish.Predictor(folder / "photos.onnx") as predictor:
        yield predictor


@pytest.fixture(scope="module")
def expected(folder) -> np.ndarray:
    """Probabilities of the three photos, [3, 3]."""
    return softmax(run(folder / "photos.onnx", PICTURES.transpose(0, 3, 1, 2) / np.float32(255)))


def test_a_photo_gives_one_prediction(photos, folder, expected):
    found = photos.predict(folder / "photos" / "1.png")
    np.testing.assert_allclose(found.scores, expected[1], rtol=1e-5)
    best = int(expected[1].argmax())
    assert (found.label, found.classes) == (("ant", "bee", "cat")[best], ("ant", "bee", "cat"))
    assert found.score == pytest.approx(expected[1, best], rel=1e-5)
    assert found.name == str(folder / "photos" / "1.png")
    assert found.outputs["logits"].shape == (3,)
    assert (found.kind, found.values, found.boxes, found.mask) == ("class", None, None, None)
    assert str(found) == f"{found.label} {found.score:.4f}"
    assert repr(found).startswith("Prediction(name='")
    assert repr(found).endswith(f"label={found.label!r}, score={found.score:.4g})")
    assert found.top(2) == sorted(zip(found.classes, found.scores, strict=True), key=lambda pair: -pair[1])[:2]
    assert found.as_dict(1) == {
        "name": found.name,
        "label": found.label,
        "score": found.score,
        "scores": {found.label: found.score},
    }
    with pytest.raises(AttributeError):
        found.label = "dog"


@pytest.mark.parametrize(
    "several",
    [
        lambda folder: folder / "photos",
        lambda folder: str(folder / "photos"),
        lambda folder: sorted((folder / "photos").iterdir()),
        lambda folder: [str(path) for path in sorted((folder / "photos").iterdir())],
        lambda folder: [Image.open(path) for path in sorted((folder / "photos").iterdir())],
        lambda folder: PICTURES,
        lambda folder: list(PICTURES),
        lambda folder: PICTURES.transpose(0, 3, 1, 2),
        lambda folder: PICTURES.transpose(0, 3, 1, 2) / 255,
        lambda folder: {"x": PICTURES},
    ],
    ids=["folder", "text", "paths", "names", "images", "bytes", "list", "channels first", "numbers", "by name"],
)
def test_several_photos_give_a_list_in_their_order(photos, folder, expected, several):
    found = photos.predict(several(folder), batch_size=2)
    assert isinstance(found, list)
    np.testing.assert_allclose([each.scores for each in found], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "one",
    [lambda pixels: pixels, lambda pixels: pixels.transpose(2, 0, 1) / 255, Image.fromarray, lambda pixels: {"x": pixels}],
    ids=["bytes", "numbers", "image", "by name"],
)
def test_a_photo_in_memory_is_one_sample(photos, expected, one):
    np.testing.assert_allclose(photos.predict(one(PICTURES[2])).scores, expected[2], rtol=1e-5)


def test_a_photo_in_memory_is_resized_as_its_file_is(photos, folder):
    large = np.kron(PICTURES[0], np.ones((3, 4, 1), np.uint8))
    Image.fromarray(large).save(folder / "large.png")
    wanted = photos.predict(folder / "large.png").scores
    for given in (large, large.transpose(2, 0, 1), Image.fromarray(large)):
        np.testing.assert_allclose(photos.predict(given).scores, wanted, rtol=1e-6)
    np.testing.assert_allclose(next(each.scores for each in photos.predict([large, PICTURES[0]])), wanted, rtol=1e-6)


def test_one_photo_in_a_collection_gives_a_list_of_one(photos, folder):
    (folder / "alone").mkdir()
    Image.fromarray(PICTURES[0]).save(folder / "alone" / "a.png")
    for given in (folder / "alone", [folder / "alone" / "a.png"], PICTURES[:1], [PICTURES[0]]):
        assert [each.label for each in photos.predict(given)] == [photos.predict(PICTURES[0]).label]


def test_files_of_a_folder_that_cannot_be_read_are_named_and_named_files_are_refused(photos, folder):
    (folder / "mixed").mkdir()
    Image.fromarray(PICTURES[0]).save(folder / "mixed" / "a.png")
    (folder / "mixed" / "b.png").write_bytes(b"no image")
    with pytest.warns(DataWarning, match=r"1 of 2 images cannot be read and are left out: .*b\.png"):
        assert [Path(each.name).name for each in photos.predict(folder / "mixed")] == ["a.png"]
    with pytest.raises(DataError, match=r"b\.png: damaged, or no image"):
        photos.predict(sorted((folder / "mixed").iterdir()))


def test_every_question_is_answered(folder):
    with burnish.Predictor(folder / "questions.onnx") as predictor:
        wanted = 1 / (1 + np.exp(-run(folder / "questions.onnx", X)))
        for found, row in zip(predictor.predict(X), wanted, strict=True):
            np.testing.assert_allclose(found.scores, row, rtol=1e-5)
            assert found.label == tuple(np.array(["red", "round", "big"])[row > 0.5])
            assert found.score == pytest.approx(row.max(), rel=1e-5)
            assert found.as_dict()["label"] == list(found.label)


@pytest.mark.parametrize("given", [X[1], X[1].tolist(), {"x": X[1]}, {"a": X[1, 0], "b": X[1, 1], "c": X[1, 2], "d": X[1, 3]}])
def test_values_of_one_sample(folder, given):
    with burnish.Predictor(folder / "values.onnx") as predictor:
        found = predictor.predict(given)
    assert (found.label, found.score, found.scores, found.kind) == (None, None, None, "values")
    np.testing.assert_allclose(found.values, run(folder / "values.onnx", X[1:2])[0], rtol=1e-5)
    assert found.as_dict() == {"name": "0", "values": found.values.tolist()}
    assert str(found) == f"[{', '.join(f'{value:.4f}' for value in found.values)}]"


@pytest.mark.parametrize("label", ["", ",label"])
def test_rows_of_a_table_and_of_columns(folder, tmp_path, label):
    lines = [",".join(map(repr, row)) + (",7" if label else "") for row in X.tolist()]
    (tmp_path / "table.csv").write_text("\n".join([f"a,b,c,d{label}", *lines]) + "\n")
    columns = {name: X[:, place] for place, name in enumerate("abcd")} | ({"label": np.full(5, 7)} if label else {})
    rows = [{name: column[row] for name, column in columns.items()} for row in range(5)]
    with burnish.Predictor(folder / "values.onnx") as predictor:
        wanted = [each.values for each in predictor.predict(X)]
        for given in (tmp_path / "table.csv", columns, rows, X.tolist(), list(X)):
            np.testing.assert_allclose([each.values for each in predictor.predict(given)], wanted, rtol=1e-5)
        both = predictor.predict([tmp_path / "table.csv", tmp_path / "table.csv"])
    assert [each.name for each in both][4:6] == [f"{tmp_path / 'table.csv'}:4", f"{tmp_path / 'table.csv'}:0"]


def test_boxes_are_in_pixels_of_the_picture(tmp_path):
    exported(
        small_ssd(),
        tmp_path / "ssd.onnx",
        '["rectangle", "circle"]',
        loss=SSD_TEXT,
        outputs=["boxes", "scores"],
        metrics=["coco_map"],
    )
    wide = GENERATOR.integers(0, 256, (40, 80, 3), dtype=np.uint8)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    read = np.asarray(Image.fromarray(wide).resize((32, 32), Image.Resampling.BILINEAR))
    with burnish.Predictor(tmp_path / "ssd.onnx", score=0.6) as predictor:
        found = predictor.predict(tmp_path / "wide.png")
        assert found.boxes.shape == (len(found.scores), 4) == (len(found.label), 4)
        assert len(found.label)
        assert {*found.label} <= {"rectangle", "circle"}
        assert (np.diff(found.scores) <= 0).all()
        assert found.scores.min() >= 0.6
        assert found.score == found.scores[0]
        assert {*found.outputs} == {"boxes", "scores"}
        np.testing.assert_allclose(predictor.predict(wide).boxes, found.boxes)
        small = predictor.predict(read)  # as the model reads it: in pixels of 32 x 32
        np.testing.assert_allclose(small.boxes * [2.5, 1.25, 2.5, 1.25], found.boxes, rtol=1e-4)
        first = found.as_dict()["boxes"][0]
        assert (first["label"], first["score"], first["box"]) == (found.label[0], found.scores[0], found.boxes[0].tolist())
    with burnish.Predictor(tmp_path / "ssd.onnx", score=1.0) as predictor:
        none = predictor.predict(wide)
    assert (none.label, none.score, none.boxes.shape, str(none)) == ((), None, (0, 4), "no boxes")


def test_classes_of_pixels(tmp_path):
    path = exported(small_unet(classes=3), tmp_path / "unet.onnx", '["sky", "tree", "road"]', loss="cross_entropy")
    picture = GENERATOR.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    with burnish.Predictor(path) as predictor:
        found = predictor.predict(picture)
    mask = run(path, picture.transpose(2, 0, 1)[None] / np.float32(255))[0].argmax(axis=0)
    np.testing.assert_array_equal(found.mask, mask)
    np.testing.assert_allclose(found.scores, np.bincount(mask.reshape(-1), minlength=3) / 1024)
    assert (found.label, found.score) == (found.classes[found.scores.argmax()], found.scores.max())


def test_outputs_that_nothing_explains_are_given_as_they_are(tmp_path):
    nodes = [onnx.helper.make_node("Relu", ["x"], ["a"]), onnx.helper.make_node("Neg", ["x"], ["b"])]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4]) for name in "xab"]
    graph = onnx.helper.make_graph(nodes, "two", values[:1], values[1:])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), tmp_path / "two.onnx"
    )
    with burnish.Predictor(tmp_path / "two.onnx") as predictor:
        found = predictor.predict(X[0])
        assert (found.kind, found.label, str(found)) == ("outputs", None, "a [4], b [4]")
        np.testing.assert_array_equal(found.outputs["b"], -X[0])
        np.testing.assert_allclose(found.as_dict()["outputs"]["b"], -X[0])
    with burnish.Predictor(tmp_path / "two.onnx", outputs="b") as predictor:
        np.testing.assert_allclose(predictor.predict(X[0]).values, -X[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the list is empty, and holds no sample to predict: give a path"),
        ((), "the list is empty"),
        ("nothing.png", r"nothing\.png: no such file or folder"),
        ([Path("nothing.png")], r"nothing\.png: no such file or folder"),
        (np.zeros((4, 6, 5), np.float32), r"'x' wants samples of shape \[3, 6, 5\], and those of the data have shape \[6, 5\]"),
        (
            np.zeros((2, 4, 6, 5), np.float32),
            r"'x' wants samples of shape \[3, 6, 5\], and those of the data have shape \[4, 6, 5\]",
        ),
        (np.zeros((0, 3, 6, 5), np.float32), "the data set is empty"),
        ({"z": PICTURES}, "no array for the model's input 'x'; there is 'z'"),
        ({}, "no array for the model's input 'x'; there is none"),
        (None, "no samples are made of a value of type NoneType: give a path"),
        (["a.png", PICTURES[0]], "a list of ndarray, str: the samples of a list are of one kind"),
        ([np.zeros((3, 6, 5)), np.zeros((3, 7, 5))], r"different shapes, \[3, 6, 5\], \[3, 7, 5\]: give arrays of one shape"),
    ],
)
def test_what_is_no_photo_is_refused(photos, given, message):
    with pytest.raises(DataError, match=message):
        photos.predict(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((2, 5), np.float32), r"'x' wants samples of shape \[4\], and those of the data have shape \[5\]"),
        ({"a": [1.0], "b": [1.0]}, r"'x' wants samples of shape \[4\]"),
        ({"a": [1.0, 2.0], "b": [1.0]}, "the columns differ in their number of rows: 'a' 2, 'b' 1"),
        ([{"a": 1}, {"b": 1}], "row 1 has the columns b, and row 0 a"),
        ({"a": ["one"], "b": [1], "c": [1], "d": [2]}, "column 'a' holds text"),
        ([[1, 2, 3, np.nan]], "holds a NaN or infinite value for input 'x'"),
    ],
)
def test_what_is_no_row_is_refused(folder, given, message):
    with burnish.Predictor(folder / "values.onnx") as predictor, pytest.raises(DataError, match=message):
        predictor.predict(given)


def test_options_out_of_range_and_closed_predictors_are_refused(folder):
    path = folder / "values.onnx"
    with pytest.raises(ConfigurationError, match="there is no 'relu'; choose among softmax, sigmoid, none"):
        burnish.Predictor(path, activation="relu")
    with pytest.raises(ConfigurationError, match=r"score=2: give a number from 0 to 1"):
        burnish.Predictor(path, score=2)
    with pytest.raises(ConfigurationError, match=r"Predictor has no option 'thread' \(did you mean 'threads'\?\)"):
        burnish.Predictor(path, thread=1)
    with pytest.raises(ConfigurationError, match="opens a file or the folder of a run, not a int: give its path"):
        burnish.Predictor(3)
    with pytest.raises(EngineError, match="threads=0: give a whole number from 1"):
        burnish.Predictor(path, threads=0)
    predictor = burnish.Predictor(path, engine="reference")
    with pytest.raises(ConfigurationError, match="batch_size=0: give a whole number of 1 or more"):
        predictor.predict(X, batch_size=0)
    predictor.close()
    predictor.close()
    assert repr(predictor) == f"Predictor({str(path)!r}, closed)"
    with pytest.raises(EngineError, match=r"values\.onnx' is closed: open another one \(burnish\.Predictor\)"):
        predictor.predict(X)


@pytest.mark.parametrize("engine", ["onnxruntime", "reference", pytest.param("torch", marks=pytest.mark.slow)])
def test_engines_and_threads_pass_through(folder, engine):
    with burnish.Predictor(folder / "values.onnx", engine=engine, threads=1) as predictor:
        np.testing.assert_allclose(predictor.predict(X)[3].values, run(folder / "values.onnx", X)[3], rtol=1e-5)


def test_a_program_and_the_figures_of_labelled_data(folder, tmp_path):
    program = burnish.compile(folder / "values.onnx", loss="mse")
    program.save(tmp_path / "program")
    targets = np.zeros((5, 3), np.float32)
    mean = float((run(folder / "values.onnx", X).astype(float) ** 2).mean())
    np.savez(tmp_path / "data.npz", x=X, y=targets)
    for path in (tmp_path / "program", folder / "values.onnx"):
        with burnish.Predictor(path, threads=1) as predictor:
            np.testing.assert_allclose(predictor.predict(X[0]).values, run(folder / "values.onnx", X)[0], rtol=1e-5)
            for data in ((X, targets), {"x": X, "targets": targets}, tmp_path / "data.npz"):
                assert predictor.evaluate(data, batch_size=2)["loss"] == pytest.approx(mean, rel=1e-5)
    plain = onnx.load(folder / "values.onnx")
    del plain.metadata_props[:]
    onnx.save(plain, tmp_path / "plain.onnx")
    with burnish.Predictor(tmp_path / "plain.onnx") as predictor, pytest.raises(ConfigurationError, match="name one"):
        predictor.evaluate((X, targets))
    with burnish.Predictor(tmp_path / "plain.onnx", loss="mse", metrics=["mae"]) as predictor:
        assert {*predictor.evaluate((X, targets))} == {"loss", "mean_absolute_error"}


def test_finetuned_predicts_and_evaluates_as_it_was_trained(folder, tmp_path):
    lines = [
        f"{'gold' if number % 3 else 'tin'},{('Ulm', 'Rom')[number % 2]},{row[0]!r},{row[1]!r}"
        for number, row in enumerate(X.tolist() * 4)
    ]
    (tmp_path / "people.csv").write_text("\n".join(["plan,city,age,height", *lines]) + "\n")
    (tmp_path / "new.csv").write_text("city,age,height\nUlm,2.0,0.5\n")
    model = burnish.models.create("mlp", classes=2, input_shape=(4,))
    tuned = burnish.finetune(
        model, tmp_path / "people.csv", label="plan", epochs=2, lr=0.1, threads=1, batch_size=8, output=tmp_path / "tuned.onnx"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (new,) = tuned.predict(tmp_path / "new.csv")
        one = tuned.predict({"city": "Ulm", "age": 2.0, "height": 0.5})
        figures = tuned.evaluate(tmp_path / "people.csv")
        found = tuned.predict(str(tmp_path / "people.csv"), batch_size=3)
    np.testing.assert_allclose(new.scores, one.scores, rtol=1e-6)
    assert new.classes == ("gold", "tin")
    right = np.mean([each.label == line.partition(",")[0] for each, line in zip(found, lines, strict=True)])
    assert figures["accuracy"] == pytest.approx(right)
    with pytest.warns(DataWarning, match=r"column 'city' hold categories that training did not have \('Paris'\)"):
        tuned.predict({"city": "Paris", "age": 2.0, "height": 0.5})
    with pytest.raises(DataError, match="no column 'city', which the model was trained on; the columns are age, height"):
        tuned.predict({"age": 2.0, "height": 0.5})
    assert tuned.predictor is tuned.predictor
    assert "opening" not in repr(tuned)


def test_missing_values_in_memory_are_filled_as_those_of_a_file(tmp_path):
    lines = [
        f"{'' if number % 7 == 0 else number % 10},{('Ulm', 'Rom')[number % 2]},{('tin', 'gold')[number % 3 > 1]}"
        for number in range(30)
    ]
    (tmp_path / "people.csv").write_text("\n".join(["age,city,plan", *lines]) + "\n")
    (tmp_path / "new.csv").write_text("age,city\n,Ulm\n4,Rom\n")
    model = burnish.models.create("mlp", classes=2, input_shape=(3,))
    options = {"epochs": 1, "lr": 0.1, "threads": 1, "batch_size": 8}
    tuned = burnish.finetune(model, tmp_path / "people.csv", label="plan", output=tmp_path / "tuned.onnx", **options)
    with pytest.warns(DataWarning, match=r"new\.csv: missing values are filled: 1 of 'age' by"):
        wanted = [each.scores for each in tuned.predict(tmp_path / "new.csv")]
    rows = [{"age": None, "city": "Ulm"}, {"age": 4, "city": "Rom"}]
    for given in (
        rows,
        {"age": [None, 4], "city": ["Ulm", "Rom"]},
        Frame({"age": np.array([np.nan, 4]), "city": ["Ulm", "Rom"]}),
    ):
        with pytest.warns(DataWarning, match="data: missing values are filled: 1 of 'age' by"):
            np.testing.assert_allclose([each.scores for each in tuned.predict(given)], wanted, rtol=1e-5)
    with pytest.warns(DataWarning, match="filled: 1 of 'age'"):
        np.testing.assert_allclose(tuned.predict(rows[0]).scores, wanted[0], rtol=1e-5)
    assert [str(each) for each in tuned.predict({"age": [4], "city": ["Rom"]})] == [str(tuned.predict(rows[1]))]
    whole = burnish.models.create("mlp", classes=2, input_shape=(2,))
    data = {"x": X[:, :2], "labels": np.arange(5) % 2}
    without = burnish.finetune(whole, data, output=tmp_path / "without.onnx", **options)
    with pytest.raises(DataError, match=r"row 1: .*'b'.*has no value"):
        without.predict({"a": [1.0, 2.0], "b": [1.0, None]})


def test_the_docstring_of_a_predictor_names_every_option():
    arguments = inspect.getdoc(burnish.Predictor).partition("Args:\n")[2].partition("\nRaises:")[0]
    named = [name for line in re.findall(r"^    ([\w, ]+):", arguments, re.MULTILINE) for name in line.split(", ")]
    assert {*named} == {"path", *inspect.signature(burnish.Predictor).parameters}
    assert {"engine", "threads"} <= {*named}


def test_the_public_names_are_there():
    assert {"Predictor", "Prediction"} <= {*dir(burnish)}
    assert burnish.Prediction.__module__ == burnish.Predictor.__module__ == "burnish.training.predictor"


def test_a_session_predicts_an_array(folder):
    program = burnish.compile(folder / "values.onnx", loss="mse")
    with burnish.Session(program) as session:
        (name,) = session.predict({"x": X})
        np.testing.assert_array_equal(session.predict(X)[name], session.predict({"x": X})[name])
        np.testing.assert_array_equal(session.predict(X.tolist())[name], session.predict(X)[name])
        with pytest.raises(
            InputError, match=r"The input 'x' has 1 dimensions, and the program takes 2: expected shape \[.*, 4\], got \[4\]"
        ):
            session.predict(X[0])


def test_an_array_for_several_inputs_is_an_error_that_names_them():
    names = ("left", "right")
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 2]) for name in (*names, "y")]
    nodes = [onnx.helper.make_node("Mul", ["left", "w"], ["a"]), onnx.helper.make_node("Add", ["a", "right"], ["y"])]
    weight = onnx.numpy_helper.from_array(np.ones(2, np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "two", values[:2], values[2:], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    with burnish.Session(burnish.compile(model, loss="mse")) as session:
        message = r"has 2 inputs, 'left' \(float32 of shape \[batch, 2\]\), 'right' .* was given a ndarray: give a dict of arrays"
        with pytest.raises(InputError, match=message):
            session.predict(np.zeros((3, 2), np.float32))
        assert session.predict({"left": np.zeros((3, 2), np.float32), "right": np.zeros((3, 2), np.float32)})["y"].shape == (3, 2)


def word_model(path: Path) -> burnish.finetuning.Finetuned:
    """A classifier of texts of words w0 ... w19, trained a little; its tokenizer is beside it."""
    texts = [text_of(*GENERATOR.integers(0, 10, 4) + 10 * (number % 2)) for number in range(24)]
    model = burnish.models.create("transformer", classes=2, input_shape=(8,), vocabulary=25)
    options = {"epochs": 1, "lr": 0.01, "batch_size": 8, "threads": 1}
    data = texts, ["low", "high"] * 12
    tuned = burnish.finetune(model, data, text={"tokenizer": word_tokenizer()}, output=path / "texts.onnx", **options)
    (path / "tokenizer.json").write_text(word_tokenizer().to_str())
    return tuned


def test_texts_are_read_by_the_tokenizer_that_was_given_or_lies_beside_the_file(tmp_path):
    tuned = word_model(tmp_path)
    one = tuned.predict(text_of(1, 2))
    assert one.name == "w1 w2"
    assert one.label in one.classes == ("high", "low")
    (tmp_path / "lines.txt").write_text("w1 w2\nw11 w12 w13\n")
    with burnish.Predictor(tmp_path / "texts.onnx") as predictor:
        assert str(predictor.predict("w1 w2")) == str(one)
        for given in (
            ["w1 w2", "w11 w12 w13"],
            tmp_path / "lines.txt",
            {"text": ["w1 w2", "w11 w12 w13"]},
            [tmp_path / "lines.txt"],
        ):
            found = predictor.predict(given)
            np.testing.assert_allclose(found[0].scores, one.scores, rtol=1e-5)
            assert len(found) == 2
        assert str(predictor.predict({"text": "w1 w2", "label": "low"})) == str(one)
        assert [str(each) for each in predictor.predict([{"text": "w1 w2"}, {"text": "w1 w2"}])] == [str(one)] * 2
        assert [each.name for each in predictor.predict([tmp_path / "lines.txt", "w3", "w4"])][1:] == [
            f"{tmp_path / 'lines.txt'}:1",
            "w3",
            "w4",
        ]
        assert predictor.evaluate((["w1", "w11"], ["low", "high"])).keys() == {"loss", "accuracy"}
        with pytest.raises(DataError, match=r"reviews\.csv: no such file or folder"):
            predictor.predict("reviews.csv")
        with pytest.warns(DataWarning, match="of 1 texts, 1 had more than 8 tokens, and lost the rest"):
            predictor.predict(text_of(*range(10)))
    (tmp_path / "tokenizer.json").unlink()
    with (
        burnish.Predictor(tmp_path / "texts.onnx") as predictor,
        pytest.raises(DataError, match="become tokens by a tokenizer: name"),
    ):
        predictor.predict("w1 w2")


class Frame:
    """Stands for a data frame: columns by name."""

    def __init__(self, columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return self._columns[name]


class Rows(Frame):
    """Stands for a data set of Hugging Face."""

    @property
    def column_names(self):
        return self.columns

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index):
        return self._columns[index] if isinstance(index, str) else {name: column[index] for name, column in self._columns.items()}


def test_data_frames_and_data_sets_of_others(folder, photos, expected):
    columns = {name: X[:, place] for place, name in enumerate("abcd")}
    with burnish.Predictor(folder / "values.onnx") as predictor:
        wanted = [each.values for each in predictor.predict(X)]
        for given in (Frame(columns), Rows(columns), burnish.data.ArrayDataset({"x": X})):
            np.testing.assert_allclose([each.values for each in predictor.predict(given)], wanted, rtol=1e-5)
    images = Rows({"image": [Image.fromarray(pixels) for pixels in PICTURES], "label": [0, 1, 2]})
    np.testing.assert_allclose([each.scores for each in photos.predict(images)], expected, rtol=1e-5)


def test_nan_is_no_class(folder, tmp_path):
    for name in ("photos", "questions"):
        model = onnx.load(folder / f"{name}.onnx")
        inputs = model.graph.input[0].name
        shape = [extent.dim_value or 1 for extent in model.graph.input[0].type.tensor_type.shape.dim]
        with burnish.Predictor(folder / f"{name}.onnx") as predictor:
            given = dict(predictor.model.to_predict.to_model({inputs: np.full(shape, np.nan, np.float32)}))
            (found,) = predictor.predictions(predictor.read(burnish.data.ArrayDataset(given)))
        assert found.label == ((), None)[name == "photos"]
        assert np.isnan(found.score)
        assert found.as_dict()["label"] == ([], None)[name == "photos"]
        assert str(found) == ("none", "None nan")[name == "photos"]


def test_a_tuned_model_is_evaluated_on_what_was_held_out(tmp_path):
    model = burnish.models.create("mlp", classes=2, input_shape=(3,))
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    data, options = (x, (x[:, 0] > 0).astype(np.int64)), {"epochs": 1, "threads": 1, "lr": 0.1}
    tuned = burnish.finetune(model, data, eval_split=0.25, output=tmp_path / "held.onnx", **options)
    assert len(tuned.evaluation) == 6
    assert tuned.evaluate() == pytest.approx(tuned.result.metrics, rel=1e-5)
    tuned = burnish.finetune(model, data, output=tmp_path / "plain.onnx", **options)
    with pytest.raises(ConfigurationError, match=r"none were held out for evaluation: tune with eval_split=0\.2 or eval_data"):
        tuned.evaluate()
