"""Columns of wild scales: standardized as in training, missing values filled, and an exported file that does both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish.data import ArrayDataset, DataDescription, DataSpec, as_dataset, open_dataset
from burnish.data.splitting import EvalSplit, held_out, parts
from burnish.data.unlabelled import open_samples
from burnish.errors import ConfigurationError, DataError
from burnish.graph.annotations import INITIAL
from burnish.models import create
from burnish.program import Entry, Role
from burnish.training import open_model
from oracles.small_networks import Network
from specs.program_inputs import class_entry, data_entry

NUMBERS = "age,income,same,label\n20,1e6,7,0\n40,3e6,7,1\nNA,2e6,7,1\n60,inf,7,0\n"
TEXTS = "age,city,label\n20,Ulm,no\n40,Bonn,yes\n,Ulm,yes\n60,,no\n"
NEW = "city,age\nBonn,31\nJena,1e9\n,nan\n"


def written(folder: Path, content: str, name: str = "data.csv") -> Path:
    (folder / name).write_text(content)
    return folder / name


def trained(model, data, **options) -> burnish.Session:
    """A session that has seen a table, and says so in what it exports."""
    program = burnish.compile(model, loss="cross_entropy", optimizer="sgd")
    dataset = open_dataset(data, DataSpec.by(program), **options)
    session = burnish.Session(program)
    session.metadata = DataDescription.of(dataset).metadata()
    for _ in range(2):
        session.step(dataset.batch(np.arange(len(dataset))))
    return session


def exported(session: burnish.Session, path: Path) -> onnxruntime.InferenceSession:
    session.export(path)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    return onnxruntime.InferenceSession(path)


def test_numbers_of_a_model_with_initial_weights_are_standardized(tmp_path):
    path = written(tmp_path, NUMBERS)
    spec = DataSpec.by(burnish.compile(create("mlp", classes=2, input_shape=(3,)), loss="cross_entropy", optimizer="sgd"))
    dataset = open_dataset(path, spec)
    x = dataset.batch(np.arange(4))["x"]
    known = np.array([20, 40, 60], float)
    np.testing.assert_allclose(x[[0, 1, 3], 0], (known - 40) / known.std(), rtol=1e-6)
    np.testing.assert_allclose(x[:3, 1], [-np.sqrt(1.5), np.sqrt(1.5), 0], atol=1e-6)
    assert (x[2, 0], x[3, 1]) == (0, 0)  # the medians, which are the means here
    assert not x[:, 2].any()
    assert "missing values are filled: 1 of 'age' by 40, 1 of 'income' by 2e+06" in dataset.note
    assert "standardized with mean and standard deviation of the training data: 'age', 'income', 'same'" in dataset.note
    assert "'same' is constant in the training data, and 0 from here on" in dataset.note
    # What is read later is read by the same numbers, in whatever order, and a constant column stays 0.
    known_by = spec.like(DataDescription.of(dataset))
    later = open_dataset(written(tmp_path, "same,income,age,label\n9,2e6,,1\n9,1e6,20,0\n", "later.csv"), known_by)
    np.testing.assert_allclose(later.batch(np.arange(2))["x"], [[0, 0, 0], [x[0, 0], x[0, 1], 0]], atol=1e-6)


def test_numbers_that_float32_does_not_tell_apart_are_named(tmp_path):
    spec = DataSpec((data_entry(2, name="x"),), class_entry(), described=DataDescription(is_initial=True), is_training=True)
    rows = "".join(f"{10**9 + number},{1.7e9 + 3600 * number},{number % 2}\n" for number in range(40))
    note = open_dataset(written(tmp_path, f"id,time,label\n{rows}"), spec).note
    assert "'id': float32 rounds values so far from 0 to steps that are coarse beside their spread: take a number off" in note


@pytest.mark.parametrize(("missing", "filled"), [("mean", 26.25), ("median", 20), ("most_frequent", 15)])
def test_what_fills_missing_values_can_be_said(tmp_path, missing, filled):
    spec = DataSpec((data_entry(2, name="x"),), class_entry(), is_training=True)
    path = written(tmp_path, "a,b,label\n15,u,0\n15,v,1\n,v,2\n25,,1\n50,v,0\n")
    dataset = open_dataset(path, spec, missing=missing)
    assert dataset.batch(np.arange(5))["x"].tolist() == [[15, 0], [15, 1], [filled, 1], [25, 1], [50, 1]]
    assert dataset.table.fills == (filled, "v")
    assert dataset.table.scales == ()
    with pytest.raises(DataError, match=r"line 4: column 'a' has no value; .* or fill them \(--missing median\)"):
        open_dataset(path, spec, columns="raw")


def test_numbers_that_the_model_knows_go_in_as_they_are(tmp_path):
    """A file that somebody has trained takes what it was trained on; a line names what may be meant."""
    path = written(tmp_path, "age,income,label\n20,1e6,0\n40,3e6,1\n")
    model = create("mlp", classes=2, input_shape=(2,))
    del model.metadata_props[:]
    spec = DataSpec.by(burnish.compile(model, loss="cross_entropy", optimizer="sgd"))
    dataset = open_dataset(path, spec)
    assert (dataset.batch(np.arange(2))["x"].tolist(), dataset.table) == ([[20, 1e6], [40, 3e6]], None)
    assert "the scale of 'age' (30, 10), 'income' (2e+06, 1e+06) (mean, standard deviation) is far from 1" in dataset.note
    assert "--columns standardize" in dataset.note
    np.testing.assert_allclose(
        open_dataset(path, spec, columns="standardize").batch(np.arange(2))["x"], [[-1, -1], [1, 1]], rtol=1e-6
    )
    assert open_dataset(path, spec, columns="raw").note is None
    # Nothing is measured on data that are not trained on.
    assert open_dataset(path, spec.like(DataDescription())).note is None


def test_an_exported_file_of_numbers_takes_them_raw(tmp_path):
    session = trained(create("mlp", classes=2, input_shape=(3,)), written(tmp_path, NUMBERS))
    file = exported(session, tmp_path / "tuned.onnx")
    assert [(value.name, value.type, value.shape) for value in file.get_inputs()] == [("x", "tensor(float)", ["batch", 3])]
    raw = np.array([[20, 1e6, 7], [np.nan, 2e6, -3], [1e30, -np.inf, 7]], np.float32)
    coded = open_samples(
        written(tmp_path, "age,income,same\n20,1e6,7\n,2e6,-3\n1e30,inf,7\n", "new.csv"),
        DataSpec.by(session.program, session.metadata),
    ).dataset.batch(np.arange(3))
    np.testing.assert_array_equal(file.run(None, {"x": raw})[0], session.predict(coded)["logits"])
    assert "initial_weights" not in str(onnx.load(tmp_path / "tuned.onnx").metadata_props)
    read = open_model(tmp_path / "tuned.onnx")
    for path in ("new.csv", "data.csv"):
        samples = open_samples(tmp_path / path, read.to_predict).dataset
        by_session = open_samples(tmp_path / path, DataSpec.by(session.program, session.metadata)).dataset
        np.testing.assert_allclose(
            read.predict(samples)["logits"], session.predict(by_session.batch(np.arange(len(by_session))))["logits"], rtol=1e-6
        )


@pytest.mark.parametrize("places", [True, False])
def test_an_exported_file_with_categories_takes_a_text_for_each(tmp_path, places):
    session = trained(create("mlp", classes=2, input_shape=(3 if places else 2,)), written(tmp_path, TEXTS))
    file = exported(session, tmp_path / "tuned.onnx")
    assert [(value.name, value.type, value.shape) for value in file.get_inputs()] == [
        ("age", "tensor(float)", ["batch", 1]),
        ("city", "tensor(string)", ["batch", 1]),
    ]
    raw = {"age": np.array([[31], [1e9], [np.nan]], np.float32), "city": np.array([["Bonn"], ["Jena"], [""]])}
    new = written(tmp_path, NEW, "new.csv")
    samples = open_samples(new, DataSpec.by(session.program, session.metadata))
    expected = session.predict(samples.dataset.batch(np.arange(3)))["logits"]
    np.testing.assert_array_equal(file.run(None, raw)[0], expected)
    assert "missing values are filled: 1 of 'city' by 'Ulm', 1 of 'age' by 40" in samples.note
    assert "hold categories that training did not have ('Jena')" in samples.note
    read = open_model(tmp_path / "tuned.onnx")
    again = open_samples(new, read.to_predict)
    assert again.note == samples.note
    np.testing.assert_allclose(read.predict(again.dataset)["logits"], expected, rtol=1e-6)
    assert np.isfinite(
        list(read.evaluate(open_dataset(tmp_path / "data.csv", read.to_evaluate, classes=["no", "yes"])).values())
    ).all()


def test_a_file_that_takes_raw_columns_is_trained_further_without_standardizing_twice(tmp_path):
    data = written(tmp_path, TEXTS)
    session = trained(create("mlp", classes=2, input_shape=(3,)), data)
    before = exported(session, tmp_path / "tuned.onnx")
    again = trained(tmp_path / "tuned.onnx", data, columns="standardize")
    assert {entry.name for entry in again.program.signature.samples} == {"age", "city"}
    assert {entry.name for entry in again.program.signature.state} == {entry.name for entry in session.program.signature.state}
    after = exported(again, tmp_path / "again.onnx")
    raw = {"age": np.array([[31], [np.nan]], np.float32), "city": np.array([["Bonn"], [""]])}
    assert [node.op_type for node in onnx.load(tmp_path / "again.onnx").graph.node].count("LabelEncoder") == 1
    np.testing.assert_allclose(after.run(None, raw)[0], again.predict(raw)["logits"], rtol=1e-6)
    assert not np.allclose(after.run(None, raw)[0], before.run(None, raw)[0])


def test_each_of_several_inputs_takes_its_column_raw(tmp_path):
    """An index of a table's rows, a place for each category, and a number that is standardized."""
    network = Network("several", [1], input_name="age")
    extents = {"city": (ir.DataType.INT64, ["batch"]), "plan": (ir.DataType.FLOAT, ["batch", 2])}
    for name, (dtype, shape) in extents.items():
        network.graph.inputs.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)))
    builder = network.builder
    age, city, plan = map(builder.tensor, network.graph.inputs)
    rows = builder.op("Gather", network.drawn("rows", 3, 4, fan_in=1), city, axis=0)
    joined = builder.op("Concat", age, rows, plan, axis=1)
    model = network.model(network.dense("head", joined, 7, 3))
    data = written(tmp_path, "age,city,plan,label\n30,Ulm,b,0\n40,Bonn,a,1\n,Ulm,a,2\n")
    session = trained(model, data, columns="standardize")
    file = exported(session, tmp_path / "tuned.onnx")
    assert {value.name: value.type for value in file.get_inputs()} == {
        "age": "tensor(float)",
        "city": "tensor(string)",
        "plan": "tensor(string)",
    }
    raw = {"age": np.array([[31], [np.nan]], np.float32), "city": np.array(["Jena", "Ulm"]), "plan": np.array([["a"], ["c"]])}
    new = written(tmp_path, "age,city,plan\n31,Jena,a\n,Ulm,c\n", "new.csv")
    samples = open_samples(new, DataSpec.by(session.program, session.metadata)).dataset
    np.testing.assert_allclose(file.run(None, raw)[0], session.predict(samples.batch(np.arange(2)))["logits"], rtol=1e-6)


def test_columns_in_memory_are_a_table_too():
    spec = DataSpec((data_entry(2, name="x"),), class_entry(), described=DataDescription(is_initial=True), is_training=True)
    columns = {"age": [20, 40, None], "income": np.array([1e6, np.nan, 3e6]), "label": [0, 1, 1]}
    dataset = as_dataset(columns, spec)
    np.testing.assert_allclose(dataset.batch(np.arange(3))["x"], [[-1, -1], [1, 0], [0, 1]], atol=1e-6)
    with pytest.raises(DataError, match="row 1: column 'income' holds 'nan', which stands for no value"):
        as_dataset(columns, spec, missing="error")
    assert len(as_dataset(columns, spec, missing="drop")) == 1


def test_evaluation_data_that_are_measured_by_themselves_are_refused(tmp_path):
    program = burnish.compile(create("mlp", classes=2, input_shape=(3,)), loss="cross_entropy", optimizer="sgd")
    spec = DataSpec.by(program)
    train = open_dataset(written(tmp_path, NUMBERS), spec)
    test = open_dataset(written(tmp_path, NUMBERS.replace("20", "21"), "test.csv"), spec)
    with pytest.raises(DataError, match=r"eval_data: its columns are coded by categories and statistics of its own: open it as"):
        burnish.Trainer(program, train, test, run_directory=tmp_path / "run")
    as_trained = open_dataset(tmp_path / "test.csv", DataSpec.by(program).like(DataDescription.of(train)))
    trainer = burnish.Trainer(program, train, as_trained, run_directory=tmp_path / "run", progress=False)
    assert np.isfinite(trainer.run().metrics["loss"])


def test_what_cannot_be_is_said(tmp_path):
    path = written(tmp_path, NUMBERS)
    whole = DataSpec((Entry("x", Role.DATA, ir.DataType.INT64, ("batch", 3)),), class_entry(), is_training=True)
    with pytest.raises(
        DataError, match=r"columns='standardize' .*: the input 'x' takes INT64, and standardized numbers are floating"
    ):
        open_dataset(path, whole, columns="standardize")
    with pytest.raises(
        ConfigurationError, match=r"columns='standardise' \(--columns\): give 'auto', 'standardize', 'raw' \(did you"
    ):
        open_dataset(path, whole, columns="standardise")
    for option, message in (
        ({"label_separator": ";"}, "label_separator .* divides the texts"),
        ({"columns": "raw"}, "columns='raw'"),
    ):
        with pytest.raises(DataError, match=f"digits: {message}.*: leave it out"):
            open_dataset("digits", whole, **option)
    spec = DataSpec((data_entry(3, name="x"),), class_entry(), described=DataDescription(is_initial=True), is_training=True)
    with pytest.raises(DataError, match="column 'income' has no value in any row: remove it"):
        open_dataset(written(tmp_path, "age,income,same,label\n1,,2,0\n2,NA,3,1\n", "none.csv"), spec, missing="mean")
    with pytest.raises(DataError, match="line 3: column 'label' has no value"):
        open_dataset(written(tmp_path, "a,b,c,label\n1,2,3,0\n2,3,4,\n", "label.csv"), spec)
    damaged = {"columns": [["a", None]], "one_hot": False, "scales": [[1.0, "x"]]}
    with pytest.raises(DataError, match=r"its metadata 'burnish\.columns' cannot be read"):
        DataDescription.read({"burnish.columns": json.dumps(damaged)})


def test_a_created_model_says_that_nothing_has_trained_it():
    assert INITIAL.key in {entry.key for entry in create("mlp", classes=2, input_shape=(3,)).metadata_props}
    program = burnish.compile(create("mlp", classes=2, input_shape=(3,)), loss="cross_entropy", optimizer="sgd")
    assert isinstance(as_dataset((np.full((2, 3), 50.0), [0, 1]), DataSpec.by(program)), ArrayDataset)  # arrays are as they are
    assert as_dataset((np.full((2, 3), 50.0), [0, 1]), DataSpec.by(program)).batch(np.arange(1))["x"].tolist() == [[50, 50, 50]]


def test_statistics_are_those_of_the_part_that_is_trained_on(tmp_path):
    """What is held out is read by them; categories are those of all rows."""
    rows = "".join(f"{age},{'Ulm' if age < 90 else 'Bonn'},{age % 2}\n" for age in range(0, 100, 5))
    path = written(tmp_path, f"age,city,label\n{rows},,0\n")
    asked = EvalSplit.read(0.5)
    spec = DataSpec((data_entry(3, name="x"),), class_entry(), described=DataDescription(is_initial=True), is_training=True)
    whole = open_dataset(path, spec, split=asked)
    train, held = parts(whole, held_out(whole, asked, 0, spec.label))
    x, y = (part.batch(np.arange(len(part)))["x"] for part in (train, held))
    ages = x[:, 0]
    np.testing.assert_allclose([ages.mean(), ages.std()], [0, 1], atol=0.1)  # but for what is filled
    assert train.table == held.table != whole.table
    assert dict(train.table.columns)["city"] == ("Bonn", "Ulm")
    np.testing.assert_allclose(y[:, 0].max() < 3, True)
    assert held.note is None


def test_rows_of_numbers_are_raw_columns_for_a_run_as_for_its_file(tmp_path):
    """Which is asked does not change what an array means; with columns of text a row of numbers means nothing."""
    data = written(tmp_path, NUMBERS)
    program = burnish.compile(create("mlp", classes=2, input_shape=(3,)), loss="cross_entropy", optimizer="sgd")
    trainer = burnish.Trainer(program, data, run_directory=tmp_path / "run", progress=False)
    trainer.run()
    program.save(tmp_path / "run" / "program")
    trainer.session.export(tmp_path / "tuned.onnx")
    raw = np.array([[20, 1e6, 7], [np.nan, 2e6, 7]], np.float32)
    found = []
    for path in ("run", "tuned.onnx"):
        with burnish.Predictor(tmp_path / path) as predictor, pytest.warns(match="missing values are filled: 1 of 'age' by 40"):
            found.append([prediction.scores for prediction in predictor.predict(raw)])
        with burnish.Predictor(tmp_path / path) as predictor:
            one = predictor.predict(raw[0])
            same = predictor.predict({"age": 20, "income": 1e6, "same": 7})
            np.testing.assert_allclose(one.scores, same.scores, rtol=1e-6)
            assert predictor.evaluate((raw[:1], [0])) == predictor.evaluate(
                {"age": [20], "income": [1e6], "same": [7], "label": [0]}
            )
    np.testing.assert_allclose(*found, rtol=1e-6)
    session = trained(create("mlp", classes=2, input_shape=(3,)), written(tmp_path, TEXTS, "texts.csv"))
    spec = DataSpec.by(session.program, session.metadata)
    with pytest.raises(DataError, match=r"columns 'age', 'city', which it takes as they are, and the array has shape \[1, 3\]"):
        as_dataset((np.zeros((1, 3)), [0]), spec)
