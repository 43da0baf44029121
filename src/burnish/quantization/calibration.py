"""Calibration: ranges of activations, and scales of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from burnish import engines
from burnish.engines import Engine
from burnish.errors import ConfigurationError, EngineError, InputError
from burnish.graph import Builder
from burnish.modes import bind_inference
from burnish.quantization.formats import ActivationFormat, WeightFormat
from burnish.validation import is_number
from burnish.value_statistics import Batch, batch_inputs, check_data

Method = Literal["minmax", "percentile", "entropy"]
BINS = 2048
"""Bins of a histogram of absolute values."""
LEAST = 1e-6
"""Probability assumed for empty bins of the approximation."""
RATIOS = np.linspace(0.3, 1.0, 57)
"""Candidate limits of 4-bit weights, relative to the greatest weight."""
Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Range:
    """A range to cover with integers; ``low`` <= 0 <= ``high``."""

    low: float
    high: float


def check_method(method: str, percentile: float) -> None:
    """Raise ConfigurationError for an invalid method or percentile."""
    if method not in ("minmax", "percentile", "entropy"):
        raise ConfigurationError(f"quantize: method={method!r}: give 'minmax', 'percentile' or 'entropy'")
    if not is_number(percentile) or not 50 < percentile <= 100:
        raise ConfigurationError(f"quantize: percentile={percentile!r}: give a number above 50, at most 100, such as 99.99")


def ranges(
    model: ir.Model,
    names: Sequence[str],
    data: Iterable[Batch],
    method: Method,
    percentile: float,
    activations: ActivationFormat,
    engine: str | Engine | None,
) -> dict[str, Range]:
    """Return the ranges of a model's values over data, by name.

    Args:
        model: a canonical model; not changed.
        names: names of the values.
        data: batches, dicts of arrays by input name; kept in memory for histograms.
        method: ``minmax``: minimum and maximum. ``percentile``: the range that covers this share of absolute values. ``entropy``:
            the range with the least loss of information (Migacz 2017).
        percentile: of absolute values, in percent.
        activations: format of the integers.
        engine: engine or its name; None for the default.

    Raises:
        InputError: there is no batch, one does not fit, or a value is not finite.
        EngineError: the model cannot be run.
    """
    batches = check_data(data) if method == "minmax" else list(check_data(data))
    limits = _limits(model, names, batches, engine)
    if method == "minmax":
        return limits
    histograms = _histograms(model, limits, batches, engine)
    return {name: _clipped(limits[name], histograms[name], method, percentile, activations) for name in names}


def _outputs(model: ir.Model, names: Sequence[str], extremes: bool, engine: str | Engine | None) -> tuple[Run, list[ir.Value]]:
    """Return a function of a batch to a model's values (all, or only extremes), and the model's inputs."""
    copy = model.clone()
    graph = copy.graph
    values = {value.name: value for value in (*graph.inputs, *(output for node in graph for output in node.outputs))}
    graph.outputs.clear()
    graph.outputs.extend(values[name] for name in names)
    bind_inference(graph)  # may replace values
    bound = list(graph.outputs)
    graph.outputs.clear()
    builder = Builder(graph)
    for index, value in enumerate(bound):
        tensor = builder.tensor(value)
        for part, operator in (("low", "ReduceMin"), ("high", "ReduceMax")) if extremes else (("all", "Identity"),):
            output = builder.op(operator, tensor, keepdims=0 if extremes else None).value
            output.name = f"measured:{index}:{part}"
            graph.outputs.append(output)
    return engines.get("auto" if engine is None else engine).load(copy), list(graph.inputs)


def _each(run: Run, inputs: Sequence[ir.Value], data: Iterable[Batch]) -> Iterable[dict[str, np.ndarray]]:
    count = 0
    for batch in data:
        count += 1
        try:
            yield run(batch_inputs(batch, inputs))
        except EngineError as error:
            raise EngineError(f"Calibration batch {count} cannot be run; check the shapes of its arrays. {error}") from error
    if not count:
        raise InputError("There is no batch to calibrate on: the data set is empty, or its iterator was already used up")


def _limits(model: ir.Model, names: Sequence[str], data: Iterable[Batch], engine: str | Engine | None) -> dict[str, Range]:
    run, inputs = _outputs(model, names, True, engine)
    low, high = np.zeros(len(names)), np.zeros(len(names))
    for outputs in _each(run, inputs, data):
        for index, name in enumerate(names):
            least, greatest = (float(outputs[f"measured:{index}:{part}"]) for part in ("low", "high"))
            if not np.isfinite([least, greatest]).all():
                raise InputError(
                    f"The activation '{name}' is not finite on the calibration data: look for NaN, infinite or unscaled values "
                    "in the batch, and in the weights"
                )
            low[index], high[index] = min(low[index], least), max(high[index], greatest)
    return {name: Range(low[index], high[index]) for index, name in enumerate(names)}


def _histograms(
    model: ir.Model, limits: dict[str, Range], data: Iterable[Batch], engine: str | Engine | None
) -> dict[str, np.ndarray]:
    """Return the histogram of each activation's absolute values, in ``BINS`` equal bins from zero to the greatest."""
    names = list(limits)
    run, inputs = _outputs(model, names, False, engine)
    counts = {name: np.zeros(BINS, np.int64) for name in names}
    for outputs in _each(run, inputs, data):
        for index, name in enumerate(names):
            widest = max(-limits[name].low, limits[name].high)
            counts[name] += np.histogram(np.abs(outputs[f"measured:{index}:all"]), BINS, (0.0, widest or 1.0))[0]
    return counts


def _clipped(limits: Range, counts: np.ndarray, method: Method, percentile: float, activations: ActivationFormat) -> Range:
    widest = max(-limits.low, limits.high)
    if method == "percentile":
        part = np.searchsorted(np.cumsum(counts), percentile / 100 * counts.sum()) + 1
    else:
        part = least_divergence(counts, 255 if limits.low == 0 and not activations.symmetric else 127)
    threshold = widest * min(part, BINS) / BINS
    return Range(max(limits.low, -threshold), min(limits.high, threshold))


def least_divergence(counts: np.ndarray, levels: int) -> int:
    """Return the number of histogram bins to keep, so that ``levels`` integers lose the least information.

    It minimizes the Kullback-Leibler divergence between the histogram, with the tail added to its last bin, and its bins merged
    into ``levels`` groups, each spread evenly over its bins that are not empty (Migacz 2017, "8-bit inference with TensorRT").

    Args:
        counts: histogram of absolute values, from zero.
        levels: integers above zero.
    """
    counts = counts.astype(np.float64)
    counts[0] = counts[1]  # the zeros of a ReLU are not informative
    best, least = len(counts), np.inf
    for part in range(levels + 1, len(counts) + 1, max(1, len(counts) // 256)):
        inside = counts[:part]
        reference = inside.copy()
        reference[-1] += counts[part:].sum()
        groups = np.minimum(np.arange(part) * levels // part, levels - 1)
        filled = inside > 0
        sums = np.bincount(groups, inside, levels)
        sizes = np.maximum(np.bincount(groups, filled, levels), 1)
        spread = np.where(filled, (sums / sizes)[groups], 0.0)
        divergence = _divergence(reference, spread)
        if divergence < least:
            best, least = part, divergence
    return best


def _divergence(reference: np.ndarray, approximation: np.ndarray) -> float:
    p, q = reference / max(reference.sum(), 1), approximation / max(approximation.sum(), 1)
    has = p > 0
    return float(np.sum(p[has] * np.log(p[has] / np.maximum(q[has], LEAST))))


def activation_scale(limits: Range, activations: ActivationFormat) -> tuple[float, int]:
    """Return the scale and zero point whose integers cover a range; zero is represented exactly."""
    if activations.symmetric:
        scale = max(-limits.low, limits.high) / activations.levels
        return scale or 1.0, activations.middle
    scale = (limits.high - limits.low) / activations.levels
    if scale == 0:
        return 1.0, activations.lowest
    return scale, activations.lowest + round(-limits.low / scale)


def weight_limits(weight: np.ndarray, axis: int | None, weights: WeightFormat) -> np.ndarray:
    """Return the value of the greatest integer for each scale.

    It is the greatest absolute weight for 8 bits, and the fraction of it with the least squared error for 4 bits.

    Args:
        weight: the weights.
        axis: axis with separate scales; None for a single scale.

    Returns:
        float64 [C], or [1] for a single scale.
    """
    rows = np.abs(weight.astype(np.float64))
    rows = rows.reshape(1, -1) if axis is None else np.moveaxis(rows, axis, 0).reshape(rows.shape[axis], -1)
    greatest = rows.max(axis=1)
    greatest = np.where(greatest == 0, 1.0, greatest)
    if weights.bits == 8:
        return greatest

    def error(ratio: float) -> np.ndarray:
        scale = (greatest * ratio / weights.levels)[:, None]
        return np.sum((np.minimum(np.rint(rows / scale), weights.levels) * scale - rows) ** 2, axis=1)

    errors = np.stack([error(ratio) for ratio in RATIOS])
    return greatest * RATIOS[errors.argmin(axis=0)]
