"""What a QuantizeLinear says of how it is trained and exported, in its metadata: a saved model keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from burnish.graph.annotations import EXACT, read_mark, record

Role = Literal["weight", "activation"]
Scales = Literal["learned", "observed", "fixed"]


@dataclass(frozen=True)
class QuantizationMark:
    """How a quantization of ``burnish.surgery.quantize`` is trained and exported.

    Attributes:
        role: whether it quantizes a weight or an activation.
        scales: ``learned`` by gradients, ``observed`` from ranges that training updates, or ``fixed``.
        levels: the integers above zero (of an asymmetric range: all but one), by which a learned scale's gradient is divided.
        bits: of an integer in the exported file: 8 or 4.
        block: weights along the axis of the inputs that share a scale; 0 without blocks.
        input_axis: that axis of the weight; read where there are blocks.
        momentum: what a step retains of an observed range.
        freeze_after: the step from which observed ranges stay; None: never.
        freeze_epochs: the same in epochs, whose steps are known where the model is compiled.
        settled: the part of its width that the range of an activation may move by within ``window`` steps, and then stays.
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
        """The steps over which it is seen whether a range has settled: as many as its average reaches back."""
        return max(1, round(1 / (1 - self.momentum)))

    def put(self, node: ir.Node) -> None:
        """Write it into the metadata of a node."""
        QUANTIZATION.set(node, self)

    @staticmethod
    def of(node: ir.Node | None) -> QuantizationMark | None:
        """Return what the metadata of a node says; None where it says nothing."""
        return None if node is None else read_mark(node, QUANTIZATION)


QUANTIZATION = record("burnish.quantization", QuantizationMark)
"""Of a QuantizeLinear or DequantizeLinear: how it is quantized."""


def mark_exact(node: ir.Node) -> None:
    """Say of a layer that it adds products of whole numbers: no kernel may compute it from other products, which are rounded."""
    EXACT.set(node, True)


def is_exact(node: ir.Node) -> bool:
    """Whether a layer adds products of whole numbers."""
    return EXACT.is_on(node)


def simulates_quantization(graph: ir.Graph) -> bool:
    """Whether a graph computes with floating-point numbers what its export will compute with integers."""
    return any(map(QUANTIZATION.is_on, graph))


def freezes_by_epochs(graph: ir.Graph) -> bool:
    """Whether ranges stay after a number of epochs, which are counted in steps where the model is compiled."""
    return any((mark := QuantizationMark.of(node)) is not None and mark.freeze_epochs is not None for node in graph)


def learns_scale(node: ir.Node) -> bool:
    """Whether a QuantizeLinear or DequantizeLinear passes a gradient to its scale as to a weight."""
    mark = QuantizationMark.of(node)
    return mark is not None and mark.scales == "learned"


def observed_range(node: ir.Node) -> ir.Value | None:
    """Return the initializer or input with the range that the scale of an observed QuantizeLinear is computed from."""
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
