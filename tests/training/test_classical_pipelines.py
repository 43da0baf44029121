"""Files of classical toolkits, trained and exported: the file's own objective, and the outputs that it came with."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

import burnish
from burnish.errors import ConfigurationError, EngineError, GradientError, InputError, ObjectiveWarning
from burnish.surgery.replace_head import find_head, with_a_score_for_each_class
from oracles import classical_files as files
from oracles.combinations import diagonal
from oracles.onnxruntime_outputs import onnxruntime_outputs

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, files.FEATURES)).astype(np.float32)
COLUMNS = {name: X[:, index : index + 1] for index, name in enumerate("abcd")}
COLUMNS["k"] = RNG.choice(["red", "green", "blue"], (16, 1)).astype(object)
LR = 0.1
CLASSIFIERS = {
    "logistic regression of two": files.logistic_regression([0, 1]),
    "logistic regression of three": files.logistic_regression([0, 1, 2]),
    "perceptron of two": files.perceptron([0, 1]),
    "perceptron of three": files.perceptron([0, 1, 2]),
    "logistic regression of two, zipped": files.logistic_regression([0, 1], zip_map=True),
    "perceptron of two, zipped": files.perceptron([0, 1], zip_map=True),
    "perceptron of three, zipped": files.perceptron([0, 1, 2], zip_map=True),
    "logistic regression of names, zipped": files.logistic_regression(["a", "b", "c"], zip_map=True),
    "logistic regression of two numbers": files.logistic_regression([3, 5]),
    "perceptron of names": files.perceptron(["a", "b", "c"]),
    "data frame": files.of_columns(),
}
REGRESSIONS = {
    "linear regression": files.linear_regression(),
    "linear regression of two": files.linear_regression(2),
    "perceptron": files.perceptron_regression(),
}
ENGINES = ["onnxruntime", "torch", "reference"]


def compiled(model: onnx.ModelProto, loss: str) -> burnish.Program:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        return burnish.compile(model, loss=loss, optimizer=burnish.optim.sgd(lr=LR))


def data_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return COLUMNS if len(model.graph.input) > 1 else {"X": X}


def probabilities(outputs: dict[str, object]) -> np.ndarray:
    """[N, C], also of dictionaries."""
    given = next(value for name, value in outputs.items() if "probabilit" in name)
    return np.asarray([list(row.values()) for row in given] if isinstance(given, list) else given, np.float64)


def labels_of(classes: int) -> np.ndarray:
    return np.arange(len(X)) % classes


@diagonal(("name", CLASSIFIERS), ("engine", ENGINES), test=6)
def test_classifiers_train_on_the_probabilities_of_the_file(name: str, engine: str) -> None:
    model = CLASSIFIERS[name]
    program, inputs = compiled(model, "cross_entropy"), data_of(model)
    session = burnish.Session(program, engine=engine)
    before = probabilities(onnxruntime_outputs(model, inputs))
    labels = labels_of(before.shape[1])
    batch = {**inputs, "labels": labels}
    if engine == "torch" and "k" in inputs:
        with pytest.raises(EngineError, match=r"The input 'k' holds elements of type STRING, .* or use engine='onnxruntime'"):
            session.step(batch)
        return
    losses = [session.step(batch)["loss"] for _ in range(8)]
    expected = -np.log(before[np.arange(len(X)), labels]).mean()
    np.testing.assert_allclose(losses[0], expected, rtol=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions_train(name: str, engine: str) -> None:
    model = REGRESSIONS[name]
    session = burnish.Session(compiled(model, "mse"), engine=engine)
    before = onnxruntime_outputs(model, {"X": X})["variable"]
    targets = RNG.normal(size=before.shape).astype(np.float32)
    losses = [session.step({"X": X, "targets": targets})["loss"] for _ in range(8)]
    np.testing.assert_allclose(losses[0], ((before - targets) ** 2).mean(), rtol=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("classes", [2, 3])
def test_the_step_of_logistic_regression(classes: int) -> None:
    """In closed form: the gradient of each row is the mean of (p - y) x; of two classes, that of the second."""
    model = files.logistic_regression(list(range(classes)))
    session = burnish.Session(compiled(model, "cross_entropy"))
    before = session.state()
    labels = labels_of(classes)
    error = probabilities(onnxruntime_outputs(model, {"X": X})) - np.eye(classes)[labels]
    scaled = (X - np.asarray(files.OFFSETS)) * np.asarray(files.SCALES)
    if classes == 2:
        error = error[:, 1:]
    session.step({"X": X, "labels": labels})
    for name, gradient in (("coefficients", error.T @ scaled / len(X)), ("intercepts", error.mean(axis=0))):
        key = f"param/LinearClassifier.{name}"
        np.testing.assert_allclose(session.state()[key], before[key] - LR * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASSIFIERS, *REGRESSIONS])
def test_exported_with_the_outputs_that_it_came_with(name: str, tmp_path: Path) -> None:
    """By name, type and order; labels follow the tuned weights, which are the file's own numbers no more."""
    is_classifier = name in CLASSIFIERS
    model = CLASSIFIERS[name] if is_classifier else REGRESSIONS[name]
    inputs = data_of(model)
    session = burnish.Session(compiled(model, "cross_entropy" if is_classifier else "mse"))
    before = onnxruntime_outputs(model, inputs)
    if is_classifier:
        batch = {**inputs, "labels": (probabilities(before).argmax(axis=1) + 1) % probabilities(before).shape[1]}
    else:
        batch = {**inputs, "targets": -before["variable"]}
    for _ in range(60):
        session.step(batch)
    path = session.export(tmp_path / "tuned.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    source, tuned = onnxruntime.InferenceSession(model.SerializeToString()), onnxruntime.InferenceSession(path)
    assert [(each.name, each.type) for each in tuned.get_outputs()] == [(each.name, each.type) for each in source.get_outputs()]
    after, predicted = onnxruntime_outputs(str(path), inputs), session.predict(inputs)
    if not is_classifier:
        np.testing.assert_allclose(after["variable"], predicted["variable"], rtol=1e-5)
        return
    label = next(array for key, array in after.items() if "label" in key)
    was = next(array for key, array in before.items() if "label" in key)
    assert label.dtype == was.dtype
    assert (label != was).any()
    scores = probabilities(after)
    np.testing.assert_allclose(scores, probabilities(predicted), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-6)
    if isinstance(after.get("output_probability"), list):
        assert [list(row) for row in after["output_probability"]] == [list(row) for row in before["output_probability"]]
    names = sorted({*label.tolist(), *was.tolist()})
    if len(names) == scores.shape[1]:
        assert label.tolist() == [names[index] for index in scores.argmax(axis=1)]


@pytest.mark.slow
def test_what_was_exported_trains_again(tmp_path: Path) -> None:
    session = burnish.Session(compiled(files.logistic_regression(["a", "b"], zip_map=True), "cross_entropy"))
    session.step({"X": X, "labels": labels_of(2)})
    path = session.export(tmp_path / "tuned.onnx")
    again = burnish.Session(compiled(onnx.load(path), "cross_entropy"))
    assert again.program.options["trainable"] == session.program.options["trainable"]
    np.testing.assert_array_equal(again.predict({"X": X})["output_probability"], session.predict({"X": X})["output_probability"])


@pytest.mark.slow
def test_a_saved_program_exports_dictionaries_too(tmp_path: Path) -> None:
    program = compiled(files.logistic_regression([3, 5], zip_map=True), "cross_entropy")
    program.save(tmp_path / "program")
    session = burnish.Session(burnish.Program.load(tmp_path / "program"))
    rows = onnxruntime_outputs(str(session.export(tmp_path / "tuned.onnx")), {"X": X})["output_probability"]
    assert [list(row) for row in rows] == [[3, 5]] * len(X)


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_labels_that_are_text_are_predicted(engine: str) -> None:
    session = burnish.Session(compiled(files.logistic_regression(["a", "b", "c"]), "cross_entropy"), engine=engine)
    expected = onnxruntime_outputs(files.logistic_regression(["a", "b", "c"]), {"X": X})["label"]
    assert session.predict({"X": X})["label"].tolist() == expected.tolist()


def test_the_torch_engine_names_labels_that_are_text() -> None:
    session = burnish.Session(compiled(files.logistic_regression(["a", "b", "c"]), "cross_entropy"), engine="torch")
    message = r"'LinearClassifier\.classlabels' holds elements of type STRING, .* or use engine='onnxruntime'"
    with pytest.raises(EngineError, match=message):
        session.predict({"X": X})


@pytest.mark.slow
def test_text_evaluates_and_resumes(tmp_path: Path) -> None:
    """ONNX Runtime binds no text: these graphs run without a binding, and their state is the same."""
    program = compiled(files.of_columns(), "cross_entropy")
    batch = {**COLUMNS, "labels": labels_of(3)}
    session, other = burnish.Session(program), burnish.Session(program, engine="reference")
    for _ in range(3):
        figures = session.step(batch), other.step(batch)
        np.testing.assert_allclose(figures[0]["loss"], figures[1]["loss"], rtol=1e-5)
    for name, array in other.state().items():
        np.testing.assert_allclose(session.state()[name], array, rtol=1e-4, atol=1e-6)
    assert session.evaluate(batch)["loss"] < figures[0]["loss"]
    session.save_checkpoint(tmp_path / "checkpoint.safetensors")
    resumed = burnish.Session(program)
    resumed.restore(tmp_path / "checkpoint.safetensors")
    assert resumed.step(batch) == session.step(batch)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (np.zeros((16, 1)), r"The input 'k' has dtype float64, and takes text: give an array of str, of shape \[k_dim_0, 1\]"),
        (np.full((16, 1), None), "The input 'k' has dtype object, and takes text"),
        (np.full((16, 2), "red"), r"The input 'k' has extent 2 along axis 1, and the program takes 1"),
    ],
)
def test_what_is_no_text(text: np.ndarray, message: str) -> None:
    session = burnish.Session(compiled(files.of_columns(), "cross_entropy"))
    with pytest.raises(InputError, match=message):
        session.step({**COLUMNS, "k": text, "labels": labels_of(3)})


@pytest.mark.parametrize("operator", ["TreeEnsembleClassifier", "SVMClassifier"])
def test_what_was_not_fitted_in_steps_says_so(operator: str) -> None:
    nodes = [files.scaler(), files.node(operator, ["scaled"], ["label", "scores"])]
    outputs = [files.tensor("label", onnx.TensorProto.INT64, None), files.floats("scores", None, 2)]
    model = files.graph_of(nodes, [files.floats("X", None, files.FEATURES)], outputs)
    message = (
        rf"nothing would train: what ai\.onnx\.ml\.{operator} .* was fitted to are attributes, which no gradient moves: trees"
    )
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(model)


def test_a_gradient_that_would_have_to_run_through_a_table_says_so() -> None:
    """Before the first weight and after the last, a table is data, or a label."""
    table = {"keys_floats": [1.0, 2.0], "values_floats": [0.5, 1.5], "default_float": -1.0}
    nodes = [
        onnx.helper.make_node("MatMul", ["X", "weight"], ["h"], "layer"),
        files.node("LabelEncoder", ["h"], ["y"], **table),
    ]
    weight = np.ones((files.FEATURES, 1), np.float32)
    inputs, outputs = [files.floats("X", None, files.FEATURES)], [files.floats("y", None, 1)]
    with pytest.raises(GradientError, match=r"ai\.onnx\.ml\.LabelEncoder 'LabelEncoder' \(output 'y'\) has no gradient rule"):
        burnish.compile(files.graph_of(nodes, inputs, outputs, {"weight": weight}, version=2), loss="mse")
    before = [files.node("LabelEncoder", ["X"], ["h"], **table), onnx.helper.make_node("MatMul", ["h", "weight"], ["y"], "layer")]
    session = burnish.Session(burnish.compile(files.graph_of(before, inputs, outputs, {"weight": weight}, version=2), loss="mse"))
    assert session.step({"X": X, "targets": np.zeros((len(X), 1), np.float32)})["loss"] == pytest.approx(16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["logistic regression of two", "perceptron of two", "perceptron of two, zipped", "perceptron of three, zipped"]
)
@pytest.mark.parametrize("classes", [2, 3])
def test_binary_classifiers_are_fine_tuned(name: str, classes: int, tmp_path: Path) -> None:
    """One score tells two classes in the file; the tuned one has a score for each, and labels that follow them."""
    model = CLASSIFIERS[name]
    rng = np.random.default_rng(0)
    labels = np.arange(90) % classes
    x = (rng.normal(size=(90, files.FEATURES)) + 2 * np.eye(files.FEATURES)[labels]).astype(np.float32)
    tuned = burnish.finetune(model, (x, labels), output=tmp_path / "tuned.onnx", epochs=3, lr=0.05, threads=1)
    outputs = onnxruntime_outputs(str(tuned.path), {"X": x})
    scores = probabilities(outputs)
    assert scores.shape == (90, classes)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)
    label = next(array for key, array in outputs.items() if "label" in key)
    np.testing.assert_array_equal(label, scores.argmax(axis=1))
    assert (label == labels).mean() > 0.6


@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if " of two" in name])
def test_a_score_for_each_of_two_classes_is_the_same_function(name: str) -> None:
    model, inputs = CLASSIFIERS[name], {"X": X}
    spelt_out = with_a_score_for_each_class(burnish.load(model))
    assert find_head(spelt_out, next(value.name for value in spelt_out.graph.outputs if "prob" in str(value.name))).classes == 2
    expected = onnxruntime_outputs(model, inputs)
    found = onnxruntime_outputs(onnx_ir.to_proto(spelt_out), inputs)
    np.testing.assert_allclose(probabilities(found), probabilities(expected), rtol=1e-5, atol=1e-6)
    for key, array in expected.items():
        if "label" in key:
            np.testing.assert_array_equal(found[key], array)
