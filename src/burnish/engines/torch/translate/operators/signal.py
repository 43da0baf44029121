"""Windows and filter banks of signal processing: functions of sizes only, computed in float64 and rounded once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.engines.torch.translate.rules import Call, NotKnownYet, translates


def _window(op: Call, coefficients: tuple[float, ...]) -> Any:
    """A sum of cosines: ``sum((-1)^k a[k] cos(2 pi k n / N))``, with N the size, or one less for a symmetric window."""
    size = op.integers(0)[0]
    period = size if op.attribute("periodic", 1) else size - 1
    # The formula for a symmetric window of one element is 0/0: runtimes return the first value.
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
    """Triangles of height 1 over the bins of a spectrum, ``[dft_length / 2 + 1, num_mel_bins]``, placed as in the standard."""
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


@translates("DFT")
def dft(op: Call) -> Any:
    axis = op.attribute("axis", 1) if op.opset < 20 else op.known_integers(2, [-2])[0]
    axis %= op.rank()
    x, given = op.tensor(), _number(op, 1)
    inverse, onesided = bool(op.attribute("inverse", 0)), bool(op.attribute("onesided", 0))
    if inverse and onesided:
        length = 2 * (op.extents()[axis] - 1) if given is None else given
        return torch.unsqueeze(torch.fft.irfft(_complex(op, x), length, axis), -1)
    length = op.extents()[axis] if given is None else given
    transform = torch.fft.ifft if inverse else torch.fft.fft
    spectrum = torch.view_as_real(torch.resolve_conj(transform(_complex(op, x), length, axis)))
    return torch.narrow(spectrum, axis, 0, length // 2 + 1) if onesided else spectrum


@translates("STFT")
def stft(op: Call) -> Any:
    (step,), given = op.integers(1), _number(op, 3)
    extent = op.extents()[1]
    length = given if given is not None else op.extents(2)[0] if op.has(2) else extent
    # Windows of the signal along a new last axis: [batch, frames, parts, length].
    frames = torch.transpose(op.tensor().unfold(1, length, step), 2, 3)
    if op.has(2):
        frames = frames * torch.unsqueeze(op.tensor(2), 1)
    spectrum = torch.view_as_real(torch.fft.fft(_complex(op, frames), length, 2))
    return torch.narrow(spectrum, 2, 0, length // 2 + 1) if op.attribute("onesided", 1) else spectrum


def _number(op: Call, index: int) -> Any:
    return op.integers(index)[0] if op.has(index) else None


def _complex(op: Call, x: Any) -> Any:
    """Return complex numbers whose parts are the last axis; numbers with one part are real."""
    parts = op.extents()[-1]
    if not isinstance(parts, int):
        raise NotKnownYet
    return torch.view_as_complex(x.contiguous()) if parts == 2 else torch.squeeze(x, -1)
