"""Detection of random weights: layers that were never or hardly trained, by the singular values of their matrices."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING

SMALLEST = 8
"""Fewest rows and columns of a matrix: smaller ones are not conclusive."""
LARGEST = 1024
"""Most rows and columns examined: a part of independent numbers is as random as the whole."""
DEVIATIONS = 5.0
"""Deviations, in units of the Tracy-Widom law, of a singular value that stands out: one in 10,000 random matrices has one."""
RECURRENT = frozenset({"LSTM", "GRU", "RNN"})


def are_random(model: ir.Model, names: Collection[str]) -> tuple[int, bool | None]:
    """Test if weights look random and untrained.

    Training adds directions common in the data to a matrix: its largest singular value grows beyond that of a matrix of
    independent numbers, for any distribution. A few steps add little, and weights still look random after them.

    Sources: Johnstone, "On the distribution of the largest eigenvalue in principal components analysis", 2001; Martin and
    Mahoney, "Implicit self-regularization in deep neural networks", 2021.

    Args:
        model: a canonical model.
        names: initializers to examine, up to the first that does not look random.

    Returns:
        The number of matrices examined, and True if all look random; None if there are none.
    """
    count = 0
    for matrix in _matrices(model, names):
        count += 1
        if _stands_out(matrix):
            return count, False
    return count, True if count else None


def _matrices(model: ir.Model, names: Collection[str]) -> Iterator[np.ndarray]:
    for name in names:
        value = model.graph.initializers.get(name)
        tensor = None if value is None else value.const_value
        if value is None or tensor is None or tensor.dtype not in FLOATING or len(tensor.shape) < 2 or 0 in tensor.shape:
            continue
        array = tensor.numpy()
        is_recurrent = any(node.op_type in RECURRENT for node in value.consumers())
        matrix = array.reshape(-1, array.shape[-1]) if is_recurrent else array.reshape(array.shape[0], -1)
        matrix = np.asarray(matrix[:LARGEST, :LARGEST], np.float32)
        if min(matrix.shape) >= SMALLEST and matrix.any():
            yield matrix


def _stands_out(matrix: np.ndarray) -> bool:
    """True if the largest singular value exceeds that of independent numbers of the same size."""
    rows, columns = matrix.shape
    below, right = math.sqrt(rows - 1), math.sqrt(columns)
    mean, deviation = (below + right) ** 2, (below + right) * (1 / below + 1 / right) ** (1 / 3)
    gram = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
    largest = float(np.linalg.eigvalsh(gram)[-1]) / float(np.mean(matrix**2, dtype=np.float64))
    return largest > mean + DEVIATIONS * deviation
