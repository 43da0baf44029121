"""The windows of a convolution or pool, with all defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from burnish.errors import GradientError
from burnish.graph import same_padding, split_padding
from burnish.operators.registry import Operation


@dataclass(frozen=True)
class Windows:
    """Windows over the spatial axes; one entry per axis."""

    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]

    @staticmethod
    def declared(op: Operation) -> Windows:
        """Read the attributes of a node, or of a semantic gradient operator, without ``auto_pad``.

        Raises:
            GradientError: the node has no ``kernel_shape`` and a weight of unknown shape.
        """
        kernel = tuple(op.attribute("kernel_shape") or _kernel_of_weight(op))
        rank = len(kernel)
        pads = op.attribute("pads", (0,) * 2 * rank)
        strides, dilations = (op.attribute(name, (1,) * rank) for name in ("strides", "dilations"))
        return Windows(kernel, strides, dilations, pads[:rank], pads[rank:])

    @staticmethod
    def of(op: Operation) -> Windows:
        """Read a node over the data of its first input; ``auto_pad`` becomes explicit pads.

        Raises:
            GradientError: ``auto_pad`` needs an unknown spatial size, or the kernel's size is unknown.
        """
        windows = Windows.declared(op)
        auto_pad, rank = op.attribute("auto_pad", "NOTSET"), windows.rank
        if auto_pad == "VALID":
            return windows.padded((0,) * rank, (0,) * rank)
        if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
            return windows
        totals = [_same_padding(op, axis, windows.span(axis), windows.strides[axis]) for axis in range(rank)]
        return windows.padded(*split_padding(totals, more_at_end=auto_pad == "SAME_UPPER"))

    @property
    def rank(self) -> int:
        return len(self.kernel_shape)

    def span(self, axis: int) -> int:
        """Return the number of positions from the first to the last element of a window along an axis."""
        return (self.kernel_shape[axis] - 1) * self.dilations[axis] + 1

    def padded(self, begin: tuple[int, ...], end: tuple[int, ...]) -> Windows:
        return Windows(self.kernel_shape, self.strides, self.dilations, begin, end)

    def attributes(self) -> dict[str, Any]:
        return {
            "kernel_shape": self.kernel_shape,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": self.pads_begin + self.pads_end,
        }


def _kernel_of_weight(op: Operation) -> tuple[int, ...]:
    weight = op.required(1)
    sizes = [weight.dimension(axis) for axis in range(2, weight.rank or 0)]
    known = tuple(size for size in sizes if size is not None)
    if not sizes or len(known) != len(sizes):
        raise GradientError(
            f"{op} has no kernel_shape and its weight '{weight.name}' has no known shape: declare the shape of the weight"
        )
    return known


def _same_padding(op: Operation, axis: int, span: int, stride: int) -> int:
    total = same_padding(op.required(0).dimension(axis + 2), span, stride)
    if total is None:
        raise GradientError(
            f"{op} has auto_pad={op.attribute('auto_pad')} and stride {stride} along spatial axis {axis}, whose size is "
            "symbolic, so its padding changes with the input: fix the spatial size of the model's input, or export the model "
            "with explicit pads"
        )
    return total
