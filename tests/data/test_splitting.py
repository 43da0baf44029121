"""What is held out of data for evaluation: which samples, of every kind of data, and what cannot be held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_annotated import mask_spec, spec_of
from word_texts import opened
from word_texts import spec as spec_of_texts

from burnish.data import ArrayDataset, Dataset, Text, as_dataset, open_dataset
from burnish.data.csv import read_csv
from burnish.data.data_spec import DataSpec
from burnish.data.image.labelled import LabelledImages
from burnish.data.splitting import EvalSplit, Split, held_out, parts, read_split
from burnish.data.text.dataset import TextDataset
from burnish.errors import CheckpointError, ConfigurationError, DataError
from oracles.shapes import drawn, write_coco, write_masks
from oracles.small_tokenizers import word_tokenizer
from specs.program_inputs import class_entry, classification, data_entry, value_entry

FIFTH = EvalSplit(0.2)


def arrays(*sizes: int, groups: Any = None) -> ArrayDataset:
    """Samples that hold their own numbers, so many of each class."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return ArrayDataset({"x": np.arange(len(labels), dtype=np.float32), "labels": labels}, groups=groups)


def split_of(dataset: Dataset, asked: EvalSplit = FIFTH, seed: int = 0, **options: Any) -> Split:
    return held_out(dataset, asked, seed, class_entry(), **options)


def halves(dataset: Dataset, split: Split) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    train, evaluation = parts(dataset, split)
    return train.batch(np.arange(len(train))), evaluation.batch(np.arange(len(evaluation)))


def test_a_share_is_taken_of_each_class_and_follows_the_seed() -> None:
    data = arrays(100, 60, 40)
    split = split_of(data)
    assert split.line == "held out 40 of 200 samples (stratified by class, seed 0)"
    train, evaluation = halves(data, split)
    assert np.bincount(evaluation["labels"]).tolist() == [20, 12, 8]
    assert np.bincount(train["labels"]).tolist() == [80, 48, 32]
    assert sorted([*train["x"], *evaluation["x"]]) == list(range(200))
    assert split_of(data).digest == split.digest
    assert split_of(data, seed=1).digest != split.digest


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.77, 0.99])
@pytest.mark.parametrize("sizes", [(1, 1, 2), (7, 7, 7), (1, 50, 3), (2, 2, 2, 2, 2, 2, 2), (1000, 1, 10)])
def test_no_side_and_no_class_of_the_training_part_is_empty(share: float, sizes: tuple[int, ...]) -> None:
    data = arrays(*sizes)
    for seed in range(5):
        train, evaluation = halves(data, split_of(data, EvalSplit(share), seed))
        kept = np.bincount(train["labels"], minlength=len(sizes))
        assert (kept > 0).all()
        assert 1 <= len(evaluation["labels"]) < sum(sizes)
        wanted = min(max(1, round(share * sum(sizes))), sum(size - 1 for size in sizes))
        assert len(evaluation["labels"]) == wanted


def test_classes_of_which_nothing_is_held_out_are_named() -> None:
    data = arrays(98, 1, 2)
    data.classes = ("many", "one", "two")
    split = split_of(data)
    assert split.notes == ("no sample of the classes 'one' (1), 'two' (2) is held out: evaluation says nothing of it",)
    assert split_of(arrays(50, 50)).notes == ()


def test_values_and_what_has_no_classes_are_held_out_at_random() -> None:
    data = ArrayDataset({"x": np.arange(10.0), "targets": np.arange(10.0)})
    assert held_out(data, FIFTH, 3, value_entry()).line == "held out 2 of 10 samples (at random, seed 3)"


def test_groups_stay_whole_and_their_number_is_said() -> None:
    generator = np.random.default_rng(0)
    groups = generator.integers(0, 20, 200)
    data = arrays(100, 100, groups=np.char.add("p", groups.astype(str)))
    split = split_of(data, EvalSplit(0.2, "patient"))
    train, evaluation = halves(data, split)
    inside, outside = set(groups[evaluation["x"].astype(int)]), set(groups[train["x"].astype(int)])
    assert not inside & outside
    assert split.groups == tuple(sorted(f"p{group}" for group in inside))
    assert 30 <= len(evaluation["x"]) <= 50
    assert (abs(np.bincount(evaluation["labels"]) - 20) <= 5).all()
    line = (
        f"held out {len(evaluation['x'])} of 200 samples ({len(inside)} of 20 groups by 'patient', stratified by class, seed 0)"
    )
    assert split.line == line


def test_the_only_group_of_a_class_is_not_held_out() -> None:
    labels = np.array([0] * 8 + [1] * 2 + [0] * 2)
    data = ArrayDataset({"x": np.arange(12.0), "labels": labels}, groups=np.array([*"aabbccddeeff"]))
    for seed in range(20):
        assert "e" not in (split_of(data, EvalSplit(0.2, "g"), seed).groups or ())


def test_one_group_larger_than_the_share_is_held_out_where_all_are() -> None:
    split = split_of(arrays(10, groups=np.repeat([0, 1], [7, 3])), EvalSplit(0.01, "g"))
    assert split.evaluation.tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("data", "asked", "message"),
    [
        (arrays(1), FIFTH, "the data have 1 of samples, and nothing can be held out"),
        (arrays(1, 1, 1), FIFTH, "each of the 3 classes has one sample, .* give more samples of each class"),
        (arrays(4, groups=np.zeros(4, int)), EvalSplit(0.2, "g"), "all rows have the value '0' in the column 'g'"),
        (arrays(2, 2, groups=np.array([0, 0, 1, 1])), EvalSplit(0.2, "g"), "each group of 'g' has all samples of a class"),
        (arrays(4), EvalSplit(0.2, "g"), "data of type ArrayDataset do not say their column 'g': give a share"),
    ],
)
def test_what_cannot_be_held_out(data: Dataset, asked: EvalSplit, message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_of(data, asked)


@pytest.mark.parametrize(
    ("asked", "share", "group", "text"),
    [
        (0.2, 0.2, None, "0.2"),
        ("0.25", 0.25, None, "0.25"),
        (np.float32(0.5), 0.5, None, "0.5"),
        ("group:patient", 0.2, "patient", "group:patient"),
        ("group:patient:0.3", 0.3, "patient", "group:patient:0.3"),
        ("group:a:b", 0.2, "a:b", "group:a:b"),
        ("group:a:2:0.2", 0.2, "a:2", "group:a:2:0.2"),
    ],
)
def test_what_may_be_asked_for(asked: Any, share: float, group: str | None, text: str) -> None:
    read = EvalSplit.read(asked)
    assert (read.share, read.group, read.text()) == (share, group, text)
    assert EvalSplit.read(text) == EvalSplit.read(read) == read


@pytest.mark.parametrize(
    "asked", [0, 1, 1.5, -0.2, "0", "nan", "inf", float("nan"), "a fifth", True, "group:", "group:a:1.5", [0.2]]
)
def test_what_may_not_be_asked_for(asked: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"eval_split=.* \(--eval-split\): .*give a share, such as 0.2, or 'group:COLUMN'"
    ):
        EvalSplit.read(asked)


def test_a_run_that_goes_on_takes_what_its_folder_keeps(tmp_path: Path) -> None:
    data = arrays(10, 10)
    split = split_of(data)
    split.write(tmp_path)
    kept = read_split(tmp_path)
    assert split_of(data, kept=kept).digest == split.digest
    content = json.loads((tmp_path / "split.json").read_text())
    assert content["held_out"] == split.line
    assert content["evaluation"] == split.evaluation.tolist()
    content["evaluation"] = [0, 19]
    (tmp_path / "split.json").write_text(json.dumps(content))
    assert split_of(data, kept=read_split(tmp_path)).evaluation.tolist() == [0, 19]
    with pytest.raises(
        DataError, match=r"was started with 20 samples, of which it holds some out \(split.json\), .* have 30 now"
    ):
        split_of(arrays(15, 15), kept=kept)
    with pytest.raises(ConfigurationError, match=r"with eval_split=0.2 and seed=0, and is now to go on with eval_split=0.3"):
        split_of(data, EvalSplit(0.3), kept=kept)
    for damaged in ("{", "[]", '{"seed": 0}', '{"seed": 0, "evaluation": [-1]}', '{"seed": 0, "evaluation": "all"}'):
        (tmp_path / "split.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="put the file that the run wrote back, or start a new run"):
            read_split(tmp_path)
    assert read_split(tmp_path / "elsewhere") is None


def write_images(folder: Path) -> Path:
    for name, value in (("cat", 10), ("dog", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (4, 4), value + number).save(folder / name / f"{number}.png")
    return folder


def test_images_of_a_folder_by_their_names(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    data = open_dataset(folder, classification(1, 4, 4, classes=2), split=FIFTH)
    split = split_of(data)
    assert split.line == "held out 4 of 20 samples (stratified by class, seed 0)"
    assert [name.split("/")[-2] for name in split.names or ()] == ["cat", "cat", "dog", "dog"]
    train, evaluation = parts(data, split)
    assert isinstance(train, LabelledImages)
    assert isinstance(evaluation, LabelledImages)
    assert [evaluation.name_of(index) for index in range(4)] == list(split.names or ())
    assert {train.name_of(index) for index in range(16)}.isdisjoint(split.names or ())
    assert evaluation.batch(np.arange(4))["labels"].tolist() == [0, 0, 1, 1]
    values = (evaluation.batch(np.arange(4))["x"][:, 0, 0, 0] * 255).round()
    assert values.tolist() == [Image.open(name).getpixel((0, 0)) for name in split.names or ()]
    split.write(tmp_path)
    first = Path((split.names or ("",))[0])
    first.rename(first.with_name("0000.png"))
    with pytest.raises(DataError, match=r"was started with other data: sample . was '.*png' .* is '.*png' now"):
        split_of(open_dataset(folder, classification(1, 4, 4, classes=2)), kept=read_split(tmp_path))


def test_images_that_cannot_be_read_stay_on_their_side(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    data = open_dataset(folder, classification(1, 4, 4, classes=2))
    split = split_of(data)
    Path((split.names or ("",))[0]).write_bytes(b"none")
    train, evaluation = parts(data, split)
    assert evaluation.batch(np.arange(1))["labels"].tolist() == [0]
    assert "(held out): 1 of 4 images cannot be read" in str(getattr(evaluation, "remark", None))
    assert getattr(train, "remark", None) is None


def test_objects_keep_every_class_in_the_training_part(tmp_path: Path) -> None:
    data = open_dataset(write_coco(tmp_path / "coco", drawn(12, 3)), spec_of())
    split = split_of(data)
    assert split.how == "stratified by the rarest class in a picture, seed 0"
    train, evaluation = halves(data, split)
    assert (len(train["x"]), len(evaluation["x"])) == (10, 2)
    whole = data.batch(split.evaluation)
    np.testing.assert_array_equal(evaluation["boxes"], whole["boxes"])
    np.testing.assert_array_equal(evaluation["x"], whole["x"])
    assert set(np.unique(train["labels"])) >= {0, 1}


def test_masks_go_with_their_pictures(tmp_path: Path) -> None:
    data = open_dataset(write_masks(tmp_path / "masks", drawn(10, 3)), mask_spec())
    split = held_out(data, FIFTH, 0, mask_spec().label)
    assert split.line == "held out 2 of 10 samples (at random, seed 0)"
    _, evaluation = halves(data, split)
    np.testing.assert_array_equal(evaluation["labels"], data.batch(split.evaluation)["labels"])


def test_arrays_in_files_by_the_name_of_their_labels(tmp_path: Path) -> None:
    x, y, patient = np.arange(40, dtype=np.float32).reshape(20, 2), np.repeat([0, 1], 10), np.arange(20) // 2
    np.savez(tmp_path / "data.npz", x=x, y=y, patient=patient)
    folder = tmp_path / "arrays"
    folder.mkdir()
    for name, array in {"x": x, "y": y, "patient": patient}.items():
        np.save(folder / f"{name}.npy", array)
    asked = EvalSplit(0.2, "patient")
    for source in (tmp_path / "data.npz", folder, {"x": x, "labels": y, "patient": patient}):
        data = as_dataset(source, classification(2), split=asked)
        split = split_of(data, asked)
        by = "class" if isinstance(source, dict) else "'y'"
        assert split.line == f"held out 4 of 20 samples (2 of 10 groups by 'patient', stratified by {by}, seed 0)"
        train, evaluation = halves(data, split)
        assert set(train) == {"x", "labels"}
        np.testing.assert_array_equal(evaluation["x"], x[split.evaluation])
        np.testing.assert_array_equal(train["x"], x[split.training])
        with pytest.raises(DataError, match=r"no column 'doctor' to take groups from .*; there are .*'patient'"):
            as_dataset(source, classification(2), split=EvalSplit(0.2, "doctor"))


def table(folder: Path) -> Path:
    rows = [f"{row % 7},{'red' if row % 3 else 'blue'},p{row // 3},{'yes' if row % 2 else 'no'}" for row in range(30)]
    (folder / "table.csv").write_text("\n".join(["size,colour,patient,bought", *rows]))
    return folder / "table.csv"


def test_rows_of_a_table_by_class_and_by_groups_that_are_no_feature(tmp_path: Path) -> None:
    path, asked = table(tmp_path), EvalSplit(0.2, "patient")
    data = open_dataset(path, classification(2, classes=2), label="bought", split=asked)
    split = split_of(data, asked)
    assert split.how == "2 of 10 groups by 'patient', stratified by 'bought', seed 0"
    _, evaluation = halves(data, split)
    columns, _ = read_csv(path)
    assert evaluation["x"][:, 0].tolist() == columns["size"][split.evaluation].tolist()
    assert evaluation["labels"].tolist() == (columns["bought"][split.evaluation] == "yes").astype(int).tolist()
    with pytest.raises(DataError, match=r"no column 'doctor' to take groups from .* 'size', 'colour', 'patient', 'bought'"):
        open_dataset(path, classification(2, classes=2), label="bought", split=EvalSplit(0.2, "doctor"))
    with pytest.raises(DataError, match="'bought' is the column with the labels, and cannot say which rows belong together too"):
        open_dataset(path, classification(2, classes=2), label="bought", split=EvalSplit(0.2, "bought"))


def test_categories_and_classes_are_those_of_the_whole_table(tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text("colour,label\n" + "red,b\n" * 8 + "blue,b\ngreen,a\n")
    data = open_dataset(tmp_path / "few.csv", classification(3, classes=2), split=FIFTH)
    for seed in range(10):
        train, evaluation = parts(data, held_out(data, FIFTH, seed, class_entry(2)))
        assert isinstance(train, ArrayDataset)
        assert isinstance(evaluation, ArrayDataset)
        assert train.classes == evaluation.classes == ("a", "b")
        assert train.table == evaluation.table == data.table  # type: ignore[attr-defined]
        assert evaluation.arrays["x"].shape == (2, 3)


def test_texts_and_texts_that_are_joined() -> None:
    words = [f"w{number}" for number in range(10)]
    data = opened("label", (words, ["no", "yes"] * 5))
    train, evaluation = parts(data, split := split_of(data))
    assert split.line == "held out 2 of 10 samples (stratified by class, seed 0)"
    assert isinstance(evaluation, TextDataset)
    assert [evaluation.words(index) for index in range(2)] == [data.words(index) for index in split.evaluation]
    assert sorted(train.order(4, 0, 0).tolist()) == list(range(8))  # type: ignore[attr-defined]
    joined = opened("causal", words, joined=True, length=4)
    train, evaluation = parts(joined, split := held_out(joined, FIFTH, 0))
    assert (len(joined), split.line) == (8, "held out 2 of 10 texts (at random, seed 0)")
    both = [
        *train.batch(np.arange(len(train)))["input_ids"].reshape(-1),
        *evaluation.batch(np.arange(2))["input_ids"].reshape(-1),
    ]
    whole = joined.batch(np.arange(8))["input_ids"].reshape(-1)
    assert sorted(token for token in both if token) == sorted(token for token in whole if token)


def test_texts_of_a_table_by_groups(tmp_path: Path) -> None:
    rows = [{"text": f"w{row}", "label": "yes" if row % 2 else "no", "author": f"a{row // 2}"} for row in range(10)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    asked = EvalSplit(0.2, "author")
    data = open_dataset(path, spec_of_texts(), text=Text(tokenizer=word_tokenizer()), split=asked)
    split = split_of(data, asked)
    assert split.how == "1 of 5 groups by 'author', stratified by 'label', seed 0"
    assert len({number // 2 for number in split.evaluation.tolist()}) == 1
    with pytest.raises(DataError, match=r"no column 'doctor' to take groups from .* 'text', 'label', 'author'"):
        open_dataset(path, spec_of_texts(), text=Text(tokenizer=word_tokenizer()), split=EvalSplit(0.2, "doctor"))


@pytest.mark.parametrize(("write", "said"), [(write_images, "a folder of images"), (None, "digits or digits:test")])
def test_groups_of_data_without_columns(tmp_path: Path, write: Any, said: str) -> None:
    source = "digits" if write is None else write(tmp_path / "images")
    with pytest.raises(DataError, match=rf"{said} has no columns, and a group is the value of one .* give a share"):
        open_dataset(source, classification(1, 8, 8, classes=10), split=EvalSplit(0.2, "patient"))


class Own:
    """A data set of a user's, which changes its samples and orders them."""

    def __len__(self) -> int:
        return 10

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": np.asarray(indices, np.float32)[:, None]}

    def order(self, batch_size: int, seed: int, epoch: int) -> np.ndarray:
        return np.arange(10)[::-1]

    def batch_of_epoch(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        return {"x": self.batch(indices)["x"] + 100 * epoch}


def test_a_data_set_of_the_users_own() -> None:
    split = split_of(Own())
    assert split.line == "held out 2 of 10 samples (at random, seed 0)"
    train, _ = parts(Own(), split)
    order = train.order(4, 0, 0)  # type: ignore[attr-defined]
    assert train.batch(order)["x"][:, 0].tolist() == [number for number in range(9, -1, -1) if number in split.training]
    assert train.batch_of_epoch(order, 0, 2)["x"].min() >= 200  # type: ignore[attr-defined]


def test_a_mapped_array_is_read_from_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(20, dtype=np.float32).reshape(10, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = as_dataset({"x": mapped, "labels": np.repeat([0, 1], 5)}, DataSpec((data_entry(2),), class_entry()))
    split = split_of(data)
    assert split.how.startswith("stratified by class")
    _, evaluation = halves(data, split)
    np.testing.assert_array_equal(evaluation["x"], mapped[split.evaluation])
