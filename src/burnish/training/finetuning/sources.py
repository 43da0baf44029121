"""Data to tune a model on: by path, or as they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.data import Dataset, DataSource, DataSpec, as_dataset, open_dataset
from burnish.data.batches import is_batches
from burnish.errors import ConfigurationError, DataError

OF_FILES = ("label", "image_size", "missing")
"""Options of data that are read from files."""


def open_source(source: DataSource, spec: DataSpec, classes: Sequence[str] | None = None, **options: Any) -> Dataset:
    """Open data by path (``open_dataset``), or make a data set of what lies in memory (``as_dataset``).

    Args:
        source: what ``Trainer`` takes, but for batches as they come.
        spec: what the program takes.
        classes: names of the classes in the order of their indices.
        options: as ``open_dataset`` takes them; of data in memory ``pixels`` and ``text``.

    Raises:
        DataError: what cannot be read or does not fit, or comes as batches.
        ConfigurationError: an option of files, for data in memory.
    """
    if isinstance(source, str | Path):
        return open_dataset(source, spec, classes=classes, **options)
    if is_batches(source):
        raise DataError(
            f"data: a value of type {type(source).__name__} gives batches as they come, and fine-tuning looks up classes, counts "
            "samples and finds a learning rate before it trains: give (x, y), arrays by input name, a data set or a path; or "
            "train on batches by burnish.compile and burnish.Trainer"
        )
    named = next((name for name in OF_FILES if options.get(name) not in (None, "error")), None)
    if named is not None:
        raise ConfigurationError(f"{named}: that is for data that are read from files, and these lie in memory: leave it out")
    return as_dataset(source, spec, classes, options.get("pixels"), options.get("text"))


def name_of(source: DataSource) -> str:
    """Return what messages call data."""
    return str(source) if isinstance(source, str | Path) else "data"
