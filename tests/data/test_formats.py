"""The table of data formats: what it says is what the help says, and what is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from burnish.cli.application import app
from burnish.data.formats import FORMATS, format_of, help_text
from burnish.errors import DataError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def test_the_help_of_the_command_and_the_page_name_every_format():
    printed = re.sub(r"[\s│]+", "", CliRunner().invoke(app, ["train", "--help-all"]).output)
    assert re.sub(r"\s+", "", help_text()) in printed
    page = PAGE.read_text(encoding="utf-8")
    assert [suffix for each in FORMATS for suffix in each.suffixes if f"`{suffix}`" not in page] == []


def test_no_two_formats_have_a_name_or_a_suffix_in_common():
    names, suffixes = [each.name for each in FORMATS], [suffix for each in FORMATS for suffix in each.suffixes]
    assert len({*names}) == len(names)
    assert len({*suffixes}) == len(suffixes)


@pytest.mark.parametrize(
    ("files", "path", "name"),
    [
        (["data.NPZ"], "data.NPZ", "npz"),
        (["x.npy", "notes.txt"], "", "npy"),
        (["0.tar", "1.npy"], "", "tar"),
        (["cat/0.png"], "", "images"),
        (["a.csv/0.png"], "a.csv", "images"),
        (["Annotations/a.xml", "JPEGImages/a.jpg", "ImageSets/Main/train.txt"], "ImageSets/Main/train.txt", "voc"),
        (["train.txt"], "train.txt", "txt"),
        (["annotations/instances_train.json"], "", "coco"),
        (["images/0.png", "masks/0.png"], "", "masks"),
    ],
)
def test_the_first_format_that_a_path_is_of_reads_it(tmp_path: Path, files: list[str], path: str, name: str):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert format_of(tmp_path / path).name == name


def test_what_is_of_no_format_is_named(tmp_path: Path):
    (tmp_path / "data.arrow").touch()
    refused = r"burnish does not read '\.arrow' files; give data in another form\. Data are digits .* or a \.jsonl file"
    with pytest.raises(DataError, match=refused):
        format_of(tmp_path / "data.arrow")
