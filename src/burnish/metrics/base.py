"""The interface of a metric: totals that add up over batches, replicas and clients, and a figure computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses import Compared
from burnish.settings import PlainSettings

SUM, COUNT, TOTAL, ROWS = "sum", "count", "total", "rows"
SIXTEEN_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@runtime_checkable
class Metric(Protocol):
    """A figure that is reported with the loss, as a function of totals.

    Totals of any number of batches are added up. ``figure`` computes a batch's figure in the graph, and ``combine`` computes it
    from totals that were added outside.

    Attributes:
        name: name of the output; ``burnish.metrics.get(name)`` returns an equal metric.
        higher_is_better: True if larger figures are better.
    """

    @property
    def name(self) -> str: ...

    @property
    def higher_is_better(self) -> bool: ...

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        """Emit the totals of a batch by name: int64 counts or floating-point sums, in the same shape for every batch.

        The scalar totals ``sum`` and ``count`` are those of a figure that is their quotient.

        Raises:
            ConfigurationError: the metric does not fit the loss.
        """
        ...

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        """Emit the figure of a batch, a scalar of ``dtype``; NaN if nothing counts.

        Args:
            compared: input of the metric.
            totals: the result of ``totals``.
            dtype: floating-point type of the figure.
        """
        ...

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        """Return the figure of added totals; NaN if nothing counts."""
        ...


class MetricBase(PlainSettings):
    """Base of metrics that are frozen dataclasses, named after their settings.

    The first setting follows the colon without its name, the others as ``name=value``: ``f1:macro,threshold=0.3``.
    """

    word: ClassVar[str]

    @property
    def name(self) -> str:
        texts = []
        for position, setting in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, setting.name)
            if value != setting.default:
                texts.append(f"{value}" if position == 0 else f"{setting.name}={value}")
        return f"{self.word}:{','.join(texts)}" if texts else self.word


class Quotient(MetricBase):
    """A metric that is a sum over a count."""

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        return quotient(totals[SUM], totals[COUNT], dtype)

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        return divided(totals[SUM], totals[COUNT])


def is_of_rows(metric: Metric) -> bool:
    """True if a metric's totals are rows, which are concatenated instead of added, and its figure is computed outside graphs.

    A metric declares this by its attribute ``is_of_rows``. Rows are ``[N, K, ...]``, floating-point; K may differ from batch to
    batch, and shorter batches are padded with -1.
    """
    return bool(getattr(metric, "is_of_rows", False))


def rows_name(metric: str, part: str) -> str:
    """Return the name of the output of ``evaluate`` with a metric's rows."""
    return f"{ROWS}:{metric}:{part}"


def output_name(metric: str, part: str) -> str:
    """Return the name of the output of ``evaluate`` with a metric's total."""
    return f"{part}:{metric}" if part in (SUM, COUNT) else f"{TOTAL}:{metric}:{part}"


def total_of(output: str) -> tuple[str, str] | None:
    """Return metric and part from a name made by ``output_name``; None for an output that is not a total."""
    kind, _, rest = output.partition(":")
    if kind in (TOTAL, ROWS):
        metric, _, part = rest.rpartition(":")
        return metric, part
    return (rest, kind) if kind in (SUM, COUNT) and rest else None


def wide(dtype: ir.DataType) -> ir.DataType:
    """Return the type for sums and counts of a floating-point type: sixteen bits overflow at 65504, or hold whole numbers up to
    256.
    """
    return ir.DataType.FLOAT if dtype in SIXTEEN_BITS else dtype


def widened(tensor: Tensor) -> Tensor:
    """Emit a floating-point tensor in the type of its sums."""
    return tensor.builder.cast(tensor, wide(tensor.dtype))


def quotient(total: Tensor, count: Tensor, dtype: ir.DataType) -> Tensor:
    """Emit ``total / count``, a scalar of ``dtype``; NaN if the count is 0."""
    builder = total.builder
    return builder.cast(divide(builder.cast(total, wide(dtype)), builder.cast(count, wide(dtype)), math.nan), dtype)


def divide(total: Tensor, count: Tensor, otherwise: float) -> Tensor:
    """Emit ``total / count`` of the same shape and floating-point type, and ``otherwise`` if the count is 0."""
    builder = total.builder
    nothing = builder.op("Equal", count, 0.0)
    quotients = total / builder.op("Where", nothing, builder.scalar(1.0, count), count, like=count)
    return builder.op("Where", nothing, builder.scalar(otherwise, total), quotients, like=quotients)


def divided(total: Any, count: Any) -> float:
    """Return ``total / count`` of numbers; NaN if the count is 0."""
    return float(total) / float(count) if float(count) else math.nan


def how_many(condition: Tensor) -> Tensor:
    """Emit the number of true elements, an int64 scalar."""
    builder = condition.builder
    return builder.op("ReduceSum", builder.cast(condition, ir.DataType.INT64), keepdims=0)


def tally(shape: Tensor, index: Tensor, amount: Tensor, axis: int) -> Tensor:
    """Emit the sum of ``amount`` for each index along ``axis``: int64, of ``shape``."""
    builder = index.builder
    zeros = builder.op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, np.int64)))
    return builder.op("ScatterElements", zeros, index, amount, axis=axis, reduction="add")


def does_not_fit(metric: str, reads: str, compared: Compared, use: str) -> ConfigurationError:
    """Return the error of a metric that does not fit a loss."""
    kind = "class indices" if compared.spec.name == "labels" else "values"
    return ConfigurationError(
        f"{metric} compares {reads}, and the loss {compared.loss.name} compares {kind}: leave the metric out, or use {use}"
    )
