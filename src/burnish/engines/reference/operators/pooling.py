"""Pooling over windows and over whole images, in any number of dimensions."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from burnish.engines.reference.operators.operator import Operator, listed, wide
from burnish.engines.reference.operators.windows import Windows


class MaxPool(Operator):
    """The first largest element of each window, and where it lies in the whole of the data."""

    def _run(self, x: np.ndarray, kernel_shape: list[int], storage_order: int = 0, **attributes: Any) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], kernel_shape, attributes)
        lowest = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
        seen = windows.view(x, lowest)
        flat = seen.reshape(*seen.shape[: 2 + windows.rank], -1)
        first = flat.argmax(axis=-1)
        y = np.take_along_axis(flat, first[..., None], axis=-1)[..., 0]
        if len(self.output) < 2:
            return (y,)
        positions = windows.view(_positions(x.shape, by_column=bool(storage_order)), -1).reshape(flat.shape)
        return y, np.take_along_axis(positions, first[..., None], axis=-1)[..., 0]


class AveragePool(Operator):
    """The mean of what each window counts: elements inside the data, or also inside its pads, but none beyond those."""

    def _run(
        self, x: np.ndarray, kernel_shape: list[int], count_include_pad: int = 0, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], kernel_shape, attributes)
        total = windows.view(wide(x), 0).sum(axis=tuple(range(-windows.rank, 0)))
        numbers = windows.counted(x.shape[2:], include_pads=bool(count_include_pad))
        return ((total / numbers.astype(total.dtype)).astype(x.dtype),)


class LpPool(Operator):
    """The p-norm of each window."""

    def _run(self, x: np.ndarray, kernel_shape: list[int], p: int = 2, **attributes: Any) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], kernel_shape, attributes)
        powers = windows.view(np.abs(wide(x)) ** p, 0).sum(axis=tuple(range(-windows.rank, 0)))
        return (_root(powers, p).astype(x.dtype),)


class GlobalLpPool(Operator):
    """The p-norm of each channel; the evaluator has none."""

    def _run(self, x: np.ndarray, p: int = 2, **attributes: Any) -> tuple[np.ndarray, ...]:
        powers = (np.abs(wide(x)) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True)
        return (_root(powers, p).astype(x.dtype),)


class GlobalMaxPool(Operator):
    """The largest element of each channel; the evaluator has it for images only."""

    def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class MaxUnpool(Operator):
    """Elements at the flat positions that their indices count in the output, as the importer writes it; zero elsewhere."""

    def _run(
        self, x: np.ndarray, indices: np.ndarray, output_shape: np.ndarray | None = None, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        kernel = attributes["kernel_shape"]
        rank = len(kernel)
        strides, pads = listed(attributes.get("strides"), 1, rank), listed(attributes.get("pads"), 0, 2 * rank)
        spatial = [
            (x.shape[axis + 2] - 1) * strides[axis] - pads[axis] - pads[axis + rank] + kernel[axis] for axis in range(rank)
        ]
        shape = [*x.shape[:2], *spatial] if output_shape is None else [int(extent) for extent in output_shape]
        flat = np.zeros(prod(shape), x.dtype)
        flat[indices.reshape(-1)] = x.reshape(-1)
        return (flat.reshape(shape),)


def _root(powers: np.ndarray, p: int) -> np.ndarray:
    if p == 1:
        return powers
    return np.sqrt(powers) if p == 2 else powers ** (1 / p)


def _positions(shape: tuple[int, ...], by_column: bool) -> np.ndarray:
    """The number of each element, in row-major order; or with the last two axes exchanged, in the order of columns."""
    if not by_column or len(shape) < 4:
        return np.arange(prod(shape)).reshape(shape)
    exchanged = (*shape[:-2], shape[-1], shape[-2])
    return np.swapaxes(np.arange(prod(shape)).reshape(exchanged), -1, -2)
