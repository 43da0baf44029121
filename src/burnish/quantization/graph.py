"""Annotations of QuantizeLinear nodes for training and export, kept in a saved model's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from burnish.graph.annotations import EXACT, read_mark, record

Role = Literal["weight", "activation"]
Scales = Literal["learned", "observed", "fixed"]


@dataclass(frozen=True)
class QuantizationMark:
    """Training and export of a quantizer.

    Attributes:
        role: ``weight`` or ``activation``.
        scales: ``learned`` by gradients, ``observed`` from ranges updated in training, or ``fixed``.
        levels: integers above zero (for an asymmetric range all but one), the divisor of a learned scale's gradient.
        bits: bits in the exported file, 8 or 4.
        block: weights along the input axis that share a scale; 0 for none.
        input_axis: that axis, if there are blocks.
        momentum: share of an observed range kept by a step.
        freeze_after: step that freezes observed ranges, or None.
        freeze_epochs: the same in epochs, converted by the compiler.
        settled: relative movement within ``window`` steps that freezes an activation's range.
    """

    role: Role
    scales: Scales
    levels: int
    bits: int = 8
    block: int = 0
    input_axis: int = 0
    momentum: float = 0.0
    freeze_after: int | None = None
    freeze_epochs: int | None = None
    settled: float | None = None

    @property
    def window(self) -> int:
        """Steps over which a range must settle: the reach of its moving average."""
        return max(1, round(1 / (1 - self.momentum)))

    def put(self, node: ir.Node) -> None:
        """Write the mark into a node's metadata."""
        QUANTIZATION.set(node, self)

    @staticmethod
    def of(node: ir.Node | None) -> QuantizationMark | None:
        """Return the mark in a node's metadata, or None."""
        return None if node is None else read_mark(node, QUANTIZATION)


QUANTIZATION = record("burnish.quantization", QuantizationMark)
"""Quantization of a QuantizeLinear or DequantizeLinear."""


def mark_exact(node: ir.Node) -> None:
    """Mark a layer that sums products of integers, so that no kernel rearranges it into products with rounding."""
    EXACT.set(node, True)


def is_exact(node: ir.Node) -> bool:
    """True if a layer sums products of integers."""
    return EXACT.is_on(node)


def simulates_quantization(graph: ir.Graph) -> bool:
    """True if a graph simulates in floating point what its export computes with integers."""
    return any(map(QUANTIZATION.is_on, graph))


def freezes_by_epochs(graph: ir.Graph) -> bool:
    """True if ranges freeze after a number of epochs, which the compiler converts to steps."""
    return any((mark := QuantizationMark.of(node)) is not None and mark.freeze_epochs is not None for node in graph)


def learns_scale(node: ir.Node) -> bool:
    """True if a QuantizeLinear or DequantizeLinear has a trained scale."""
    mark = QuantizationMark.of(node)
    return mark is not None and mark.scales == "learned"


def observed_range(node: ir.Node) -> ir.Value | None:
    """Return the range from which the scale of an observed QuantizeLinear is computed, an initializer or input."""
    mark = QuantizationMark.of(node)
    if mark is None or mark.scales != "observed" or node.op_type != "QuantizeLinear":
        return None
    pending = [node.inputs[1]]
    while pending:
        value = pending.pop()
        if value is None:
            continue
        if (producer := value.producer()) is not None:
            pending.extend(producer.inputs)
        elif value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) and value.shape is not None and len(value.shape) == 1:
            return value
    return None
