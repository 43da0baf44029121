"""Columns of text in tables: indices or places as the model's inputs want them, what was not seen before, and missing values."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pyarrow
import pyarrow.parquet
import pytest

from burnish.data import DataDescription, DataSpec, open_dataset
from burnish.data.table_coding import TableDescription
from burnish.data.unlabelled import open_samples
from burnish.errors import ConfigurationError, DataError
from burnish.program import Entry, Role
from specs.program_inputs import class_entry, classification, data_entry

TABLE = "age,city,plan,y\n30,Ulm,b,0\n40,Bonn,a,1\n50,Ulm,a,2\n"


def table(folder, content: str = TABLE, name: str = "data.csv"):
    (folder / name).write_text(content)
    return folder / name


def reading(spec: DataSpec, dataset) -> DataSpec:
    return spec.like(DataDescription.of(dataset))


def test_the_number_of_features_decides_between_indices_and_places(tmp_path):
    path = table(tmp_path)
    as_indices = open_dataset(path, classification(3))
    assert as_indices.batch(np.arange(3))["x"].tolist() == [[30, 1, 1], [40, 0, 0], [50, 1, 0]]
    assert as_indices.note == f"{path}: categories become indices: 'city' (2), 'plan' (2)"
    as_places = open_dataset(path, classification(5))
    assert as_places.batch(np.arange(3))["x"].tolist() == [[30, 0, 1, 0, 1], [40, 1, 0, 1, 0], [50, 0, 1, 1, 0]]
    assert as_places.note == f"{path}: categories have a place each: 'city' (2), 'plan' (2)"
    assert open_dataset(path, classification("features")).table.one_hot


def test_a_column_of_numbers_with_a_stray_text_is_pointed_out(tmp_path):
    rows = "".join(f"{number},{'abc'[number % 3]},{number % 3}\n" for number in range(5))
    path = table(tmp_path, f"age,plan,y\n{rows}oops,a,0\n")
    said = open_dataset(path, classification(2)).note
    assert "'age' would be numbers but for 'oops', and its 5 numbers are categories now: repair these rows" in said
    assert "'plan' would" not in said


def test_evaluation_and_prediction_read_the_categories_of_training(tmp_path):
    trained = open_dataset(table(tmp_path), classification(5))
    later = table(tmp_path, "plan,city,age,y\na,Köln,20,0\nb,Ulm,21,1\n", "later.csv")
    spec = reading(classification(5), trained)
    evaluated = open_dataset(later, spec)
    assert evaluated.batch(np.arange(2))["x"].tolist() == [[20, 0, 0, 1, 0], [21, 0, 1, 0, 1]]
    unseen = "1 of 2 rows of column 'city' hold categories that training did not have ('Köln')"
    assert unseen in evaluated.note
    samples = open_samples(later, spec)
    np.testing.assert_array_equal(samples.dataset.batch(np.arange(2))["x"], evaluated.batch(np.arange(2))["x"])
    assert samples.note == f"{later}: {unseen}"
    as_index = open_samples(later, reading(classification(3), open_dataset(tmp_path / "data.csv", classification(3))))
    assert as_index.dataset.batch(np.arange(2))["x"].tolist() == [[20, -1, 0], [21, 1, 1]]
    with pytest.raises(DataError, match="no column 'plan', which the model was trained on; the columns are city, age"):
        open_samples(table(tmp_path, "city,age\nUlm,3\n", "short.csv"), spec)
    with pytest.raises(DataError, match=r"column 'age' holds text \('old'\), and the model was trained on numbers there"):
        open_samples(table(tmp_path, "city,age,plan\nUlm,old,a\n", "text.csv"), spec)


def test_each_of_several_inputs_takes_its_column_as_it_wants_it(tmp_path):
    rows = Entry("city", Role.DATA, ir.DataType.INT64, ("batch",), minimum=0, maximum=2)
    spec = DataSpec((data_entry(1, name="age"), rows, data_entry(2, name="plan")), class_entry())
    batch = open_dataset(table(tmp_path), spec).batch(np.arange(3))
    assert batch["age"].tolist() == [[30], [40], [50]]
    assert (batch["city"].tolist(), batch["city"].dtype) == ([1, 0, 1], np.int64)
    assert batch["plan"].tolist() == [[0, 1], [1, 0], [1, 0]]
    known = reading(spec, open_dataset(tmp_path / "data.csv", spec))
    later = table(tmp_path, TABLE.replace("Bonn", "Jena"), "later.csv")
    assert open_dataset(later, known).batch(np.arange(3))["city"].tolist() == [1, 2, 1]  # the row to spare
    full = replace(known, data=(known.data[0], replace(rows, maximum=1), known.data[2]))
    with pytest.raises(DataError, match=r"'city' hold categories that .* \('Jena'\), and the input 'city' has no row to spare"):
        open_dataset(later, full)


def test_what_is_said_of_a_table_is_read_again():
    said = TableDescription((("age", None), ("city", ("Bonn", "Ulm"))), one_hot=True)
    metadata = DataDescription(table=said).metadata()
    assert list(metadata) == ["burnish.columns"]
    assert DataDescription.read(metadata).table == said
    for damaged in ({"columns": [["a", [1]]], "one_hot": True}, {"columns": []}, {"columns": [["a", None]], "one_hot": 1}):
        with pytest.raises(DataError, match=r"its metadata 'burnish\.columns' cannot be read"):
            DataDescription.read({"burnish.columns": json.dumps(damaged)})


def test_rows_with_missing_values_are_left_out_and_counted(tmp_path):
    path = table(tmp_path, "a,b,y\n1,2,0\nNA,2,1\n3,,2\n4,inf,0\n5,6,1\n")
    with pytest.raises(DataError, match=r"data\.csv, line 3: column 'a' holds 'NA', which stands for no value; fill it in"):
        open_dataset(path, classification(2))
    dataset = open_dataset(path, classification(2), missing="drop")
    assert dataset.batch(np.arange(2))["x"].tolist() == [[1, 2], [5, 6]]
    assert dataset.note == f"{path}: 3 of 5 rows have missing values ('a' 1, 'b' 2) and are left out"
    arrow = tmp_path / "data.parquet"
    columns = {"a": [1, None, 3, 4], "b": [1.0, 2.0, np.nan, 4.0], "c": ["u", "v", "w", "u"], "y": [0, 1, 2, 0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), arrow)
    dropped = open_dataset(arrow, classification(3), missing="drop")
    assert dropped.batch(np.arange(2))["x"].tolist() == [[1, 1, 0], [4, 4, 0]]
    for policy in ("fill", "predicted"):
        with pytest.raises(ConfigurationError, match=f"missing='{policy}' .*: give 'error', 'drop' to leave rows .*, or 'mean'"):
            open_dataset(path, classification(2), missing=policy)
    with pytest.raises(DataError, match="a value is missing in each of its 1 rows"):
        open_dataset(table(tmp_path, "a,b,y\n,2,0\n", "none.csv"), classification(2), missing="drop")
