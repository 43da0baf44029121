"""How windows over signals, images and volumes are padded."""

from __future__ import annotations

from typing import Any

from burnish.engines.torch.translate.rules import Call, NotKnownYet
from burnish.graph import same_padding, split_padding


def explicit_pads(op: Call, kernel: list[int], strides: list[int], dilations: list[int], pads: list[int]) -> list[Any]:
    """The pads that an operator with windows declares, begins, then ends; those that ``auto_pad`` asks for are worked out.

    Raises:
        NotKnownYet: they depend on extents that are known only when the graph runs.
    """
    automatic = op.attribute("auto_pad", "NOTSET")
    if automatic not in ("SAME_UPPER", "SAME_LOWER"):
        return [0] * len(pads) if automatic == "VALID" else list(pads)
    sizes = [extent if isinstance(extent, int) else None for extent in op.extents()[2:]]
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    totals = [same_padding(*axis) for axis in zip(sizes, spans, strides, strict=True)]
    known = [total for total in totals if total is not None]
    if len(known) < len(kernel):
        raise NotKnownYet
    begins, ends = split_padding(known, more_at_end=automatic == "SAME_UPPER")
    return [*begins, *ends]
