"""The loss of a model that has learned nothing, and the warning for a run that ends there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from burnish import losses
from burnish.data import Dataset, DataSpec
from burnish.errors import NothingLearnedWarning
from burnish.finetuning.options import INSERT, FinetuneOptions
from burnish.losses.base import Wrapping
from burnish.training.run_results import EVALUATION_PREFIX, Row

if TYPE_CHECKING:
    from burnish.finetuning.preparation import Transfer

SAMPLES = 512
"""Most samples read to find labels or the scale of columns."""
CLEARLY = 0.02
"""Relative distance at which a loss is clearly below chance."""
DEVIATIONS = 3.0
"""Standard deviations by which an accuracy must exceed the share of the most common class."""
ACCURACIES = ("accuracy", "pixel_accuracy")
LARGEST_SPREAD = 30.0
"""Factor from 1, the usual standard deviation of a column, to one that trains badly."""
MORE_EPOCHS = 4
NORMALIZATIONS = frozenset({"BatchNormalization", "LayerNormalization", "GroupNormalization", "InstanceNormalization"})


@dataclass(frozen=True)
class Chance:
    """The best figures of a model that gives the same answer for each sample.

    Attributes:
        loss: loss of always answering with the shares of the classes, or with the best value.
        share: share of the most common class; None for values.
        samples: number of labels counted.
    """

    loss: float
    share: float | None
    samples: int

    @property
    def said(self) -> str:
        """The loss, with the constant answer that has it, in words."""
        always = "the same value" if self.share is None else "the share of each class"
        return f"{self.loss:.4g} (that of always giving {always})"

    def is_reached(self, figures: Mapping[str, float | None], prefix: str = "") -> bool | None:
        """Return True if figures are no better than chance; None if they have no loss."""
        loss = figures.get(f"{prefix}loss")
        if loss is None:
            return None
        if loss < self.loss - CLEARLY * abs(self.loss):
            return False
        accuracy = next((value for name in ACCURACIES if (value := figures.get(prefix + name)) is not None), None)
        if self.share is None or accuracy is None:
            return True
        return accuracy <= self.share + DEVIATIONS * math.sqrt(self.share * (1 - self.share) / max(1, self.samples))


def chance_of(loss: losses.Loss, dataset: Dataset, spec: DataSpec) -> Chance | None:
    """Return the figures of a model that has learned nothing from the data; None if they are not known for this loss.

    Args:
        loss: loss of the run.
        dataset: training data; at most 512 samples are read if labels are not known without reading samples.
        spec: inputs of the program.
    """
    scale: Any = 1.0
    while isinstance(loss, Wrapping):
        scale, loss = getattr(loss, "std", scale), loss.loss
    if spec.label is None or not len(dataset) or getattr(loss, "reduction", None) != "mean":
        return None
    if isinstance(loss, losses.CrossEntropy) and not loss.probabilities and loss.weight is None:
        return _of_classes(_labels(dataset, spec), loss, spec.label.ignored)
    if isinstance(loss, losses.BinaryCrossEntropyWithLogits) and loss.pos_weight is None:
        return _of_questions(np.asarray(_labels(dataset, spec), np.float64))
    if (error := _error_of(loss)) is not None:
        targets = np.asarray(_labels(dataset, spec), np.float64) / np.asarray(scale)
        best = min(float(np.mean(error(targets - center(targets, axis=0)))) for center in (np.mean, np.median))
        return Chance(best, None, len(targets))
    return None


def _of_classes(labels: np.ndarray, loss: losses.CrossEntropy, ignored: int | None) -> Chance | None:
    counts = np.unique(labels[(labels != loss.ignore_index) & (labels != ignored)], return_counts=True)[1]
    if not counts.size:
        return None
    shares = counts / counts.sum()
    # Smoothing labels is the same as using labels from a distribution closer to uniform.
    smoothed = (1 - loss.label_smoothing) * shares + loss.label_smoothing / len(shares)
    return Chance(float(-(smoothed * np.log(smoothed)).sum()), float(shares.max()), int(counts.sum()))


def _of_questions(targets: np.ndarray) -> Chance:
    """Chance for several yes-or-no labels: the mean of their entropies."""
    shares = np.clip(targets.mean(axis=0), 1e-12, 1 - 1e-12)
    entropies = -(shares * np.log(shares) + (1 - shares) * np.log(1 - shares))
    return Chance(float(entropies.mean()), float(np.maximum(shares, 1 - shares).mean()), targets.size)


def _error_of(loss: Any) -> Any:
    if isinstance(loss, losses.MeanSquaredError):
        return np.square
    if isinstance(loss, losses.MeanAbsoluteError):
        return np.abs
    if isinstance(loss, losses.Huber):
        delta = loss.delta
        return lambda error: np.where(np.abs(error) <= delta, error**2 / 2, delta * (np.abs(error) - delta / 2))
    if isinstance(loss, losses.SmoothL1) and loss.beta:
        beta = loss.beta
        return lambda error: np.where(np.abs(error) < beta, error**2 / (2 * beta), np.abs(error) - beta / 2)
    return None


def _labels(dataset: Dataset, spec: DataSpec) -> np.ndarray:
    assert spec.label is not None
    arrays = getattr(dataset, "arrays", {})
    if spec.label.name in arrays:
        return np.asarray(arrays[spec.label.name])
    known = getattr(dataset, "sample_classes", None)
    if known is not None and not spec.label.dtype.is_floating_point() and (found := known(spec.label)) is not None:
        return np.asarray(found[0])
    return np.asarray(dataset.batch(_some(dataset))[spec.label.name])


def _some(dataset: Dataset) -> np.ndarray:
    return np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), SAMPLES)).astype(np.int64))


def remedies(transfer: Transfer, dataset: Dataset, spec: DataSpec, options: FinetuneOptions) -> tuple[str, ...]:
    """Return remedies for a run that learned nothing, the most helpful first."""
    found = []
    if options.lr is not None:
        found.append(f"leave out lr={options.lr:g} (--lr): trial steps find a rate")
    if options.freeze_until is not None:
        found.append(f"let all layers train: leave out freeze_until={options.freeze_until!r} (--freeze-until)")
    if options.adapters is not None:
        found.append("let the weights train themselves: leave out adapters (--adapter)")
    if (scale := _scale_said(dataset, spec)) is not None:
        found.append(scale)
    if options.folded_norm != INSERT and _lacks_normalization(transfer.model.graph):
        found.append("train with batch normalization after each convolution: folded_norm='insert' (--folded-norm insert)")
    found.append(f"train longer: epochs={MORE_EPOCHS * options.epochs} (--epochs)")
    return tuple(found)


def _scale_said(dataset: Dataset, spec: DataSpec) -> str | None:
    """Advice on columns that are far from standardized; None if they are near."""
    samples = dataset.batch(_some(dataset)) if getattr(dataset, "arrays", None) else {}
    for entry in spec.data:
        array = samples.get(entry.name)
        if array is None or array.ndim != 2 or array.dtype.kind != "f":
            continue
        deviations = np.asarray(array, np.float64).std(axis=0)
        size = np.abs(np.asarray(array, np.float64)).max(axis=0)
        used = deviations > 0
        if used.any() and (size[used].max() > LARGEST_SPREAD or deviations[used].max() < 1 / LARGEST_SPREAD):
            return (
                f"standardize the columns of '{entry.name}', whose standard deviations are {deviations[used].min():.2g} to "
                f"{deviations[used].max():.2g}: subtract the mean of each, and divide by its standard deviation"
            )
    return None


def _lacks_normalization(graph: ir.Graph) -> bool:
    operators = {node.op_type for node in graph.all_nodes()}
    return "Conv" in operators and not operators & NORMALIZATIONS


def _epoch(history: Sequence[Row], epoch: int | None) -> Row | None:
    """The figures of an epoch, the last by default; training figures are averaged over its rows."""
    rows = [row for row in history if row["epoch"] == epoch] or [row for row in history if row["epoch"] == history[-1]["epoch"]]
    if not rows:
        return None
    before = next((row["samples"] for row in reversed(history) if (row["epoch"] or 0) < (rows[0]["epoch"] or 0)), 0)
    counts = np.diff([before or 0, *(row["samples"] or 0 for row in rows)])
    means: Row = {}
    for name in rows[-1]:
        values = [row[name] for row in rows]
        known = all(value is not None for value in values) and counts.sum() > 0
        means[name] = float(np.average(values, weights=counts)) if known else values[-1]  # type: ignore[arg-type]
    return means


def warning_of(
    chance: Chance, remedies: Sequence[str], history: Sequence[Row], best: Mapping[str, Any] | None
) -> NothingLearnedWarning | None:
    """Return the warning for a run that ended no better than chance; None if it learned something.

    Args:
        chance: figures of a model that has learned nothing.
        remedies: actions to try.
        history: rows of ``metrics.csv``.
        best: the epoch that counts, as in ``TrainingResult.best``; None for the last.
    """
    row = _epoch(history, None if best is None else best.get("epoch"))
    if row is None:
        return None
    is_evaluated = row.get(f"{EVALUATION_PREFIX}loss") is not None
    # In an epoch that starts at chance and ends far from it, the mean loss is near chance.
    if chance.is_reached(row) and not (is_evaluated and chance.is_reached(row, EVALUATION_PREFIX) is False):
        first = f"Nothing was learned: the loss of the training data is {row['loss']:.4g}, and chance comes to {chance.said}"
        return NothingLearnedWarning(f"{first}. Try this next: {'; or '.join(remedies)}", row["loss"], chance.loss)
    if is_evaluated and chance.is_reached(row, EVALUATION_PREFIX):
        loss = row[f"{EVALUATION_PREFIX}loss"]
        first = (
            f"Nothing was learned that holds for the evaluation data: their loss is {loss:.4g}, and chance comes to {chance.said}"
        )
        known = f"of the training data it is {row['loss']:.4g}: these are known by heart, or their labels mean something else"
        return NothingLearnedWarning(
            f"{first}. Try this next: see that the labels of both have the same classes in the same order; or give more samples, "
            f"or augment them. {known[0].upper()}{known[1:]}",
            loss,
            chance.loss,
        )
    return None
