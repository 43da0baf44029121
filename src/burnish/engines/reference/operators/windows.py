"""Windows over the spatial axes: where they lie, and the data seen through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from burnish.engines.reference.operators.operator import listed
from burnish.graph import same_padding, split_padding


@dataclass(frozen=True)
class Windows:
    """Windows over data of known size; one entry per spatial axis.

    ``pads_end`` is what the node says; ``reach_end`` is how far behind the data the last window reaches, which a rounded-up
    output size makes more, and trailing entries that no window reaches make less.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads_begin: list[int]
    pads_end: list[int]
    reach_end: list[int]
    counts: list[int]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @staticmethod
    def of(extents: Sequence[int], kernel: Sequence[int], attributes: dict[str, Any]) -> Windows:
        """The windows of a convolution or pool over data of these spatial extents."""
        rank = len(kernel)
        strides, dilations = (listed(attributes.get(name), 1, rank) for name in ("strides", "dilations"))
        pads, mode = listed(attributes.get("pads"), 0, 2 * rank), attributes.get("auto_pad") or "NOTSET"
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
        begin, end = pads[:rank], pads[rank:]
        if mode == "VALID":
            begin, end = [0] * rank, [0] * rank
        elif mode in ("SAME_UPPER", "SAME_LOWER"):
            totals = [same_padding(*axis) or 0 for axis in zip(extents, spans, strides, strict=True)]
            begin, end = map(list, split_padding(totals, more_at_end=mode == "SAME_UPPER"))
        rounded_up = bool(attributes.get("ceil_mode")) and not mode.startswith("SAME")
        counts, reach_end = [], []
        for axis in range(rank):
            room = extents[axis] + begin[axis] + end[axis] - spans[axis]
            count = room // strides[axis] + 1
            # A window that would start behind the data is left out.
            if rounded_up and room % strides[axis] and count * strides[axis] < extents[axis] + begin[axis]:
                count += 1
            counts.append(count)
            reach_end.append((count - 1) * strides[axis] + spans[axis] - begin[axis] - extents[axis])
        return Windows(list(kernel), strides, dilations, begin, end, reach_end, counts)

    def view(self, x: np.ndarray, outside: Any) -> np.ndarray:
        """Return ``x`` [N, C, *space] as [N, C, *counts, *kernel], ``outside`` where a window reaches beyond it."""
        rank = self.rank
        cropped = x[(..., *(slice(None, min(reach, 0) or None) for reach in self.reach_end))]
        around = [(0, 0), (0, 0), *((begin, max(reach, 0)) for begin, reach in zip(self.pads_begin, self.reach_end, strict=True))]
        padded = np.pad(cropped, around, constant_values=outside)
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True)]
        seen = sliding_window_view(padded, spans, axis=tuple(range(2, rank + 2)))
        steps = [slice(None, None, step) for step in (*self.strides, *self.dilations)]
        return seen[(slice(None), slice(None), *steps)]

    def counted(self, extents: Sequence[int], include_pads: bool) -> np.ndarray:
        """How many elements of each window [*counts] lie inside the data of these extents, or also inside its pads."""
        total = np.ones(())
        for axis, extent in enumerate(extents):
            first = np.arange(self.counts[axis])[:, None] * self.strides[axis] - self.pads_begin[axis]
            places = first + np.arange(self.kernel[axis]) * self.dilations[axis]
            inside = places < extent + self.pads_end[axis] if include_pads else (places >= 0) & (places < extent)
            total = np.multiply.outer(total, inside.sum(axis=1))
        return total
