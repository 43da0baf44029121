"""The length of texts that a model takes: exporters leave the number of tokens open, and a table of positions ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from burnish.data import ArrayDataset, Dataset, DataSpec, Text, TextDataset
from burnish.data.text.settings import LONGEST, TextDescription
from burnish.errors import ConfigurationError, EngineError
from burnish.program import Program
from burnish.training.session import Session
from burnish.training.trained_model import TrainedModel

FEWEST = 2
"""Tokens that any model takes."""


def within_the_model(
    program: Program, dataset: Dataset, asked: Text | None, reopened: Callable[[Text], Dataset]
) -> tuple[Dataset, str | None]:
    """Return data whose texts the model can take, cut off where they are longer, and a line that says so; None where none are.

    The model is run on the longest text, padded to 512 tokens where texts may have so many; where it fails on that and not on two
    tokens, the largest number that it takes is searched. The data are then opened with this length, so that other texts, such as
    those that are evaluated on, are cut off there too.

    Args:
        program: of the model. Nothing is run where the model says how long its texts are, or takes one length only.
        dataset: the data; what are no texts stays as it is.
        asked: the settings that the caller gave.
        reopened: opens the same data with other settings.

    Raises:
        ConfigurationError: the caller asked for texts longer than the model takes.
        DataError: a text is longer, and the settings say that this is an error.
    """
    if not isinstance(dataset, TextDataset) or not len(dataset) or dataset.is_length_known:
        return dataset, None
    names = [entry.name for entry in program.signature.samples]
    spec = DataSpec.by(program)
    with Session(program) as session:
        taken = _longest(lambda batch: session.predict(spec.to_model({name: batch[name] for name in names})), dataset)
    return _cut_off(dataset, taken, asked, reopened)


def within_the_opened(
    model: TrainedModel, dataset: Dataset, asked: Text | None, reopened: Callable[[Text], Dataset]
) -> tuple[Dataset, str | None]:
    """Return data that a model which is only read can take; as ``within_the_model``."""
    if not isinstance(dataset, TextDataset) or not len(dataset) or dataset.is_length_known:
        return dataset, None
    names = [entry.name for entry in model.to_predict.data]
    taken = _longest(lambda batch: model.predict(ArrayDataset({name: batch[name] for name in names})), dataset)
    return _cut_off(dataset, taken, asked, reopened)


def _cut_off(
    dataset: TextDataset, taken: int | None, asked: Text | None, reopened: Callable[[Text], Dataset]
) -> tuple[Dataset, str | None]:
    """The data opened again for a model that takes so many tokens, and a line; as they are where it takes all that there are."""
    if taken is None:
        return dataset, None
    if asked is not None and asked.length is not None:
        raise ConfigurationError(
            f"text: length={asked.length}, and the model runs on {taken} tokens at most, as far as its table of positions goes: "
            f"give {taken} at most (--max-tokens)"
        )
    text = asked or dataset.text
    buckets = None if text.buckets is None or asked is None else (*(size for size in text.buckets if size < taken), taken)
    cut = reopened(replace(text, length=taken, buckets=buckets))
    assert isinstance(cut, TextDataset)
    said = f"texts: the model runs on {taken} tokens at most, as far as its table of positions goes: "
    if cut.text.joined:
        return cut, f"{said}they are joined and cut into pieces of {taken} (--max-tokens: shorter ones)"
    if not cut.cut:
        return cut, None
    return cut, f"{said}{cut.cut:,} of {len(cut):,} texts are longer, and lose the rest (--max-tokens: fewer)"


def length_of(dataset: TextDataset, spec: DataSpec) -> TextDescription:
    """What a model says of texts for runs to come: what it said before, and their length, which is then known to fit."""
    return replace(spec.described.text or TextDescription(), length=dataset.text.length)


def _longest(predict: Callable[[Mapping[str, np.ndarray]], object], dataset: TextDataset) -> int | None:
    """The largest number of tokens that the model takes; None where it takes all that texts may have, or even two fail."""
    most = max(dataset.longest, min(dataset.text.length or 0, LONGEST))

    def fits(tokens: int) -> bool:
        try:
            predict(dataset.padded(tokens))
        except EngineError:
            return False
        return True

    if fits(most) or not fits(FEWEST):
        return None
    low, high = FEWEST, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
