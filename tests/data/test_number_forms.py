"""Numbers in tables with decimal commas, and with commas between thousands."""

from __future__ import annotations

import numpy as np
import pytest

from burnish.data import open_dataset
from burnish.data.csv import with_points
from burnish.errors import DataError
from specs.program_inputs import classification


def numbers_of(*columns: list[str]) -> list[list[float]]:
    read, _ = with_points({str(number): cells for number, cells in enumerate(columns)}, "table")
    return [[float(cell) for cell in cells] for cells in read.values()]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([["1,5", "-2,25", "3"]], [[1.5, -2.25, 3]]),
        ([[",5", "1,5e3"]], [[0.5, 1500]]),
        ([["1.234,5", "0,125"]], [[1234.5, 0.125]]),
        ([["1,234", "5,0"]], [[1.234, 5]]),
        ([["1,234.5", "12"]], [[1234.5, 12]]),
        ([["1,234,567", "1,234"]], [[1234567, 1234]]),
        ([["1,234"], ["0,5"]], [[1.234], [0.5]]),  # another column tells
        ([["1,234"], ["1,234,567"]], [[1234], [1234567]]),
        ([["1,234"], ["0.5"]], [[1234], [0.5]]),
        ([["1,5"], ["0.125", "1.234"]], [[1.5], [0.125, 1.234]]),  # no number of thousands begins with 0
        ([["1.234", "3.421"]], [[1.234, 3.421]]),
    ],
)
def test_numbers_are_read_as_they_are_written(columns, expected):
    assert numbers_of(*columns) == expected


def test_text_and_marks_stay():
    cells = {"place": ["Oslo, Norway", "Rome"], "size": ["1,5", "NA"], "pair": ["1,2", "a"]}
    read, notes = with_points(cells, "table")
    assert read == {**cells, "size": ["1.5", "NA"]}
    assert notes == ["numbers with decimal commas: 'size'"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            [["1,234", "5,678"]],
            "column '0' holds numbers such as '1,234', whose comma may be a decimal one or stand between thousands",
        ),
        ([["1,234"], ["1,5"], ["1,234,567"]], "column '0' holds numbers such as '1,234'"),
        ([["1,5", "1.5"]], "column '0' holds '1,5' and '1.5', with other decimal signs: write all alike"),
        (
            [["1,5"], ["1.234", "12"]],
            "column '1' holds numbers such as '1.234', whose point may stand between thousands, as column '0' has "
            "decimal commas: write all alike, or '1' without points",
        ),
        ([["1,5", "1,234,567"]], "column '0' holds '1,5' and '1,234,567', with other decimal signs"),
    ],
)
def test_commas_that_may_be_either_are_refused(columns, message):
    with pytest.raises(DataError, match=message):
        numbers_of(*columns)


def test_a_table_with_semicolons_and_decimal_commas(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("﻿length;width;label\n1,5;2;two words\n0,25;3,125;NA\n-1;4;Na\n", encoding="utf-8")
    dataset = open_dataset(path, classification(2))
    batch = dataset.batch(np.arange(3))
    np.testing.assert_array_equal(batch["x"], np.float32([[1.5, 2], [0.25, 3.125], [-1, 4]]))
    assert dataset.classes == ("NA", "Na", "two words")
    assert dataset.note == (
        f"{path}: numbers with decimal commas: 'length', 'width'; the classes 'NA' and 'Na' differ in case alone, and are two; "
        "'NA', 'Na' are classes like the others: remove these rows where the label is missing"
    )


def test_a_last_column_of_measurements_is_not_taken_for_classes(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("kind,length,width\na,1,0.5\nb,2,0.25\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"the last, 'width', holds numbers that are no classes: name the column .*--label"):
        open_dataset(path, classification(2))
    assert open_dataset(path, classification(2), label="kind").classes == ("a", "b")


def test_a_table_in_utf_16_says_how_to_save_it(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,label\n1,x\n", encoding="utf-16")
    with pytest.raises(DataError, match=r"no CSV file in UTF-8 .*; save it as CSV in UTF-8"):
        open_dataset(path, classification(1))
