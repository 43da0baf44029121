"""Loss and metrics of many batches: from totals that add up, or as averages of the batches' own figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish import metrics
from burnish.errors import BurnishError, InputError
from burnish.metrics import COUNT, SUM, total_of
from burnish.metrics.base import ROWS
from burnish.program import Program

LOSS = "loss"


def only_totals(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the totals among the outputs of ``evaluate``: counts as int64, sums as float64, so that they add up."""
    return {
        name: np.asarray(array, np.int64 if array.dtype.kind in "iub" else np.float64)
        for name, array in outputs.items()
        if total_of(name) is not None
    }


@dataclass
class Totals:
    """Totals of any number of batches, by the names of the outputs of ``evaluate``. Order and grouping do not change a count."""

    counts: dict[str, np.ndarray] = field(default_factory=dict)
    sums: dict[str, list[np.ndarray]] = field(default_factory=dict)
    rows: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, totals: Mapping[str, np.ndarray]) -> None:
        """Add the result of ``only_totals`` for a batch."""
        for name, array in totals.items():
            if holds_rows(name):
                self.rows.setdefault(name, []).append(array)
            elif array.dtype.kind == "i":
                self.counts[name] = self.counts[name] + array if name in self.counts else array
            else:
                self.sums.setdefault(name, []).append(array)

    def added(self) -> dict[str, np.ndarray]:
        """Return the added totals; sums are rounded once."""
        sums = {
            name: np.array([math.fsum(column) for column in np.stack(arrays).reshape(len(arrays), -1).T]).reshape(arrays[0].shape)
            for name, arrays in self.sums.items()
        }
        return {**self.counts, **sums, **{name: _joined(arrays) for name, arrays in self.rows.items()}}


def holds_rows(output: str) -> bool:
    """Return True if an output has rows, which are concatenated instead of added."""
    return output.partition(":")[0] == ROWS


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Return rows ``[N, K, ...]`` concatenated, with shorter ones padded by -1."""
    longest = max(array.shape[1] for array in arrays)
    filled = [
        np.pad(array, ((0, 0), (0, longest - array.shape[1]), *[(0, 0)] * (array.ndim - 2)), constant_values=-1)
        for array in arrays
    ]
    return np.concatenate(filled)


def totals_over(
    batches: Iterable[Mapping[str, Any]],
    evaluate: Callable[[Mapping[str, Any]], Mapping[str, np.ndarray]],
    progress: Callable[[int], None] | None = None,
) -> dict[str, np.ndarray]:
    """Return the added totals of many batches.

    Args:
        batches: batches of any sizes.
        evaluate: function that returns the totals of one.
        progress: function called after each batch with the number of batches done.

    Raises:
        InputError: there are no batches.
    """
    if not isinstance(batches, Iterable):
        raise InputError(
            f"The data to evaluate is {batches!r}: give a list or another iterable of batches, as evaluate takes them"
        )
    totals = Totals()
    done = 0
    for batch in batches:
        totals.add(evaluate(batch))
        done += 1
        if progress is not None:
            progress(done)
    if not done:
        raise InputError("There is no batch to evaluate: the data set is empty, or its iterator was already used up")
    return totals.added()


def figures(totals: Mapping[str, np.ndarray], loss_terms: Mapping[str, float]) -> dict[str, float]:
    """Return the loss and the metrics of added totals.

    Args:
        totals: by output name of ``evaluate``. A sum and a count give their quotient; a loss with only a sum gives that sum;
            other totals belong to the metric of that name.
        loss_terms: coefficients of the terms of a summed loss, if it has several.

    Raises:
        InputError: nothing counts towards a figure, or there is no metric of that name.
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    for output, array in totals.items():
        named = total_of(output)
        if named is not None:
            parts.setdefault(named[0], {})[named[1]] = array
    # Counts and sums were added separately; the loss and its terms come first, as in the graphs.
    ordered = sorted(parts, key=lambda name: not _is_of_loss(name))
    results = {name: _figure(name, parts[name]) for name in ordered}
    return {LOSS: _weighted(results, loss_terms), **results} if loss_terms else results


def _weighted(figures: Mapping[str, float], loss_terms: Mapping[str, float]) -> float:
    return math.fsum(coefficient * figures[name] for name, coefficient in loss_terms.items())


def _is_of_loss(figure: str) -> bool:
    return figure.partition(":")[0] == LOSS


@dataclass(frozen=True)
class Sums:
    """The figures of a program's steps that are sums over samples (``reduction="sum"``) and add up over batches.

    Attributes:
        names: names of these figures.
        loss_terms: coefficients of the terms of the loss, if only some of them add up.
    """

    names: frozenset[str] = frozenset()
    loss_terms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> Sums:
        parts: dict[str, set[str]] = {}
        for entry in program.signature["evaluate"].outputs:
            if (named := total_of(entry.name)) is not None:
                parts.setdefault(named[0], set()).add(named[1])
        names = {name for name, kinds in parts.items() if _is_of_loss(name) and kinds == {SUM}}
        terms: Mapping[str, float] = program.options.get("loss_terms", {})
        if not names or not terms:
            return cls(frozenset(names))
        return cls(frozenset({*names, LOSS})) if names >= terms.keys() else cls(frozenset(names), terms)

    def averages(self, means: Means) -> dict[str, float]:
        """Return the figures over all added batches."""
        values = means.values()
        if self.loss_terms and self.loss_terms.keys() <= values.keys():
            values[LOSS] = _weighted(values, self.loss_terms)
        return values


def figures_of_batch(outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the figures of one batch: those among its outputs, and those computed from its rows; NaN if nothing counts."""
    reported = {name: value.item() for name, value in outputs.items() if total_of(name) is None}
    parts: dict[str, dict[str, np.ndarray]] = {}
    for output, array in outputs.items():
        named = total_of(output) if holds_rows(output) else None
        if named is not None:
            parts.setdefault(named[0], {})[named[1]] = np.asarray(array, np.float64)
    return reported | {name: metrics.get(name).combine(rows) for name, rows in parts.items()}


def _figure(name: str, parts: Mapping[str, np.ndarray]) -> float:
    if parts.keys() == {SUM, COUNT}:
        nothing, value = parts[COUNT] == 0, math.nan
        if not nothing:
            value = float(parts[SUM]) / float(parts[COUNT])
    elif parts.keys() == {SUM} and _is_of_loss(name):
        nothing, value = False, float(parts[SUM])
    else:
        try:
            value = metrics.get(name).combine(parts)
        except (BurnishError, KeyError) as error:
            raise InputError(
                f"The totals of '{name}' are {', '.join(parts)}, and no metric of that name adds these up: enter it in "
                "burnish.metrics.METRICS first"
            ) from error
        nothing = math.isnan(value) and all(np.isfinite(array).all() for array in parts.values())
    if nothing:
        raise InputError(
            f"Nothing counts towards '{name}': every label is ignored, or none is of a class that it is about. "
            "Evaluate on labelled samples"
        )
    return value


@dataclass
class Means:
    """Averages of loss and metrics, weighted by samples. NaN is left out. Sums over samples are added."""

    samples: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, batch: Mapping[str, float], samples: int, sums: Sums | None = None) -> None:
        for name, value in batch.items():
            counts = not math.isnan(value)
            if sums is not None and name in sums.names:
                self.samples[name] = max(self.samples.get(name, 0), int(counts))
                self.sums[name] = self.sums.get(name, 0.0) + (value if counts else 0.0)
                continue
            self.samples[name] = self.samples.get(name, 0) + (samples if counts else 0)
            self.sums[name] = self.sums.get(name, 0.0) + (value * samples if counts else 0.0)

    def values(self) -> dict[str, float]:
        """Return the averages; NaN for a figure that was NaN in every batch."""
        return {name: total / self.samples[name] if self.samples[name] else math.nan for name, total in self.sums.items()}
