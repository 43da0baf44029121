"""Convert batches between data sets, which have samples along axis 0, and models, which may have them along another axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from burnish.program.signature import Entry, GraphSignature

Axes = Mapping[str, int]
"""Sample axis by the name of an input or output; one without an entry has samples along axis 0, or has none."""


def samples_first(entry: Entry) -> Entry:
    """Return an entry as in a data set, with its samples along axis 0. An entry without samples does not change."""
    axis, shape = entry.sample_axis, entry.shape
    if not axis or shape is None:
        return entry
    moved = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    fixed_by = tuple((0 if at == axis else at + (at < axis), reason) for at, reason in entry.fixed_by)
    return replace(entry, shape=moved, fixed_by=fixed_by, sample_axis=0)


def sample_extent(entry: Entry) -> int | str | None:
    """Return the extent of the sample axis of an entry that has samples."""
    assert entry.sample_axis is not None
    return entry.extents[entry.sample_axis]


def first_samples(array: np.ndarray, entry: Entry, count: int) -> np.ndarray:
    """Return the first samples of an array in the model's layout; the whole array if it has no samples."""
    axis = entry.sample_axis
    if axis is None or array.ndim <= axis:
        return array
    return np.ascontiguousarray(array[(slice(None),) * axis + (slice(count),)])


def moved_axes(entries: Iterable[Entry]) -> Axes:
    """Return the sample axes of the entries for which data set and model have different layouts."""
    return {entry.name: entry.sample_axis for entry in entries if entry.sample_axis}


def to_model(batch: Mapping[str, np.ndarray], axes: Axes) -> dict[str, np.ndarray]:
    """Return a batch of a data set in the model's layout; only arrays whose axes move are copied."""
    return {name: _moved(array, 0, axes.get(name, 0)) for name, array in batch.items()}


def to_data_set(batch: Mapping[str, np.ndarray], axes: Axes) -> dict[str, np.ndarray]:
    """Return arrays in the model's layout with their samples along axis 0; only arrays whose axes move are copied."""
    return {name: _moved(array, axes.get(name, 0), 0) for name, array in batch.items()}


def _moved(array: np.ndarray, source: int, destination: int) -> np.ndarray:
    axis = source or destination
    if not axis or array.ndim <= axis:
        return array  # too few axes: the check of the batch reports it
    return np.ascontiguousarray(np.moveaxis(array, source, destination))


def stand_in(entry: Entry, shape: Sequence[int], signature: GraphSignature) -> np.ndarray:
    """Return an array of zeros (or the nearest valid value) with as many samples as the layers require.

    Args:
        entry: entry of the batch.
        shape: extents of the array, except along the sample axis.
        signature: signature of the graph that is run.
    """
    axis = entry.sample_axis
    rules = [rule for rule in signature.extents if axis is not None and rule.dimension == entry.extents[axis]]
    rows = next(count for count in itertools.count(1) if all(rule.takes_part(count) for rule in rules))
    least = entry.minimum or 0
    value = least if entry.two_values else max(0, least) if entry.maximum is None else min(max(0, least), entry.maximum)
    whole = tuple(rows if at == axis else extent for at, extent in enumerate(shape))
    return np.full(whole, value, entry.numpy_dtype)
