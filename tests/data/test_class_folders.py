"""Folders of images that are not laid out as one folder for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from burnish.data import open_dataset
from burnish.errors import DataError
from specs.program_inputs import classification

SPEC = classification(3, 4, 4, classes=3)


def pictures(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / name, format="PNG")


def test_parts_of_a_data_set_are_no_classes(tmp_path):
    pictures(tmp_path, *(f"{part}/{kind}/1.png" for part in ("Train", "val", "test") for kind in ("cat", "dog")))
    with pytest.raises(DataError) as caught:
        open_dataset(tmp_path, SPEC)
    assert str(caught.value) == (
        f"{tmp_path}: its subfolders 'Train', 'test', 'val' are parts of a data set and no classes: give '{tmp_path / 'Train'}' "
        f"to train on (--data), and '{tmp_path / 'val'}' to evaluate on (--eval-data)"
    )
    assert open_dataset(tmp_path / "Train", SPEC).classes == ("cat", "dog")


def test_one_part_alone_is_no_class(tmp_path):
    pictures(tmp_path, "train/cat/1.png", "train/dog/1.png")
    with pytest.raises(
        DataError, match=r"'train' are parts of a data set and no classes: give '.*train' to train on \(--data\)$"
    ):
        open_dataset(tmp_path, SPEC)


@pytest.mark.parametrize("names", [("test/1.png", "train/1.png"), ("train/old/1.png", "tram/1.png")])
def test_names_of_parts_may_be_classes(tmp_path, names):
    """Where they hold pictures and no classes, or stand beside others."""
    pictures(tmp_path, *names)
    assert open_dataset(tmp_path, SPEC).classes == tuple(name.split("/")[0] for name in names)


def test_pictures_of_no_class_are_named(tmp_path):
    pictures(tmp_path, "cat/1.PNG", "dog/2.Jfif", "loose.png")
    pictures(tmp_path, "cat/.ipynb_checkpoints/1-checkpoint.png", "dog/._2.png")
    for name in ("cat/new.HEIC", "dog/notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    dataset = open_dataset(tmp_path, SPEC)
    assert len(dataset) == 2
    assert (dataset.note or "").startswith(
        f"{tmp_path}: 1 image beside the classes' folders, of no class, left out: {tmp_path / 'loose.png'}; "
        f"1 picture in formats that are not read, left out: {tmp_path / 'cat/new.HEIC'}"
    )


def test_folders_in_folders_of_classes_are_said(tmp_path):
    pictures(tmp_path, "animals/cat/1.png", "animals/2.png", "plants/oak/old/3.png")
    note = open_dataset(tmp_path, SPEC).note or ""
    assert (
        f"images in subfolders of a class's folder are of that class ({Path('animals/cat')}, {Path('plants/oak/old')}): " in note
    )
    assert f"give each of {tmp_path / 'animals'}, {tmp_path / 'plants'} as data where these are classes" in note
