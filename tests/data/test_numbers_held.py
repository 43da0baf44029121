"""Numbers that an input cannot hold, and numbers in other digits: refused by row and column, wherever they are read."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from burnish.data import DataSpec, open_dataset
from burnish.data.csv import read_csv
from burnish.data.data_spec import cast, fit_data
from burnish.data.image.augmentation import read_augmentation
from burnish.data.preprocessing import Preprocessing
from burnish.data.sources import as_dataset
from burnish.errors import ConfigurationError, DataError
from burnish.settings import read_number, read_settings, read_whole
from specs.program_inputs import class_entry, classification, data_entry, value_entry

X = np.array([[1.0, 2.0], [2.0, 1e39]])


VALUES = DataSpec((data_entry(2),), value_entry(1))


def test_a_table_names_the_line_and_the_column(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,label\n1,2,0\n,1,1\n2,1e39,1\n")
    with pytest.raises(DataError, match=r"t\.csv, line 4: column 'b' holds 1e\+39, and 'x' takes float32: scale or repair"):
        open_dataset(path, classification(2), missing="drop")
    path.write_text("a,b,targets\n1,2,0\n2,1,-1e39\n")
    with pytest.raises(DataError, match=r"t\.csv, line 3: column 'targets' holds -1e\+39, and 'targets' takes float32"):
        open_dataset(path, VALUES)
    path.write_text("a,b,targets\n1,2,0\n2,3.4e38,1\n")
    assert np.isfinite(open_dataset(path, VALUES).batch(np.arange(2))["x"]).all()


def test_arrays_name_the_sample_and_the_column(tmp_path):
    labels = np.array([0, 1])
    np.savez(tmp_path / "t.npz", x=X, y=labels)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "x.npy", X)
    np.save(tmp_path / "folder" / "y.npy", labels)
    said = r"sample 1, column 1: 'x' takes float32, and the data hold 1e\+39: scale or repair the data"
    with pytest.raises(DataError, match=r"t\.npz, " + said):
        open_dataset(tmp_path / "t.npz", classification(2))
    with pytest.raises(DataError, match=r"x\.npy, " + said):
        open_dataset(tmp_path / "folder", classification(2)).batch(np.array([1, 0]))
    for source in ((X, labels), {"x": X, "labels": labels}):
        with pytest.raises(DataError, match="data, " + said):
            as_dataset(source, classification(2))
    with pytest.raises(DataError, match=r"data, sample 0, column 0: 'targets' takes float32, and the data hold -1e\+300"):
        as_dataset((X[:1], np.array([[-1e300]])), VALUES)


def test_columns_of_other_libraries_name_the_row(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    columns = {"a": X[:, 0], "b": X[:, 1], "label": [0, 1]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet, row 1: column 'b' holds 1e\+39"):
        open_dataset(tmp_path / "t.parquet", classification(2))
    parquet.write_table(pyarrow.table({**columns, "b": np.array([2**63, 2**64 - 1], np.uint64)}), tmp_path / "large.parquet")
    held = open_dataset(tmp_path / "large.parquet", classification(2)).batch(np.arange(2))["x"][:, 1]
    assert held.tolist() == [2.0**63, 2.0**64]


@pytest.mark.parametrize(
    ("array", "dtype", "lost"),
    [
        (np.array([65504, 65519, 65520], np.float32), np.float16, [False, False, True]),
        (np.array([70000], np.int32), np.float16, [True]),
        (np.array([3.4e38, -3.4e38], np.float32), ml_dtypes.bfloat16, [True, True]),
        (np.array([2.0**31, -(2.0**31)]), np.int32, [True, False]),
        (np.array([2.0**63]), np.int64, [True]),
        (np.array([2**63, 1], np.uint64), np.int64, [True, False]),
        (np.array([-1, 1], np.int64), np.uint64, [True, False]),
        (np.array([np.inf, 1.0]), np.float32, None),
        (np.array([1.5, 2.0]), np.int32, [True, False]),
    ],
)
def test_what_a_cast_loses(array, dtype, lost):
    converted, wrong = cast(array, np.dtype(dtype))
    assert converted.dtype == dtype
    assert (None if wrong is None else wrong.tolist()) == lost


def test_samples_are_named_by_their_numbers():
    entry = data_entry(2, name="tokens", dtype=ir.DataType.INT32)
    with pytest.raises(
        DataError, match=r"data, sample 7, column 1: 'tokens' takes int32, and the data hold 4294967296: give whole"
    ):
        fit_data(np.array([[1, 2], [3, 2**32]]), entry, "data", samples=np.array([5, 7]))


def test_pixels_that_become_too_large():
    entry = data_entry(4, dtype=ir.DataType.FLOAT16)
    with pytest.raises(
        DataError, match=r"'x' takes float16, and pixel \* 1000\.0 gives values that it cannot hold: choose a smaller"
    ):
        fit_data(np.ones((1, 4), np.uint8), entry, "data", Preprocessing(scale=1000.0))


@pytest.mark.parametrize("written", ["1_0", "１０", "1_0.5"])
def test_numbers_in_other_digits_among_numbers_are_refused(tmp_path, written):
    path = tmp_path / "t.csv"
    path.write_text(f"a,label\n10,x\nNA,x\n{written},y\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"t.csv, line 4: column 'a' holds '{written}' among numbers: write it in the digits"):
        read_csv(path)
    path.write_text(f"a,label\n{written},x\n1_1,y\n", encoding="utf-8")
    assert read_csv(path)[0]["a"].tolist() == [written, "1_1"]
    path.write_text(f"a,label\n{written},x\n10,y\nten,y\n", encoding="utf-8")
    assert read_csv(path)[0]["a"].tolist() == [written, "10", "ten"]


def test_decimal_commas_in_other_digits_are_no_numbers(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a;label\n１,５;x\n２,５;y\n", encoding="utf-8")
    assert read_csv(path)[0]["a"].tolist() == ["１,５", "２,５"]


@pytest.mark.parametrize("text", ["1_0", "１０", "0x10", "nan(1)", "", "1e", "²"])
def test_texts_that_are_no_numbers(text):
    for read in (read_number, read_whole):
        with pytest.raises(ValueError, match="in the digits 0 to 9"):
            read(text)
    assert read_settings("loss", f"huber:delta={text}" if text else "huber")[1] == ({"delta": text} if text else {})


def test_texts_that_are_numbers():
    assert [read_number(text) for text in (" 1", "+1.", ".5", "-1e-3", "inf")] == [1.0, 1.0, 0.5, -0.001, np.inf]
    assert [read_whole(text) for text in ("007", "-3")] == [7, -3]
    with pytest.raises(ValueError, match="invalid literal"):
        read_whole("1.5")


@pytest.mark.parametrize("value", [3.0, np.nan])
def test_a_single_number_is_no_array_of_samples(tmp_path, value):
    np.savez(tmp_path / "t.npz", x=np.array(value), y=np.array([0, 1]))
    with pytest.raises(DataError, match=r"t\.npz: ('x' is a single number; give an array|sample 0 holds a NaN)"):
        open_dataset(tmp_path / "t.npz", classification(2))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            np.array([0x110000, 0x61], np.uint32).view("<U1"),
            "the text for label 'labels' is damaged: it holds what is no character",
        ),
        (np.array([b"\xff", b"a"]), "the text for label 'labels' is no ASCII"),
    ],
)
def test_labels_that_are_no_text(tmp_path, labels, message):
    np.savez(tmp_path / "t.npz", x=np.zeros((2, 2)), y=labels)
    with pytest.raises(DataError, match=rf"t\.npz: {message}"):
        open_dataset(tmp_path / "t.npz", classification(2))


def test_a_change_that_is_infinitely_strong():
    with pytest.raises(ConfigurationError, match="rand_augment"):
        read_augmentation("rand_augment:inf")


LARGE = 2**53 + 1
INDICES = DataSpec((data_entry(2, dtype=ir.DataType.INT64),), class_entry(2))


@pytest.mark.parametrize("other", ["2,1e3", "2.0,4", "2,-9007199254740993.0"])
def test_large_indices_beside_floating_point_stay_what_they_are(tmp_path, other):
    """2^53 + 1 is the first whole number that float64 rounds: among numbers such as 1e3, and beside a column of these."""
    path = tmp_path / "t.csv"
    path.write_text(f"b,a,label\n1,{LARGE},0\n{other},1\n")
    assert open_dataset(path, INDICES).batch(np.arange(1))["x"].tolist() == [[1, LARGE]]


def test_large_indices_of_parquet_beside_other_columns_stay_what_they_are(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    for other in (np.array([1.0, 2.0]), np.array([1, 2], np.uint64)):
        parquet.write_table(pyarrow.table({"a": [LARGE, -LARGE], "b": other, "label": [0, 1]}), tmp_path / "t.parquet")
        assert open_dataset(tmp_path / "t.parquet", INDICES).batch(np.arange(2))["x"].tolist() == [[LARGE, 1], [-LARGE, 2]]


@pytest.mark.parametrize("written", ["1.5", "9223372036854775808", "1e300"])
def test_what_is_no_index_is_still_refused(tmp_path, written):
    path = tmp_path / "t.csv"
    path.write_text(f"b,a,label\n1,{written},0\n1,{LARGE},0\n")
    with pytest.raises(DataError, match=r"'x' takes int64, and the data hold (1\.5|9|1e.300)"):
        open_dataset(path, INDICES)


def test_a_text_that_an_array_would_cut_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,label\n1,2,x\0\n1,2,x\n")
    with pytest.raises(DataError, match=r"t\.csv: .*ends in a NUL character: remove it"):
        open_dataset(tmp_path / "t.csv", classification(2))
