"""Data sets of Hugging Face: names of classes, arrays of bytes, and what is refused, on stand-ins with their columns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image

from burnish.data import DataDescription, DataSpec, as_dataset
from burnish.data.text.settings import Text
from burnish.errors import DataError
from oracles.small_tokenizers import word_tokenizer
from specs.program_inputs import classification, data_entry


@dataclass
class ClassLabel:
    names: list[str]


@dataclass
class Array2D:
    dtype: str


@dataclass
class Columns:
    """The columns of a ``datasets.Dataset`` as lists, as it gives them."""

    columns: dict[str, list[Any]]
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: str | int) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: values[key] for name, values in self.columns.items()}


NUMBERS = [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]]
PICTURES = [Image.fromarray(np.full((4, 4), 10 * shade, np.uint8)) for shade in range(3)]
ANIMALS = ClassLabel(["cat", "dog", "owl"])


def known_by(spec: DataSpec, *classes: str) -> DataSpec:
    """A model that calls its classes so."""
    return replace(spec, described=DataDescription(classes=classes))


def test_names_of_classes_and_their_order_are_the_models_own_where_it_has_them():
    """Whatever holds the samples: else a model that was trained on another order would learn, and be judged by, wrong classes."""
    features = {"label": ANIMALS}
    for inputs, name, values in ((classification(2), "x", NUMBERS), (classification(4, 4, 1), "image", PICTURES)):
        source = Columns({name: values, "label": [0, 1, 2]}, features)
        alone = as_dataset(source, inputs)
        assert (alone.classes, alone.batch(np.arange(3))["labels"].tolist()) == (("cat", "dog", "owl"), [0, 1, 2])
        known = as_dataset(source, known_by(inputs, "owl", "dog", "cat"))
        assert (known.classes, known.batch(np.arange(3))["labels"].tolist()) == (("owl", "dog", "cat"), [2, 1, 0])
        trained = as_dataset(source, inputs, classes=["dog", "owl", "cat"])
        assert trained.batch(np.arange(3))["labels"].tolist() == [2, 0, 1]
        others = as_dataset(source, known_by(inputs, "owl", "fish", "cat"))
        assert (others.classes, others.batch(np.arange(3))["labels"].tolist()) == (("cat", "dog", "owl"), [0, 1, 2])


def test_of_several_columns_the_one_with_classes_is_the_label():
    columns = {"kind": [0, 1, 1], "x": NUMBERS}
    dataset = as_dataset(Columns(columns, {"kind": ANIMALS}), classification(2))
    assert (dataset.batch(np.arange(3))["labels"].tolist(), dataset.classes, dataset.note) == ([0, 1, 1], (*ANIMALS.names,), None)
    columns = {"image": PICTURES, "kind": ["a", "b", "a"]}
    dataset = as_dataset(Columns(columns), classification(4, 4, 1))
    assert "no column is called label, y or target; 'kind', the last, is taken for the label" in dataset.note
    assert dataset.classes == ("a", "b")


def test_arrays_of_bytes_are_pixels():
    """As they are in an archive of arrays; a column of numbers is none."""
    pixels = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
    for values, features in ((pixels.tolist(), {"x": Array2D("uint8")}), (pixels, {})):
        source = Columns({"x": values, "label": [0, 1, 2]}, features)
        for asked, expected in ((None, pixels / 255), ({"mean": 0.5, "std": 0.5}, pixels / 127.5 - 1)):
            batch = as_dataset(source, classification(4, 4), pixels=asked).batch(np.arange(3))
            np.testing.assert_allclose(batch["x"], expected, rtol=0, atol=1e-6)
    rows = Columns({"a": [1, 2, 3], "b": [4, 5, 6], "label": [0, 1, 2]}, {"a": Array2D("uint8")})
    assert as_dataset(rows, classification(2)).batch(np.arange(1))["x"].tolist() == [[1, 4]]


def test_columns_of_objects_that_are_all_texts_are_texts():
    """As a table of Arrow, or a data set in NumPy's format, gives them."""
    names = np.array(["cat", "owl", "cat"], dtype=object)
    dataset = as_dataset(Columns({"x": NUMBERS, "label": names}), classification(2))
    assert (dataset.classes, dataset.batch(np.arange(3))["labels"].tolist()) == (("cat", "owl"), [0, 1, 0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            Columns({"x": NUMBERS, "label": [0, -1, 1]}, {"label": ANIMALS}),
            r"the label -1 in the column 'label' is none of the 3 classes; leave these samples out, data\.filter\(",
        ),
        (
            Columns({"x": NUMBERS, "fine": [0, 1, 2], "coarse": [0, 0, 0]}, {"fine": ANIMALS, "coarse": ANIMALS}),
            r"columns 'fine', 'coarse' hold classes, and none is called label, .* data\.rename_column\('fine', 'label'\)",
        ),
        (
            Columns({"a": [1.0, None, 2.0], "b": [1, 2, 3], "label": [0, 1, 2]}),
            "row 1: column 'a' has no value; fill it in, remove the row, leave such rows out",
        ),
        (Columns({"x": [[1, 2], [3], [4, 5]], "label": [0, 1, 2]}), "column 'x' holds lists of different lengths"),
        (
            Columns({"a": [1, 2, 3], "x": NUMBERS, "label": [0, 1, 2]}),
            r"columns 'a', 'x' are to fill the model's one input, and 'x' holds arrays: leave the others out",
        ),
        (
            {"train": Columns({"x": NUMBERS}), "test": Columns({"x": NUMBERS})},
            r"2 data sets, 'train', 'test': give one of them, such as data\['train'\], and another as eval_data",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(source, message):
    with pytest.raises(DataError, match=message):
        as_dataset(source, classification(2))


def test_a_data_frame_is_a_table():
    class Series(list):
        def to_numpy(self) -> np.ndarray:
            return np.array(self, dtype=object if isinstance(self[0], str) else None)

    class Frame(dict):
        """What pandas and polars have in common."""

        columns = property(lambda self: [*self])
        to_numpy = None

    frame = Frame(a=Series([1.5, 2.5, 0.5]), b=Series([2, 0, 1]), label=Series(["owl", "cat", "owl"]))
    for source in (frame, dict(frame), np.rec.fromarrays([[1.5, 2.5, 0.5], [2, 0, 1], ["owl", "cat", "owl"]], names="a,b,label")):
        dataset = as_dataset(source, classification(2))
        assert dataset.batch(np.arange(3))["x"].tolist() == [[1.5, 2], [2.5, 0], [0.5, 1]]
        assert (dataset.classes, dataset.batch(np.arange(3))["labels"].tolist()) == (("cat", "owl"), [1, 0, 1])
    assert as_dataset(frame, classification(2), label="b").note == "data: categories become indices: 'label' (2)"


def test_what_other_libraries_call_data_is_refused_with_a_remedy():
    class Samples:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(DataError, match=r"no data set is made of a value of type Samples.*DataLoader\(data, b"):
        as_dataset(Samples(), classification(2))


def test_a_stream_of_samples_is_refused():
    class IterableDataset:
        column_names = ["x", "label"]  # noqa: RUF012  # as the library has it

        def __getitem__(self, key: str) -> None:
            raise NotImplementedError

    with pytest.raises(DataError, match=r"an IterableDataset gives one sample after another, .* burnish\.data\.Batches\("):
        as_dataset(IterableDataset(), classification(2))


def test_texts_have_the_order_of_the_model_too():
    source = Columns({"text": ["w1", "w2", "w1"], "kind": [0, 1, 2]}, {"kind": ANIMALS})
    pytest.importorskip("tokenizers")
    spec = DataSpec((data_entry("tokens", name="input_ids", dtype=ir.DataType.INT64),), classification(2).label)
    text = Text(tokenizer=word_tokenizer(3), length=4)
    assert as_dataset(source, spec, text=text).batch(np.arange(3))["labels"].tolist() == [0, 1, 2]
    known = as_dataset(source, known_by(spec, "owl", "dog", "cat"), text=text)
    assert (known.classes, known.batch(np.arange(3))["labels"].tolist()) == (("owl", "dog", "cat"), [2, 1, 0])
