"""The padding that ``auto_pad`` of convolutions and pools leaves to the runtime."""

from __future__ import annotations

from collections.abc import Sequence


def same_padding(extent: int | None, span: int, stride: int) -> int | None:
    """Return the padding, of both sides together, with which an axis has ceil(extent / stride) windows.

    Args:
        extent: of the data; None where it is symbolic.
        span: how many positions a window reaches over, from its first to its last element.
        stride: between windows.

    Returns:
        None where the padding changes with an extent that is symbolic.
    """
    if stride == 1:
        return span - 1
    if extent is None:
        return None
    return max((-(-extent // stride) - 1) * stride + span - extent, 0)


def split_padding(totals: Sequence[int], more_at_end: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split paddings into those before and those after the data, of which one is larger by one where a number is odd."""
    smaller = tuple(total // 2 for total in totals)
    larger = tuple(total - total // 2 for total in totals)
    return (smaller, larger) if more_at_end else (larger, smaller)
