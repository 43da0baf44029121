"""What tells the data of a run from others: their number, and a few samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.data import Dataset
from burnish.errors import DataError
from burnish.training.feature_dataset import FeatureDataset

ROWS_COMPARED = 8


def fingerprint(dataset: Dataset) -> dict[str, str]:
    """Return a hash of each of a few spread samples, by its number: of the names, dtypes, shapes and values of its arrays.

    A sample that cannot be read, or holds a NaN or infinite value, has none: it may be repaired before the run goes on. Nor has
    any sample of a data set that gives the same one twice with other values.
    """
    source = dataset.source if isinstance(dataset, FeatureDataset) else dataset
    places = np.unique(np.linspace(0, len(source) - 1, ROWS_COMPARED).astype(np.int64)).tolist()
    hashes = {str(place): _hash(source, place) for place in places}
    if hashes["0"] != _hash(source, 0):
        return {}
    return {place: found for place, found in hashes.items() if found is not None}


def check_fingerprint(found: object, now: Mapping[str, str], run: str, checkpoint: str) -> None:
    """Check that a run goes on with the data that it was started with.

    Args:
        found: what ``fingerprint`` returned of the data that the run was started with; None where nobody asked.
        now: what it returns of those to go on with, which have as many samples.
        run, checkpoint: what to call the run and its checkpoint in an error.

    Raises:
        DataError: a sample is another one.
    """
    if not isinstance(found, Mapping):
        return
    for place, value in now.items():
        if found.get(place, value) != value:
            raise DataError(
                f"The run in '{run}' was started with other data: sample {place} has changed since. Give it the data that it was "
                f"started with; or start a new run in its state with these (start_from, --start-from '{checkpoint}')"
            )


def _hash(dataset: Dataset, place: int) -> str | None:
    try:
        sample: dict[str, Any] = dataset.batch(np.array([place], np.int64))
        arrays = {name: np.asarray(array) for name, array in sorted(sample.items())}
    except Exception:  # whatever a data set raises, it says so again when the sample is trained on
        return None
    digest = hashlib.sha256()
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return None
        content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
        digest.update(repr((name, str(array.dtype), array.shape, len(content))).encode() + content)
    return digest.hexdigest()[:16]
