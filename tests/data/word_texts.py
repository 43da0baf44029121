"""Texts of words w0, w1, ..., and small models that read them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import burnish
from burnish.data import DataSpec, Text, TextDataset
from burnish.models import bert, gpt2
from oracles.small_tokenizers import word_tokenizer

pytest.importorskip("tokenizers")

WORDS = 20
VOCABULARY = 5 + WORDS
LANGUAGE = "cross_entropy:class_axis=-1"
SIZES = {"width": 8, "layers": 1, "heads": 2, "positions": 12, "dropout": 0.0}
BUCKETS = (4, 8, 12)


@cache
def program(task: str) -> burnish.Program:
    if task == "label":
        return burnish.compile(bert(VOCABULARY, 2, **SIZES))
    model = bert(VOCABULARY, **SIZES) if task == "masked" else gpt2(VOCABULARY, **SIZES)
    return burnish.compile(model, loss=LANGUAGE)


def spec(task: str = "label") -> DataSpec:
    return DataSpec.by(program(task))


def texts(count: int, longest: int = 10, seed: int = 0) -> list[str]:
    """Texts of the words w0, w1, ... of 1 to ``longest`` words."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{word}" for word in rng.integers(0, WORDS, rng.integers(1, longest + 1))) for _ in range(count)]


def opened(task: str, source: Any, **options: Any) -> TextDataset:
    text = Text(tokenizer=word_tokenizer(WORDS), task=task, **{"buckets": BUCKETS, "length": 12} | options)
    return TextDataset(source, text, spec(task))


def labelled(count: int = 20, **options: Any) -> TextDataset:
    return opened("label", (texts(count), np.arange(count) % 2), **options)


class Columns:
    """The columns of a data set of Hugging Face ``datasets``, as far as they are read."""

    def __init__(self, columns: dict[str, list[Any]], classes: list[str] | None = None):
        self.columns, self.column_names = columns, list(columns)
        label = type("ClassLabel", (), {"names": classes})() if classes else None
        self.features = {name: label if name == "label" else object() for name in columns}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def batch(self, batch_size: int) -> None:
        raise AssertionError("this is theirs, and of another meaning")
