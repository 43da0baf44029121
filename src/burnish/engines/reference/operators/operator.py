"""What the operators here have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class Operator(OpRun):
    """An operator of the standard domain, of every version; attributes that a node leaves out have the standard's defaults."""

    op_domain = ""

    def _run(self, *operands: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
        """Return the outputs, in the dtype of the first operand where the standard says nothing else."""
        raise NotImplementedError


def wide(array: np.ndarray) -> np.ndarray:
    """The array in a dtype that sums keep their digits in: sixteen bits become float32, all else stays."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 and array.dtype.kind not in "iub" else array


def per_channel(vector: np.ndarray, rank: int) -> np.ndarray:
    """A vector of one number for each channel, shaped to stand beside data of that rank."""
    return vector.reshape(-1, *[1] * (rank - 2))


def listed(given: Sequence[int] | None, default: int, count: int) -> list[int]:
    """The numbers of an attribute, or ``count`` times its default."""
    return [default] * count if given is None else list(given)
