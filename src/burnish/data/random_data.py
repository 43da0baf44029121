"""Random data: batches that fit a program, for comparison and timing, and clicks for a recommendation model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from burnish.data.dataset import ArrayDataset
from burnish.errors import ConfigurationError
from burnish.program import Entry, Program, Role
from burnish.program.layout import sample_extent
from burnish.validation import is_number, is_whole

DEFAULT_EXTENT = 8
LARGEST_EXTENT = 1 << 24


def random_batches(
    program: Program, batch_size: int = 4, seed: int = 0, extents: Mapping[str, int] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yield endless random batches in the model's layout; each depends only on the seed and its number.

    Floating-point data are normal, labels in the loss's range. Integers are in the range of a known table, else 0 or 1, valid as
    indices and masks.

    Args:
        program: program that takes the batches.
        batch_size: extent of symbolic sample axes, rounded up for the normalization layers.
        seed: 0 or more.
        extents: other symbolic dimensions by name; 8 by default.

    Raises:
        ConfigurationError: a size or seed is out of range, or no input has a given dimension.
    """
    chosen = dict(extents or {})
    for name, size in {"batch_size": batch_size, **chosen}.items():
        if not 1 <= size <= LARGEST_EXTENT:
            raise ConfigurationError(f"{name}={size}: give a size of 1 or more, up to {LARGEST_EXTENT:,}")
    if seed < 0:
        raise ConfigurationError(f"seed={seed}: give a seed of 0 or more")
    signature = program.signature["step"]
    entries = signature.inputs_of(Role.DATA, Role.LABEL)
    first = {sample_extent(entry) for entry in entries if entry.extents and entry.sample_axis is not None}
    names = {extent for entry in entries for extent in entry.extents if isinstance(extent, str)}
    for name in chosen.keys() - names:
        raise ConfigurationError(f"extent: no input has a dimension '{name}'; symbolic are {', '.join(sorted(names)) or 'none'}")
    sizes = {name: batch_size if name in first else DEFAULT_EXTENT for name in names} | chosen
    for rule in signature.extents:
        while rule.dimension in sizes and not rule.allows(sizes[rule.dimension]):
            sizes[rule.dimension] += 1
    return _batches(entries, sizes, seed)


def _batches(entries: tuple[Entry, ...], sizes: Mapping[str, int], seed: int) -> Iterator[dict[str, np.ndarray]]:
    number = 0
    while True:
        generator = np.random.default_rng((seed, number))
        yield {entry.name: _random(entry, sizes, generator) for entry in entries}
        number += 1


def _random(entry: Entry, sizes: Mapping[str, int], generator: np.random.Generator) -> np.ndarray:
    shape = [
        extent if isinstance(extent, int) else DEFAULT_EXTENT if extent is None else sizes[extent] for extent in entry.extents
    ]
    low, high = entry.minimum, entry.maximum
    if entry.dtype == ir.DataType.STRING:
        return generator.integers(0, 10, shape).astype(str)
    if not entry.dtype.is_floating_point():
        return np.asarray(generator.integers(max(low or 0, 0), 1 if high is None else high, shape, endpoint=True)).astype(
            entry.numpy_dtype
        )
    if low is not None and high is not None:
        if entry.two_values:
            return np.asarray(generator.choice([low, high], shape)).astype(entry.numpy_dtype)
        return np.asarray(generator.uniform(low, high, shape)).astype(entry.numpy_dtype)
    values = generator.normal(size=shape)
    if low is not None or high is not None:  # half-open range: normal values, folded at the bound
        values = low + np.abs(values) if low is not None else (high or 0) - np.abs(values)
    return np.asarray(values).astype(entry.numpy_dtype)


def synthetic_clicks(
    samples: int, rows: Sequence[int], numbers: int = 13, exponent: float = 1.1, seed: int = 0, draw: int = 0
) -> ArrayDataset:
    """Return clicks with categories that follow Zipf's law, for ``burnish.models.dlrm`` with the same tables.

    A hidden score determines the click probability, so it can be learned: a normal effect per table row, and a linear function of
    the numbers.

    Args:
        samples: number of samples.
        rows: rows of each table; row k has a probability proportional to k to the power of -``exponent``.
        numbers: normal numbers per sample.
        exponent: of Zipf's law; 0 is uniform.
        seed: seed of the hidden effects.
        draw: seed of the samples; draws with one seed share the effects.

    Returns:
        Arrays ``numbers``, ``category_1`` and so on, and ``targets`` [samples, 1].

    Raises:
        ConfigurationError: a size is not a whole number above 0, or the exponent is negative.
    """
    if not rows or not all(is_whole(size) and size >= 1 for size in (samples, *rows, numbers)):
        raise ConfigurationError(
            f"synthetic_clicks: samples={samples}, rows={tuple(rows)}, numbers={numbers}: every number has to be whole and 1 or "
            "more, and there has to be a table"
        )
    if not is_number(exponent) or exponent < 0:
        raise ConfigurationError(f"synthetic_clicks: exponent must be a finite number that is not negative, not {exponent!r}")
    hidden, drawn = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1, draw])
    x = drawn.standard_normal((samples, numbers))
    score = x @ hidden.normal(0.0, 1 / np.sqrt(numbers), numbers)
    places = np.empty((samples, len(rows)), np.int64)
    for table, count in enumerate(rows):
        effects = hidden.normal(0.0, 2 / np.sqrt(len(rows)), count)
        frequency = np.arange(1, count + 1, dtype=np.float64) ** -exponent
        ranks = np.searchsorted(np.cumsum(frequency) / frequency.sum(), drawn.random(samples))
        places[:, table] = np.minimum(ranks, count - 1)
        score += effects[places[:, table]]
    targets = (drawn.random(samples) < 1 / (1 + np.exp(-score))).astype(np.float32)
    columns = {f"category_{table + 1}": np.ascontiguousarray(places[:, table]) for table in range(len(rows))}
    return ArrayDataset({"numbers": x.astype(np.float32), **columns, "targets": targets.reshape(-1, 1)})
