"""Mean and variance per channel of values inside a model over a data set, exact for any batch sizes.

For each batch the graph returns the mean in two parts and the population variance of the centered values. Batches are merged in
float64 (Chan, Golub, LeVeque 1983).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from burnish import engines
from burnish.engines import Engine
from burnish.errors import EngineError, InputError
from burnish.graph import Builder, Tensor
from burnish.modes import bind_inference
from burnish.operators.normalization.statistics import channel_mean, per_channel

Batch = Mapping[str, Any]


@dataclass
class Moments:
    """Count, mean and sum of squared deviations per channel, in float64."""

    count: int
    mean: np.ndarray
    deviations: np.ndarray

    def merge(self, other: Moments) -> None:
        """Merge the moments of other samples into these (Chan, Golub, LeVeque 1983)."""
        total = self.count + other.count
        delta = other.mean - self.mean
        self.mean = self.mean + delta * (other.count / total)
        self.deviations = self.deviations + other.deviations + delta * delta * (self.count * other.count / total)
        self.count = total

    @property
    def variance(self) -> np.ndarray:
        """Population variance."""
        return self.deviations / self.count


@dataclass(frozen=True)
class Statistics:
    """Statistics in a graph of a value [N, C, ...] over one batch: ``mean`` + ``shift`` is the mean.

    ``centered`` is the value minus ``mean``. All are float32 if the value is in half precision.
    """

    mean: Tensor
    shift: Tensor
    variance: Tensor
    centered: Tensor


def emit_statistics(x: Tensor) -> Statistics:
    """Emit the corrected two-pass statistics of ``x`` [N, C, ...] over all axes except the channel axis."""
    builder = x.builder
    if x.dtype != ir.DataType.DOUBLE:
        x = builder.cast(x, ir.DataType.FLOAT)
    mean = channel_mean(x)
    centered = x - per_channel(mean, x)
    # Zero but for the rounding of the mean, which it corrects.
    shift = channel_mean(centered)
    variance = builder.op("Max", channel_mean(centered * centered) - shift * shift, 0)
    return Statistics(mean, shift, variance, centered)


class Measurement:
    """A graph whose outputs are the statistics of chosen values of a model.

    Args:
        model: a model of standard operators; taken over and changed. Its own outputs are removed.
    """

    def __init__(self, model: ir.Model):
        self.model = model
        self.model.graph.outputs.clear()
        self._places: list[tuple[str, str]] = []

    def add(self, key: str, layer: str, x: Tensor, statistics: Statistics) -> None:
        """Measure a value.

        Args:
            key: name of the result; values with the same key are merged.
            layer: name of the layer, for errors.
            x: the value [N, C, ...].
            statistics: the statistics of ``x``.
        """
        builder = x.builder
        index = len(self._places)
        self._places.append((key, layer))
        size = builder.op("Size", x)
        for part, tensor in zip(_PARTS, (size, statistics.mean, statistics.shift, statistics.variance), strict=True):
            output = builder.op("Identity", tensor).value
            output.name = f"measured:{index}:{part}"
            self.model.graph.outputs.append(output)

    def run(
        self, data: Iterable[Batch], inputs: Sequence[ir.Value], fixed: Mapping[str, np.ndarray], engine: str | Engine | None
    ) -> dict[str, Moments]:
        """Measure over a data set.

        Args:
            data: batches, dicts of arrays by input name.
            inputs: the inputs that batches provide; other entries of a batch are ignored.
            fixed: the other inputs, the same for every batch.
            engine: the engine that runs the graph; None for the default.

        Raises:
            InputError: there is no batch, a batch lacks an input or does not fit the model, or a measured value is not finite.
            EngineError: there is no such engine, or it cannot load the graph or run it on a batch.
        """
        RemoveUnusedNodesPass()(self.model)
        run = engines.get("auto" if engine is None else engine).load(self.model)
        results: dict[str, Moments] = {}
        batches = 0
        for batch in check_data(data):
            fed = {**fixed, **batch_inputs(batch, inputs)}
            batches += 1
            try:
                outputs = run(fed)
            except EngineError as error:
                raise EngineError(f"Batch {batches} cannot be measured; check the shapes of its arrays. {error}") from error
            for index, (key, layer) in enumerate(self._places):
                size, mean, shift, variance = (outputs[f"measured:{index}:{part}"] for part in _PARTS)
                moments = _moments(layer, int(size), mean, shift, variance)
                if key in results:
                    results[key].merge(moments)
                else:
                    results[key] = moments
        if not batches:
            raise InputError("There is no batch to measure: the data set is empty, or its iterator was already used up")
        return results


_PARTS = ("size", "mean", "shift", "variance")


def measure_values(
    model: ir.Model, layers: Mapping[str, str], data: Iterable[Batch], engine: str | Engine | None, *, channels_last: bool = False
) -> dict[str, Moments]:
    """Measure values of a model at inference.

    Args:
        model: a canonical model; not changed.
        layers: value name -> name of its layer, for errors.
        data: batches, dicts of arrays by input name.
        engine: the engine or its name; None for the default.
        channels_last: True if the values are [..., C] instead of [N, C, ...].

    Returns:
        The moments by value name.
    """
    copy = model.clone()
    graph = copy.graph
    values = {output.name: output for node in graph for output in node.outputs if output.name in layers}
    bind_inference(graph)
    measurement = Measurement(copy)
    builder = Builder(graph)
    for name, layer in layers.items():
        x = builder.tensor(values[name])
        if channels_last:
            last = x.dimension(-1)
            x = builder.op("Reshape", x, builder.integers([-1, last if last is not None else 0]), shape=[None, last])
        measurement.add(name, layer, x, emit_statistics(x))
    return measurement.run(data, graph.inputs, {}, engine)


def _moments(layer: str, size: int, mean: np.ndarray, shift: np.ndarray, variance: np.ndarray) -> Moments:
    center = mean.astype(np.float64) + shift.astype(np.float64)
    if not (np.isfinite(center).all() and np.isfinite(variance).all()):
        raise InputError(
            f"The values at the layer '{layer}' are not finite, or too large for their squares: "
            "look for NaN, infinite or unscaled values in the batch, and in the weights"
        )
    count = size // max(mean.size, 1)
    return Moments(count, center, variance.astype(np.float64) * count)


def check_data(data: Iterable[Batch]) -> Iterable[Batch]:
    """Return ``data``.

    Raises:
        InputError: it is not an iterable of batches.
    """
    if isinstance(data, Mapping | np.ndarray | str | bytes) or not isinstance(data, Iterable):
        raise InputError(
            f"data must be an iterable of batches, each a dict of arrays by input name, not a {type(data).__name__}: "
            "give [batch] for a single batch"
        )
    return data


def batch_inputs(batch: Batch, inputs: Sequence[ir.Value]) -> dict[str, np.ndarray]:
    """Return the arrays of a batch that a graph reads, in the graph's dtypes.

    Raises:
        InputError: the batch is not a dict, lacks an input, or has an array of the wrong rank, shape or kind of number.
    """
    if not isinstance(batch, Mapping):
        names = ", ".join(f"'{value.name}': ..." for value in inputs)
        raise InputError(f"A batch is a dict of arrays by input name, not a {type(batch).__name__}: give {{{names}}}")
    arrays = {}
    for value in inputs:
        name = value.name or ""
        if name not in batch:
            present = ", ".join(f"'{key}'" for key in batch) or "nothing"
            raise InputError(f"The batch lacks the input '{name}' ({_described(value)}); it has {present}: add it to the batch")
        array = np.asarray(batch[name])
        _check_fits(value, array)
        arrays[name] = _converted(value, array)
    return arrays


def _described(value: ir.Value) -> str:
    dims = () if value.shape is None else value.shape.dims
    return f"{value.dtype} of shape [{', '.join(str(extent) for extent in dims)}]"


def _check_fits(value: ir.Value, array: np.ndarray) -> None:
    dims = None if value.shape is None else value.shape.dims
    fits = dims is None or (
        len(dims) == array.ndim
        and all(not isinstance(expected, int) or expected == extent for expected, extent in zip(dims, array.shape, strict=True))
    )
    if not fits:
        raise InputError(
            f"The input '{value.name}' has shape {list(array.shape)}, and the model takes {_described(value)}: "
            "give batches of that shape"
        )
    if array.size == 0:
        raise InputError(f"The input '{value.name}' is empty (shape {list(array.shape)}): leave empty batches out")


def _is_floating(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _converted(value: ir.Value, array: np.ndarray) -> np.ndarray:
    assert value.dtype is not None
    dtype = value.dtype.numpy()
    both = (array.dtype, dtype)
    same_kind = array.dtype == dtype or all(map(_is_floating, both)) or all(each.kind == "i" for each in both)
    if not same_kind:
        raise InputError(
            f"The input '{value.name}' has dtype {array.dtype}, expected {dtype}: convert it with .astype('{dtype}')"
        )
    return np.asarray(array, dtype=dtype, order="C")
