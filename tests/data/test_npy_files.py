"""One array in an .npy file, with its labels in another: read from the file, never unpickled, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import burnish
from burnish.data import DataSpec, open_dataset
from burnish.data.formats import format_of
from burnish.data.numpy_files import MappedArrays
from burnish.data.splitting import EvalSplit, held_out, parts
from burnish.data.unlabelled import open_samples
from burnish.errors import DataError
from burnish.models import create
from specs.program_inputs import class_entry, classification, data_entry


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    monkeypatch.chdir(tmp_path)
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2) / 40, np.arange(20) % 2
    np.save("features.npy", x)
    np.save("classes.npy", y)
    return x, y


def test_an_array_and_its_labels(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = arrays
    assert format_of("features.npy").name == "array"
    data = open_dataset("features.npy", classification(2), label="classes.npy")
    assert isinstance(data, MappedArrays)
    batch = data.batch(np.array([3, 1]))
    np.testing.assert_array_equal(batch["x"], x[[3, 1]])
    assert batch["labels"].tolist() == [1, 1]
    split = held_out(data, EvalSplit(0.2), 0, class_entry())
    assert split.line == "held out 4 of 20 samples (stratified by 'classes', seed 0)"
    _, evaluation = parts(data, split)
    np.testing.assert_array_equal(evaluation.batch(np.arange(4))["x"], x[split.evaluation])
    samples = open_samples("features.npy", classification(2))
    np.testing.assert_array_equal(samples.dataset.batch(np.arange(20))["x"], x)
    assert y.tolist() == data.batch(np.arange(20))["labels"].tolist()


def test_names_as_labels_and_the_call_of_finetune(arrays: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    np.save("named.npy", np.where(arrays[1] == 1, "yes", "no"))
    model = create("mlp", classes=2, input_shape=(2,))
    tuned = burnish.finetune(model, "features.npy", label="named.npy", eval_split=0.2, epochs=1, lr=0.1)
    assert "held out 4 of 20 samples (stratified by 'named', seed 0)" in tuned.notes
    assert isinstance(tuned.predict("features.npy"), list)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (
            None,
            r"one array, and its labels are in another file: name that \(label='y.npy', --label y.npy\), or give a folder",
        ),
        ("gone.npy", "--label gone.npy is no such file; name the .npy file with the labels"),
        ("label", "--label label is no .npy file; name the .npy file with the labels"),
        ("features.npy", r"features.npy: 'labels' wants one class index for each sample"),
        ("short.npy", r"its arrays hold 'features.npy' 20, 'short.npy' 3 samples; each sample needs one entry in every array"),
        ("objects.npy", "objects.npy: damaged, no .npy file, or one of Python objects .* never unpickled; write an array"),
        ("text.npy", "text.npy: damaged, no .npy file"),
        ("large.npy", "large.npy: sample 0 has the label 7, and 'labels' takes 0 to 2"),
    ],
)
def test_labels_that_are_refused(arrays: tuple[np.ndarray, np.ndarray], label: str | None, message: str) -> None:
    np.save("short.npy", arrays[1][:3])
    np.save("large.npy", arrays[1] + 7)
    np.save("objects.npy", np.array([{}] * 20, object), allow_pickle=True)
    Path("text.npy").write_text("0, 1, 2")
    with pytest.raises(DataError, match=message):
        open_dataset("features.npy", classification(2), label=label)


@pytest.mark.parametrize(
    ("array", "spec", "message"),
    [
        (np.array([{}] * 20, object), classification(2), "or one of Python objects .* never unpickled"),
        (np.zeros((20, 3), np.float32), classification(2), r"samples of shape \[2\], and those of the data have shape \[3\]"),
        (np.zeros(20, "U3"), classification(2), "is to be filled with values of dtype <U3; give numbers"),
        (np.full((20, 2), np.nan), classification(2), "sample 0 holds a NaN or infinite value"),
        (np.zeros((20, 2)), DataSpec((data_entry(2), data_entry(2, name="z")), class_entry()), "this format fills exactly one"),
    ],
)  # fmt: skip
def test_arrays_that_are_refused(arrays: tuple[np.ndarray, np.ndarray], array: Any, spec: DataSpec, message: str) -> None:
    np.save("other.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=message):
        open_dataset("other.npy", spec, label="classes.npy")
