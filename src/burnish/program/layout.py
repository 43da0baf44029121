"""From a data set to a model and back: a data set has its samples along axis 0, and a model along an axis of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from burnish.program.signature import Entry, GraphSignature

Axes = Mapping[str, int]
"""The axis of samples by the name of an input or output; one without an entry has them along axis 0, or has none."""


def samples_first(entry: Entry) -> Entry:
    """Return an entry as a data set has it: with its samples along axis 0. One without samples stays as it is."""
    axis, shape = entry.sample_axis, entry.shape
    if not axis or shape is None:
        return entry
    moved = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    fixed_by = tuple((0 if at == axis else at + (at < axis), reason) for at, reason in entry.fixed_by)
    return replace(entry, shape=moved, fixed_by=fixed_by, sample_axis=0)


def sample_extent(entry: Entry) -> int | str | None:
    """Return the extent of the axis of samples of an entry that has samples."""
    assert entry.sample_axis is not None
    return entry.extents[entry.sample_axis]


def first_samples(array: np.ndarray, entry: Entry, count: int) -> np.ndarray:
    """Return the first samples of an array in the layout of the model; one without samples whole."""
    axis = entry.sample_axis
    if axis is None or array.ndim <= axis:
        return array
    return np.ascontiguousarray(array[(slice(None),) * axis + (slice(count),)])


def moved_axes(entries: Iterable[Entry]) -> Axes:
    """Return the axes of the entries that a data set has in another layout than the model."""
    return {entry.name: entry.sample_axis for entry in entries if entry.sample_axis}


def to_model(batch: Mapping[str, np.ndarray], axes: Axes) -> dict[str, np.ndarray]:
    """Return a batch of a data set in the layout of the model; arrays that are moved are copied, others are not."""
    return {name: _moved(array, 0, axes.get(name, 0)) for name, array in batch.items()}


def to_data_set(batch: Mapping[str, np.ndarray], axes: Axes) -> dict[str, np.ndarray]:
    """Return arrays in the layout of the model with their samples along axis 0; those that are moved are copied."""
    return {name: _moved(array, axes.get(name, 0), 0) for name, array in batch.items()}


def _moved(array: np.ndarray, source: int, destination: int) -> np.ndarray:
    axis = source or destination
    if not axis or array.ndim <= axis:
        return array  # of too few axes, which the check of the batch names
    return np.ascontiguousarray(np.moveaxis(array, source, destination))


def stand_in(entry: Entry, shape: Sequence[int], signature: GraphSignature) -> np.ndarray:
    """Zeros, or the valid value next to it, for as many samples as layers take.

    Args:
        entry: of the batch.
        shape: whose extents are taken, but that of the samples.
        signature: of the graph that is run.
    """
    axis = entry.sample_axis
    rules = [rule for rule in signature.extents if axis is not None and rule.dimension == entry.extents[axis]]
    rows = next(count for count in itertools.count(1) if all(rule.takes_part(count) for rule in rules))
    least = entry.minimum or 0
    value = least if entry.two_values else max(0, least) if entry.maximum is None else min(max(0, least), entry.maximum)
    whole = tuple(rows if at == axis else extent for at, extent in enumerate(shape))
    return np.full(whole, value, entry.numpy_dtype)
