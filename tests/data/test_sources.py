"""Opening each format, and what each refuses."""

from __future__ import annotations

import errno
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from burnish.data import ArrayDataset, DataSpec, as_dataset, open_dataset
from burnish.data.csv import read_csv
from burnish.data.model_metadata import DataDescription
from burnish.data.unlabelled import open_samples
from burnish.errors import DataError
from burnish.installing import install_command
from specs.program_inputs import class_entry, classification, data_entry, value_entry


def everything(dataset) -> dict[str, np.ndarray]:
    return dataset.batch(np.arange(len(dataset)))


def test_digits_are_split_once_and_for_all():
    wanted = classification(1, 8, 8, classes=10)
    train, test = everything(open_dataset("digits", wanted)), everything(open_dataset("digits:test", wanted))
    assert train["x"].shape == (1437, 1, 8, 8)
    assert test["x"].shape == (360, 1, 8, 8)
    assert train["x"].dtype == np.float32
    assert (train["x"].min(), train["x"].max()) == (0, 1)
    assert set(test["labels"]) == set(range(10))
    both = np.concatenate([train["x"], test["x"]]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = np.lexsort(both.T)
    expected = np.lexsort((loaded.data / 16).astype(np.float32).T)
    np.testing.assert_array_equal(both[order], (loaded.data / 16).astype(np.float32)[expected])


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        DataError, match=rf"digits: .*scikit-learn, which is not installed; {re.escape(install_command('sklearn'))}"
    ):
        open_dataset("digits", classification(1, 8, 8, classes=10))


def test_npz_with_x_and_y(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.ones((3, 2), np.float64), y=np.array([0, 1, 2], np.int32))
    arrays = everything(open_dataset(path, classification(2)))
    assert (arrays["x"].dtype, arrays["labels"].dtype, arrays["labels"].tolist()) == (np.float32, np.int64, [0, 1, 2])


def test_npz_by_the_names_of_several_inputs(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, left=np.zeros((3, 2)), right=np.ones((3, 1)), targets=np.array([0.5, 1, 2]))
    wanted = DataSpec((data_entry(2, name="left"), data_entry(1, name="right")), value_entry())
    arrays = everything(open_dataset(path, wanted))
    assert list(arrays) == ["left", "right", "targets"]
    assert arrays["targets"].tolist() == [0.5, 1, 2]


def test_npz_for_a_model_that_computes_its_loss(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((3, 2)), weight=np.ones(3))
    wanted = DataSpec((data_entry(2), data_entry(name="weight")), None)
    assert list(everything(open_dataset(path, wanted))) == ["x", "weight"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": np.zeros(3)}, r"no array 'x' for the model's input 'x'; the file has 'y' \[3\]"),
        ({"x": np.zeros((3, 2))}, r"no array 'labels' or 'y' with the labels; the file has 'x' \[3, 2\]"),
        (
            {"x": np.zeros((3, 2)), "y": np.zeros(4)},
            r"data\.npz: the arrays differ in their number of samples: 'x' 3, 'labels' 4",
        ),
        ({"x": np.zeros((3, 2)), "y": np.array([0, {}, 1], dtype=object)}, "holds Python objects.*never unpickles"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "the data set is empty"),
        ({"x": np.zeros((3, 5)), "y": np.zeros(3)}, r"'x' wants samples of shape \[2\], .* have shape \[5\]"),
    ],
)
def test_npz_that_does_not_fit(tmp_path, arrays, message):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message):
        open_dataset(path, classification(2))


def test_damaged_npz(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.ones((300, 2)), y=np.zeros(300))
    whole = path.read_bytes()
    for content in (b"", b"PK\x03\x04 nothing of the kind", whole[: len(whole) // 2], b"not an archive"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=re.escape(str(path))):
            open_dataset(path, classification(2))
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match=r"a single array, not an archive; write it with numpy\.savez"):
        open_dataset(path, classification(2))


CSV = "width,height,label\n1,2.5,dog\n3,4,ant\n\n5,6,dog\n"


def test_csv(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("\ufeff" + CSV, encoding="utf-8")
    dataset = open_dataset(path, classification(2))
    arrays = everything(dataset)
    np.testing.assert_array_equal(arrays["x"], np.float32([[1, 2.5], [3, 4], [5, 6]]))
    assert arrays["labels"].tolist() == [1, 0, 1]
    assert dataset.classes == ("ant", "dog")


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_with_other_delimiters(tmp_path, delimiter):
    path = tmp_path / "data.csv"
    path.write_text("\ufeff" + CSV.replace("height", '"height, in cm; \tup"').replace(",", delimiter), encoding="utf-8")
    assert everything(open_dataset(path, classification(2)))["labels"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(("header", "label", "guessed"), [("a,b,c", None, True), ("a,b,Y", None, False), ("a,b,c", "a", False)])
def test_a_guessed_label_column_is_noted(tmp_path, header, label, guessed):
    path = tmp_path / "data.csv"
    path.write_text(header + "\n0,1,2\n2,0,1\n")
    note = open_dataset(path, classification(2), label=label).note
    assert (note is not None) == guessed
    if note is not None:
        assert "data.csv: no column is called label, y or target; 'c', the last, is taken for the label" in note


@pytest.mark.parametrize(
    ("header", "label", "values"),
    [
        ("a,b,c", None, [2, 1]),
        ("a,Label,c", None, [1, 0]),
        ("y,b,c", None, [0, 2]),
        ("a,b,c", "a", [0, 2]),
    ],
)
def test_the_label_column(tmp_path, header, label, values):
    path = tmp_path / "data.csv"
    path.write_text(header + "\n0,1,2\n2,0,1\n")
    assert everything(open_dataset(path, classification(2), label=label))["labels"].tolist() == values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty; the first line has to name the columns"),
        ("1,2\n3,4\n", "the first line holds numbers; add a line with the names"),
        ("a,b,y\n", "no rows"),
        ("a,b,y\n1,2\n", "line 2: 2 values, and the header names 3 columns"),
        ("a,b,y\n1,2,0\n1, ,0\n", "line 3: column 'b' has no value"),
        (
            "a,y\nred,0\nblue,1\npink,2\n",
            r"takes 2 numbers, and 1 columns give 1 with an index .*, or 3 with a place .*\('a' 3 cat",
        ),
        ("a,b,y\n1,2,1\n1,nan,0\n", r"line 3: column 'b' holds 'nan', which stands for no value; .*--missing drop"),
        ("a,a,y\n1,2,0\n", "two columns are called 'a'"),
        ("y\n1\n", "1 columns; a table needs feature columns and a label column"),
        ("a,y\n1,0\n", r"'x' wants samples of shape \[2\]"),
        ("a,b,y\n1,2,7\n", "sample 0 has the label 7, and 'labels' takes 0 to 2"),
    ],
)
def test_csv_that_does_not_fit(tmp_path, content, message):
    path = tmp_path / "data.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=re.escape(str(path)) + ".*" + message):
        open_dataset(path, classification(2))


def test_csv_in_another_encoding(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes("a,b,y\n1,2,Köln\n".encode("latin-1"))
    with pytest.raises(DataError, match="no CSV file in UTF-8"):
        open_dataset(path, classification(2))


def test_an_unknown_label_column(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text(CSV)
    with pytest.raises(DataError, match="no column 'species'; choose among width, height, label"):
        open_dataset(path, classification(2), label="species")


def of_columns(*names: str, text: str | None = None) -> DataSpec:
    data = [data_entry(1, name=name) for name in names]
    return DataSpec((*data, *([] if text is None else [data_entry(1, name=text, dtype=ir.DataType.STRING)])), class_entry())


def test_columns_by_the_names_of_several_inputs(tmp_path):
    """As data frames are converted; the columns may stand in any order."""
    path = tmp_path / "data.csv"
    path.write_text("b,extra,kind,label,a\n1,9,red,2,0.5\n2,9,blue,0,1.5\n")
    dataset = open_dataset(path, of_columns("a", "b", text="kind"))
    arrays = everything(dataset)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "a": [[0.5], [1.5]],
        "b": [[1.0], [2.0]],
        "kind": [["red"], ["blue"]],
        "labels": [2, 0],
    }
    assert dataset.note == f"{path}: no input reads the columns 'extra'"
    samples = open_samples(path, of_columns("a", "b", text="kind"))
    assert everything(samples.dataset)["kind"].tolist() == [["red"], ["blue"]]


def test_numbers_for_an_input_of_text_are_what_is_written(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,kind,label\n1,10,2\n2,7,0\n")
    assert everything(open_dataset(path, of_columns("a", text="kind")))["kind"].tolist() == [["10"], ["7"]]
    path.write_text("a,kind,label\n1,1.50,2\n2,7,0\n")
    with pytest.raises(
        DataError, match="the input 'kind' takes text, and is to be filled with values of dtype float64; give text"
    ):
        open_dataset(path, of_columns("a", text="kind"))


def test_a_guessed_label_beside_columns_that_nothing_reads(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,b,extra,species\n1,2,3,0\n")
    note = open_dataset(path, of_columns("a", "b")).note
    assert note is not None
    assert "'species', the last, is taken for the label" in note
    assert note.endswith("; no input reads the columns 'extra'")


@pytest.mark.parametrize("read", [open_dataset, open_samples])
def test_a_table_without_a_column_of_an_input(tmp_path, read):
    path = tmp_path / "data.csv"
    path.write_text("a,c,label\n1,2,0\n")
    with pytest.raises(DataError, match="the model's inputs are 'a', 'b', and no column of features is called 'b'; name the col"):
        read(path, of_columns("a", "b"))


def test_labels_by_the_numbers_that_the_model_calls_its_classes(tmp_path):
    """Not their indices: 1 is the second class of a model that calls its classes 0, 1 and 2."""
    path = tmp_path / "data.csv"
    path.write_text("x,label\n0.5,3\n1.5,5\n2.5,9\n")
    wanted = replace(classification(1), described=DataDescription(classes=("3", "5", "9"), numbers=(3, 5, 9)))
    dataset = open_dataset(path, wanted)
    assert everything(dataset)["labels"].tolist() == [0, 1, 2]
    assert dataset.classes == ("3", "5", "9")
    ignoring = replace(wanted, label=class_entry(ignored=-100))
    path.write_text("x,label\n0.5,9\n1.5,-100\n")
    assert everything(open_dataset(path, ignoring))["labels"].tolist() == [2, -100]
    path.write_text("x,label\n0.5,1\n")
    with pytest.raises(DataError, match="the label 1 is none of the model's classes, which are numbered 3, 5, 9; remove these"):
        open_dataset(path, wanted)


def test_small_whole_numbers_in_a_table_are_no_pixels(tmp_path):
    path = tmp_path / "data.parquet"
    table = pyarrow.table({"a": np.uint8([1, 2]), "b": np.uint8([3, 4]), "target": np.int64([0, 1])})
    pyarrow.parquet.write_table(table, path)
    np.testing.assert_array_equal(everything(open_dataset(path, classification(2)))["x"], np.float32([[1, 3], [2, 4]]))


def test_parquet_with_class_names_numbered_by_the_training_data(tmp_path):
    path = tmp_path / "data.parquet"
    table = pyarrow.table({"species": ["dog", "ant"], "a": [1.5, 2.0], "b": [True, False]})
    pyarrow.parquet.write_table(table, path)
    dataset = open_dataset(path, classification(2), label="species", classes=("dog", "cat", "ant"))
    arrays = everything(dataset)
    np.testing.assert_array_equal(arrays["x"], np.float32([[1.5, 1], [2, 0]]))
    assert arrays["labels"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1.0, None], "b": [1, 2], "y": [0, 1]}, r"row 1: column 'a' has no value; .*--missing drop"),
        ({"a": [[1.0], [2.0]], "b": [1, 2], "y": [0, 1]}, "column 'a' is of type list"),
        ({"a": [1.0, np.nan], "b": [1, 2], "y": [0, 1]}, "row 1: column 'a' holds 'nan', which stands for no value"),
        ({"a": ["u", "v"], "b": ["u", "v"], "c": [1, 2], "y": [0, 1]}, "3 columns give 3 .*, or 5 with a place for each"),
        ({"a": np.zeros(2, "M8[s]"), "b": [1, 2], "y": [0, 1]}, r"column 'a' holds values of type datetime64\[.*\], not numbers"),
    ],
)
def test_parquet_that_does_not_fit(tmp_path, columns, message):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(DataError, match=message):
        open_dataset(path, classification(2))


def test_damaged_parquet(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(DataError, match="damaged, or no Parquet file"):
        open_dataset(path, classification(2))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=rf"pyarrow, which is not installed; {re.escape(install_command('pyarrow'))}"):
        open_dataset(path, classification(2))


def test_categories_of_parquet_are_class_names(tmp_path):
    path = tmp_path / "data.parquet"
    species = pyarrow.array(["dog", "ant", "dog"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"a": [1.0, 2.0, 3.0], "b": [1, 2, 3], "label": species}), path)
    dataset = open_dataset(path, classification(2))
    assert (dataset.classes, everything(dataset)["labels"].tolist()) == (("ant", "dog"), [1, 0, 1])


def write_images(folder: Path) -> None:
    for name, color, size, file in [
        ("red", (255, 0, 0), (4, 6), "b.png"),
        ("red", (128, 0, 0), (4, 6), "a.png"),
        ("blue", (0, 0, 255), (9, 9), "deep/one.bmp"),
    ]:
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, color).save(path)
    (folder / "red" / "notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()


@pytest.mark.parametrize(
    ("shape", "channels_axis"), [((3, 6, 4), 1), ((6, 4, 3), 3), ((3, "height", "width"), 1), ((3, "height", 4), 1)]
)
def test_image_folder(tmp_path, shape, channels_axis):
    write_images(tmp_path)
    dataset = open_dataset(tmp_path, classification(*shape), image_size=(6, 4))
    assert dataset.classes == ("blue", "red")
    batch = dataset.batch(np.array([2, 0, 1]))
    assert batch["labels"].tolist() == [1, 0, 1]
    images = np.moveaxis(batch["x"], channels_axis, -1)
    assert images.shape == (3, 6, 4, 3)
    np.testing.assert_array_equal(images[0], np.broadcast_to(np.float32([1, 0, 0]), (6, 4, 3)))
    np.testing.assert_array_equal(images[1], np.broadcast_to(np.float32([0, 0, 1]), (6, 4, 3)))
    np.testing.assert_array_equal(images[2, 0, 0], np.float32([128, 0, 0]) / np.float32(255))
    np.testing.assert_array_equal(dataset.batch(np.array([2, 0, 1]))["x"], batch["x"])


@pytest.mark.parametrize(("shape", "expected"), [((1, 6, 4), (3, 1, 6, 4)), ((6, 4), (3, 6, 4))])
def test_image_folder_in_grey(tmp_path, shape, expected):
    write_images(tmp_path)
    batch = everything(open_dataset(tmp_path, classification(*shape)))
    assert batch["x"].shape == expected
    assert batch["x"][0].max() == np.float32(29) / np.float32(255)


def test_a_class_of_damaged_images_alone_is_named(tmp_path):
    write_images(tmp_path)
    (tmp_path / "blue" / "deep" / "one.bmp").write_bytes(b"not an image")
    dataset = open_dataset(tmp_path, classification(3, 6, 4))
    with pytest.raises(DataError, match=r"no image of the class 'blue' can be read: .*one\.bmp \(no format that is read\)"):
        everything(dataset)


def test_image_folders_that_do_not_fit(tmp_path):
    with pytest.raises(DataError, match="no images; put them into one subfolder per class"):
        open_dataset(tmp_path, classification(3, 6, 4))
    write_images(tmp_path)
    with pytest.raises(DataError, match=r"leaves the size of an image open; .*--image-size"):
        open_dataset(tmp_path, classification(3, "height", "width"))
    with pytest.raises(DataError, match="class 'red' is not among the classes that are trained: blue, green"):
        open_dataset(tmp_path, classification(3, 6, 4), classes=("blue", "green"))
    with pytest.raises(DataError, match=r"2 classes \(blue \.\.\. red\), and the model has 1"):
        open_dataset(tmp_path, classification(3, 6, 4, classes=1))
    with pytest.raises(DataError, match=r"images give classes, and the loss compares with numbers"):
        open_dataset(tmp_path, DataSpec((data_entry(3, 6, 4),), value_entry()))


def test_images_without_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=rf"Pillow, which is not installed; {re.escape(install_command('PIL'))}"):
        open_dataset(tmp_path, classification(3, 6, 4))


def test_what_is_not_there_or_of_no_known_format(tmp_path):
    with pytest.raises(DataError, match=r"no such file or folder; check the path\. Data are digits .* \.parquet file"):
        open_dataset(tmp_path / "nothing.csv", classification(2))
    path = tmp_path / "data.xlsx"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"burnish does not read '\.xlsx' files; give data in another form\. Data are digits"):
        open_dataset(path, classification(2))


def test_a_class_index_that_is_ignored_is_data_too(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((2, 2)), y=np.array([1, -100]))
    wanted = DataSpec((data_entry(2),), class_entry(ignored=-100))
    assert everything(open_dataset(path, wanted))["labels"].tolist() == [1, -100]


def test_arrays_pairs_and_data_sets_are_data_too(tmp_path):
    wanted = classification(2)
    x, y = np.array([[1, 2], [3, 4]]), np.array(["dog", "ant"])
    pair = as_dataset((x, y), wanted, classes=("emu", "dog", "ant"))
    assert everything(pair)["labels"].tolist() == [1, 2]
    assert everything(pair)["x"].dtype == np.float32
    arrays = {"x": np.float32(x), "labels": np.array([0, 1])}
    assert everything(as_dataset(arrays, wanted))["x"].tolist() == x.tolist()
    dataset = ArrayDataset(arrays)
    assert as_dataset(dataset, wanted) is dataset
    np.savez(tmp_path / "data.npz", x=x, y=np.array([0, 1]))
    for path in (tmp_path / "data.npz", str(tmp_path / "data.npz")):
        assert len(as_dataset(path, wanted)) == 2


@pytest.mark.parametrize(
    ("names", "note"),
    [
        ("x y", None),
        ("x labels", None),
        ("x y mask", "nothing reads the array 'mask'"),
        ("x y b a", "nothing reads the arrays 'b', 'a'"),
        ("x y labels", "nothing reads the array 'y'"),
    ],
)
def test_arrays_that_nothing_reads_are_named(tmp_path, names, note):
    path = tmp_path / "data.npz"
    arrays = {"x": np.zeros((2, 2), np.float32)}
    np.savez(path, **{name: arrays.get(name, np.zeros(2, np.int64)) for name in names.split()})
    found = open_dataset(path, classification(2)).note
    assert found == (None if note is None else f"{path}: {note}")


def test_arrays_beside_several_inputs_and_labels(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, left=np.zeros((3, 2)), right=np.ones((3, 1)), targets=np.zeros(3), x=np.zeros(3), y=np.zeros(3))
    wanted = DataSpec((data_entry(2, name="left"), data_entry(1, name="right")), value_entry())
    assert open_dataset(path, wanted).note == f"{path}: nothing reads the arrays 'x', 'y'"
    assert open_samples(path, replace(wanted, label=None, predicts=True)).note == f"{path}: nothing reads the array 'x'"


@pytest.mark.parametrize(
    ("text", "doubted"),
    [
        ("1.5,2.25,u\n2,1,v\n1,2,u\n", None),
        ("sunny,hot,no\nrain,mild,yes\nsunny,hot,no\n", None),
        ("1.5,height,label\n2,1,v\n1,2,u\n", "'1.5' among them are numbers"),
        ("a,b,u\n2,1,v\n1,2,u\n", "'u' among them are values of their columns"),
        ("0,1,label\n2,1,v\n1,2,u\n", ""),
        ("2019,2020,label\n2,1,v\n1,2,u\n", ""),
        ("a,b,label\n2,1,v\n1,2,u\n", ""),
    ],
)
def test_a_first_line_that_reads_like_a_sample(tmp_path, text, doubted):
    """A table without names loses a sample to them; names that programs give, such as 0, 1, 2, are none."""
    path = tmp_path / "data.csv"
    path.write_text(text)
    if doubted is None:
        with pytest.raises(DataError, match=r"the first line has to name the columns, and reads like a sample: .*a,b,label"):
            read_csv(path)
        path.write_text("a,b,label\n" + text)
        columns, notes = read_csv(path)
        assert len(columns["a"]) == 3
        assert notes == []
        return
    notes = read_csv(path)[1]
    assert [doubted in note for note in notes] == ([True] if doubted else [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b,label,\n1,2,u,\n2,1,v,\n", "a column without a name, which holds nothing, is left out"),
        (",a,b,label\n0,1,2,u\n1,2,1,v\n", "a column without a name, which counts the rows, is left out"),
        (",b,label\n7,2,u\n3,1,v\n", None),
    ],
)
def test_a_column_without_a_name_that_is_none(tmp_path, text, said):
    """Commas at the ends of lines, and the index that pandas writes."""
    path = tmp_path / "data.csv"
    path.write_text(text)
    columns, notes = read_csv(path)
    assert (list(columns), notes) == (["a", "b", "label"] if said else ["", "b", "label"], [said] if said else [])


def test_a_quotation_mark_that_is_not_closed_takes_no_rows_in(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text('a,b,label\n1,2,u\n2,1,"v\n1,2,u\n2,1,v\n')
    with pytest.raises(DataError, match=r"data\.csv, line 3: a quotation mark is not closed, so that the 3 lines from there"):
        read_csv(path)
    path.write_text('a,b,label\n1,2,5" pipe\n2,1,"v\nw"\n')
    assert read_csv(path)[0]["label"].tolist() == ['5" pipe', "v\nw"]


@pytest.mark.parametrize(
    ("line", "refused"), [("a|b|label\n1|2|u\n", True), ("a b\n1 u\n", True), ("blood pressure\n120\n", False)]
)
def test_other_characters_between_values_are_named(tmp_path, line, refused):
    path = tmp_path / "data.csv"
    path.write_text(line)
    if refused:
        with pytest.raises(DataError, match=r"hold one value each: put commas, semicolons or tabs between values"):
            read_csv(path)
    else:
        assert list(read_csv(path)[0]) == ["blood pressure"]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_labels_of_a_table_to_predict_may_be_missing(tmp_path, ending):
    path = tmp_path / f"data.{ending}"
    if ending == "csv":
        path.write_text("a,b,label\n1,2,\n2,1,\n")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"a": [1.0, 2.0], "b": [2, 1], "label": [None, "u"]}), path)
    spec = DataSpec.of([data_entry((2,))], predicts=True)
    assert open_samples(path, spec).dataset.batch(np.arange(2))["x"].tolist() == [[1, 2], [2, 1]]


@pytest.mark.parametrize("read", [open_dataset, open_samples])
def test_data_that_the_system_refuses_are_named(tmp_path, monkeypatch, read):
    path = tmp_path / "data.csv"
    path.write_text("a,b,label\n1,2,0\n2,1,1\n")

    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(np, "load", refuse)
    for name in ("data.csv", "data.npz"):
        (tmp_path / name).touch()
        with pytest.raises(DataError, match=rf"{name}: cannot be read \(Permission denied\); choose data that you may read"):
            read(tmp_path / name, classification(2))


def test_a_folder_of_images_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name / "0.png")
    listed = os.scandir

    def refuse(path: object) -> object:
        if str(path).endswith("bee"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot be read \('.*bee': Permission denied\)"):
        open_dataset(tmp_path, classification(1, 4, 4, classes=2))
