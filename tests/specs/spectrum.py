"""Fourier transforms."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from specs.operator_spec import OperatorSpec, Sample, normal, uniform


def number(value: int) -> np.ndarray:
    return np.array(value, dtype=np.int64)


def dft_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for parts, kind in ((1, "real"), (2, "complex")):
        for inverse in (0, 1):
            direction = f"{kind}{'_inverse' if inverse else ''}"
            for length in (None, 4, 7):
                given = None if length is None else number(length)
                inputs = [normal(rng, 2, 5, parts), given, number(1)]
                name = direction if length is None else f"{direction}_{length}"
                yield Sample(inputs, {"inverse": inverse}, name=name, opset=20)
    for parts, inverse, kind in ((1, 0, "half"), (2, 1, "from_half")):
        for extent in (4, 5):
            # ONNX Runtime reads beyond the part of a half that a shorter length leaves: tests/operators/test_spectrum.py.
            for length in (None, 9, 6 if inverse else 3):
                if inverse and length is not None and length // 2 + 1 < extent:
                    continue
                given = None if length is None else number(length)
                name = f"{kind}_{extent}" if length is None else f"{kind}_{extent}_{length}"
                inputs = [normal(rng, 2, extent, parts), given, number(-2)]
                yield Sample(inputs, {"inverse": inverse, "onesided": 1}, name=name, opset=20)
    yield Sample([normal(rng, 2, 3, 4, 2)], name="default_axis", opset=20)
    yield Sample([normal(rng, 3, 2, 4, 2), None, number(0)], name="first_axis", opset=20)
    lengths = [normal(rng, 2, 4, 3, 1), number(6), number(-3)]
    yield Sample(lengths, {"onesided": 1}, name="length_at_run_time", opset=20, constants=(2,))
    yield Sample([normal(rng, 1, 1)], name="single", opset=20, batched=())


def dft_axis_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """An axis, and a length, that are known only when the graph runs."""
    for axis in (1, -3):
        for length in (None, 4, 7):
            given = None if length is None else number(length)
            name = f"axis_at_run_time_{axis}" if length is None else f"axis_at_run_time_{axis}_{length}"
            yield Sample([normal(rng, 2, 5, 3, 1), given, number(axis)], name=name, opset=20, constants=())
    half = [normal(rng, 2, 5, 3, 2), number(9), number(1)]
    yield Sample(half, {"inverse": 1, "onesided": 1}, name="axis_at_run_time_from_half", opset=20, constants=())


def dft_attribute_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Before opset 20 the axis is an attribute, and the first signal axis by default."""
    yield Sample([normal(rng, 2, 5, 1)], name="axis_attribute", newest_opset=False)
    yield Sample([normal(rng, 2, 3, 4, 2), number(6)], {"axis": 2, "inverse": 1}, name="axis_attribute_2", newest_opset=False)
    yield Sample([normal(rng, 2, 6, 1)], {"onesided": 1, "axis": -2}, name="axis_attribute_half", newest_opset=False)
    inputs = [normal(rng, 2, 4, 2), number(7)]
    yield Sample(inputs, {"onesided": 1, "inverse": 1}, name="axis_attribute_from_half", newest_opset=False)


def torch_dft(
    x: torch.Tensor,
    length: torch.Tensor | None = None,
    axis: torch.Tensor | int | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> torch.Tensor:
    axis = (-2 if axis is None else int(axis)) % x.dim()
    size = None if length is None else int(length)
    signal = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)
    if inverse and onesided:
        return torch.fft.irfft(signal, size, axis).unsqueeze(-1)
    transform = torch.fft.ifft if inverse else torch.fft.rfft if onesided else torch.fft.fft
    return torch.view_as_real(transform(signal, size, axis).resolve_conj())


def torch_dft_attribute(x: torch.Tensor, length: torch.Tensor | None = None, *, axis: int = 1, **attributes) -> torch.Tensor:
    return torch_dft(x, length, axis, **attributes)


def stft_samples(rng: np.random.Generator) -> Iterator[Sample]:
    step, half = number(3), {"onesided": 1}
    for window in (4, 5):
        for onesided in (0, 1):
            inputs = [normal(rng, 2, 12, 1), step, uniform(rng, 0.2, 1, window)]
            yield Sample(inputs, {"onesided": onesided}, name=f"window_{window}_{onesided}")
    yield Sample([normal(rng, 2, 11, 1), number(2), uniform(rng, 0.2, 1, 4), number(4)], half, name="window_and_length")
    yield Sample([normal(rng, 2, 11, 1), number(2), None, number(4)], half, name="length")
    yield Sample([normal(rng, 2, 10, 2), step, uniform(rng, 0.2, 1, 4)], {"onesided": 0}, name="complex")
    at_run_time = [normal(rng, 2, 11, 1), number(2), uniform(rng, 0.2, 1, 4), number(4)]
    yield Sample(at_run_time, half, name="at_run_time", constants=())


def torch_stft(
    signal: torch.Tensor,
    step: torch.Tensor,
    window: torch.Tensor | None = None,
    length: torch.Tensor | None = None,
    *,
    onesided: int = 1,
) -> torch.Tensor:
    size = int(length) if length is not None else signal.shape[1] if window is None else window.shape[0]
    signal = torch.view_as_complex(signal.contiguous()) if signal.shape[-1] == 2 else signal.squeeze(-1)
    spectrum = torch.stft(signal, size, int(step), size, window, center=False, onesided=bool(onesided), return_complex=True)
    return torch.view_as_real(spectrum.transpose(1, 2))


FLOAT32_ANGLES = 2e-7
"""ONNX Runtime's transform of a length that is no power of two takes its angles from float32, in float64 too."""

SPECS = [
    OperatorSpec("DFT", dft_samples, torch=torch_dft, float64_tolerance=FLOAT32_ANGLES),
    OperatorSpec("DFT", dft_axis_samples, torch=torch_dft, float64_tolerance=FLOAT32_ANGLES),
    OperatorSpec("DFT", dft_attribute_samples, torch=torch_dft_attribute, float64_tolerance=FLOAT32_ANGLES),
    OperatorSpec("STFT", stft_samples, torch=torch_stft, float64_tolerance=FLOAT32_ANGLES),
]
