"""Windows and filter banks of signal processing: functions of sizes alone, computed in float64 and rounded once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.engines.torch.translate.rules import Call, NotKnownYet, translates


def _window(op: Call, coefficients: tuple[float, ...]) -> Any:
    """A sum of cosines: ``sum((-1)^k a[k] cos(2 pi k n / N))``, with N the size, or one less where it is symmetric."""
    size = op.integers(0)[0]
    period = size if op.attribute("periodic", 1) else size - 1
    # A symmetric window of one element is 0/0 by the formula: its first value, as the runtimes compute.
    angle = torch.arange(size, dtype=torch.float64, device=op.device) * (2 * math.pi / (period + (period == 0)))
    window = torch.zeros_like(angle)
    for order, coefficient in enumerate(coefficients):
        window = window + (-1) ** order * coefficient * torch.cos(order * angle)
    return window.to(_dtype(op))


def _dtype(op: Call) -> torch.dtype:
    return TORCH_DTYPES[ir.DataType(op.attribute("output_datatype", int(ir.DataType.FLOAT)))]


@translates("HannWindow")
def hann_window(op: Call) -> Any:
    return _window(op, (0.5, 0.5))


@translates("HammingWindow")
def hamming_window(op: Call) -> Any:
    return _window(op, (25 / 46, 21 / 46))


@translates("BlackmanWindow")
def blackman_window(op: Call) -> Any:
    return _window(op, (0.42, 0.5, 0.08))


@translates("MelWeightMatrix")
def mel_weight_matrix(op: Call) -> Any:
    """Triangles of height 1 over the bins of a spectrum, ``[dft_length / 2 + 1, num_mel_bins]``, as the standard places them."""
    numbers = [op.known(index) for index in range(5)]
    if any(number is None for number in numbers):
        raise NotKnownYet
    count, length, rate, lowest, highest = (number.item() for number in numbers if number is not None)
    low, high = (2595 * math.log10(1 + hertz / 700) for hertz in (lowest, highest))
    mel = low + np.arange(count + 2) * ((high - low) / (count + 2))
    corners = np.floor((length + 1) * 700 * (10 ** (mel / 2595) - 1) / rate)
    left, middle, right = corners[:-2], corners[1:-1], corners[2:]
    bins = np.arange(length // 2 + 1)[:, np.newaxis]
    rising = np.where((left <= bins) & (bins <= middle), (bins - left) / np.maximum(middle - left, 1), 0.0)
    falling = np.where((middle <= bins) & (bins < right), (right - bins) / np.maximum(right - middle, 1), 0.0)
    matrix = np.where((bins == middle) & (left == middle), 1.0, np.maximum(rising, falling))
    return torch.from_numpy(matrix).to(op.device, _dtype(op))
