"""How many tokens a model takes: exporters leave their number open, and a table of positions ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from burnish.data import Dataset, Text, TextDataset
from burnish.data.text.settings import TextDescription
from burnish.errors import ConfigurationError, EngineError
from burnish.program import Program
from burnish.training.session import Session

FEWEST = 2
"""Tokens that any model takes."""


def within_the_model(
    program: Program, dataset: Dataset, asked: Text | None, reopened: Callable[[Text], Dataset]
) -> tuple[Dataset, str | None]:
    """Return data whose texts the model can take, cut off where they are longer, and a line that says so; None where none are.

    The model is run on the longest text, padded as a batch would be; where it fails on that and not on two tokens, the largest
    number that it takes is searched.

    Args:
        program: of the model.
        dataset: the data; what are no texts stays as it is.
        asked: the settings that the caller gave.
        reopened: opens the same data with other settings.

    Raises:
        ConfigurationError: the caller asked for texts longer than the model takes.
        DataError: a text is longer, and the settings say that this is an error.
    """
    if not isinstance(dataset, TextDataset) or not len(dataset):
        return dataset, None
    taken = _longest(program, dataset)
    if taken is None:
        return dataset, None
    if asked is not None and asked.length is not None:
        raise ConfigurationError(
            f"text: length={asked.length}, and the model runs on {taken} tokens at most, as far as its table of positions goes: "
            f"give {taken} at most (--max-tokens)"
        )
    cut = reopened(replace(asked or dataset.text, length=taken, buckets=None))
    assert isinstance(cut, TextDataset)
    return cut, (
        f"texts: the model runs on {taken} tokens at most, as far as its table of positions goes: {cut.cut:,} of {len(cut):,} "
        "texts are longer, and lose the rest (--max-tokens: fewer)"
    )


def cut_to(dataset: Dataset) -> TextDescription:
    """What a model says of texts that were cut to its length, for runs to come: the length alone."""
    assert isinstance(dataset, TextDataset)
    return TextDescription(length=dataset.text.length)


def _longest(program: Program, dataset: TextDataset) -> int | None:
    """The largest number of tokens that the model takes; None where it takes all of the longest text's, or even two fail."""
    longest = dataset.longest
    samples = {entry.name: dataset.batch(np.array([longest]))[entry.name] for entry in program.signature.samples}
    extent = max(array.shape[1] for array in samples.values() if array.ndim > 1)
    with Session(program) as session:

        def fits(tokens: int) -> bool:
            try:
                session.predict({name: array[:, :tokens] for name, array in samples.items()})
            except EngineError:
                return False
            return True

        if fits(extent) or not fits(FEWEST):
            return None
        low, high = FEWEST, extent
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    return low
