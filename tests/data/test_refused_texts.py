"""Texts, tokenizers and settings that are refused, and what is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from word_texts import SIZES, VOCABULARY, Columns, labelled, opened, spec

import burnish
from burnish.data import DataSpec, Text, TextDataset, open_dataset
from burnish.errors import ConfigurationError, DataError
from burnish.models import bert, gpt2
from oracles.small_tokenizers import word_tokenizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "source", "message"),
    [
        ("label", (["w0"], [0, 1]), "1 texts and 2 labels; each text needs one"),
        ("label", ["w0"], "texts without labels; give"),
        ("label", ([3], [0]), "sample 0 is a int, and a text is expected"),
        ("label", ([], []), "data: no texts"),
        ("label", {"a": ["w0"], "b": ["w1"], "label": [0]}, r"which column holds the texts is not known.*\(--text-column\)"),
        ("label", {"text": ["w0"], "b": [1], "c": [0]}, "no column is called label, y or target, and labels are to be"),
        ("label", {"text": ["w0"], "label": [[0, 1]]}, "the column 'label' holds lists, and a text has one label"),
        ("label", {"text": ["w0", "w1"], "label": [[0, 1], 0]}, "the column 'label' holds lists, and a text has one label"),
        ("label", Columns({"text": ["w0"], "label": [-1]}, ["a", "b"]), "the label -1 is none of the 2 classes"),
        ("label", {"input_ids": [[0.5]], "label": [0]}, "'input_ids' of sample 0 is no list of whole numbers"),
        ("label", {"input_ids": [[30]], "label": [0]}, "up to 30, and the model's input 'input_ids' takes 0 to 24"),
        ("label", 3, "int: no texts; text is a .txt file"),
        ("label", Path("none.txt"), "none.txt: no such file"),
        ("causal", [""], None),
    ],
)
def test_texts_that_are_refused(task: str, source: Any, message: str | None) -> None:
    if message is None:
        assert len(opened(task, source)) == 1  # the tokens around it
        return
    with pytest.raises(DataError, match=message):
        opened(task, source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("lines.txt", "no w0\n", "lines.txt, line 1: a label, a tab and a text are expected"),
        ("lines.txt", b"\xff\xfe", "no text in UTF-8"),
        ("lines.jsonl", "{", "lines.jsonl, line 1: no JSON"),
        ("lines.jsonl", "[1]", "line 1: a list, and an object is expected"),
        ("lines.jsonl", '{"text": "a", "label": 1}\n{"text": "a"}\n', "line 2: no value for 'label'"),
        ("table.csv", "text,label\na,1\n\n,0\n", "line 4: no value for 'text'; fill it in or remove the line"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        open_dataset(path, spec(), text=Text(tokenizer=word_tokenizer()))


def test_a_tokenizer_is_read_from_its_file_and_what_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    word_tokenizer().save(str(path))
    made = TextDataset((["w0"], [0]), Text(tokenizer=path), spec())
    assert made.described.tokenizer == labelled().described.tokenizer
    path.write_text("{}")
    with pytest.raises(DataError, match=r"no tokenizer\.json of Hugging Face tokenizers"):
        TextDataset((["w0"], [0]), Text(tokenizer=path), spec())
    with pytest.raises(DataError, match="the tokenizer cannot be read"):
        TextDataset((["w0"], [0]), Text(tokenizer=tmp_path / "none.json"), spec())
    with pytest.raises(DataError, match="a value of type dict is no tokenizer"):
        TextDataset((["w0"], [0]), Text(tokenizer={}), spec())
    with pytest.raises(DataError, match="texts become tokens by a tokenizer: name one"):
        TextDataset((["w0"], [0]), Text(), spec())
    (tmp_path / "a.txt").write_text("w0")
    with pytest.raises(DataError, match="texts become tokens by a tokenizer"):
        open_dataset(tmp_path / "a.txt", spec())
    with pytest.raises(DataError, match="these data hold none: leave it out"):
        open_dataset("digits", spec(), text=Text(tokenizer=word_tokenizer()))


def test_a_tokenizer_without_a_token_for_unknown_words_is_named(tmp_path: Path) -> None:
    content = json.loads(word_tokenizer(VOCABULARY).to_str())
    content["model"]["unk_token"] = "elsewhere"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "texts.txt").write_text("0\tw0 unheard\n1\tw1\n")
    with pytest.raises(DataError, match=r"tokenizer\.json: a text cannot be made tokens \(.*\); repair the tokenizer"):
        TextDataset(tmp_path / "texts.txt", Text(tokenizer=tmp_path / "tokenizer.json", length=12), spec("label"))


@pytest.mark.slow
def test_losses_and_models_that_texts_do_not_fit() -> None:
    tokenizer = word_tokenizer()
    wrong_axis = DataSpec.by(burnish.compile(gpt2(VOCABULARY, **SIZES)))
    with pytest.raises(DataError, match=r"the task 'causal' has a label for each token.*--loss cross_entropy:class_axis=-1"):
        TextDataset(["w0 w1"], Text(tokenizer=tokenizer, task="causal"), wrong_axis)
    with pytest.raises(DataError, match="the tokenizer has tokens up to 24, and the model's input 'input_ids' takes 0 to 6"):
        TextDataset((["w0"], [0]), Text(tokenizer=tokenizer), DataSpec.by(burnish.compile(bert(7, 2, **SIZES))))
    unmasked = word_tokenizer()
    unmasked = type(unmasked).from_str(unmasked.to_str().replace("[MASK]", "[OTHER]"))
    with pytest.raises(DataError, match=r"the tokenizer has no token \[MASK\] or <mask>"):
        TextDataset(["w0"], Text(tokenizer=unmasked, task="masked"), spec("masked"))
    images = DataSpec.by(burnish.compile(burnish.models.residual_network()))
    with pytest.raises(DataError, match="the input 'x' is FLOAT of 4 dimensions, and texts give whole numbers"):
        TextDataset((["w0"], [0]), Text(tokenizer=tokenizer), images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "next"}, "task must be 'label', 'masked', 'causal', not 'next'"),
        ({"length": 1}, "length=1: give a whole number of 2 or more"),
        ({"too_long": "drop"}, "too_long must be 'cut' or 'error'"),
        ({"masked_share": 1.0}, "masked_share=1.0"),
        ({"buckets": (8, 4)}, "buckets must be whole numbers of 1 or more, ascending"),
        ({"joined": True}, "joined texts have no labels of their own"),
        ({"buckets": (8,), "length": 12}, "the longest of the buckets is 8, and texts may have 12 tokens"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TextDataset((["w0"], [0]), Text(tokenizer=word_tokenizer(), **options), spec())


@pytest.mark.parametrize(
    ("number", "message"),
    [(8, "two tokens have the number 8"), (2**31, r"a token has the number 2147483648, and 16777215 is the largest")],
)
def test_a_tokenizer_whose_numbers_are_none(tmp_path: Path, number: int, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    word_tokenizer().save(str(path))
    path.write_text(re.sub(r'"w2": ?7', f'"w2": {number}', path.read_text()))
    with pytest.raises(DataError, match=rf"tokenizer\.json: {message}"):
        TextDataset((["w0"], [0]), Text(tokenizer=path), spec())
