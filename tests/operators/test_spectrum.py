"""What the table of Fourier transforms cannot say."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from numpy.testing import assert_allclose

import burnish
from burnish import engines


def gradients(text: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return engines.get("onnxruntime").load(burnish.grad(onnx.parser.parse_model(text), "x"))(feeds)


def test_a_shorter_inverse_of_a_half_reads_the_lowest_frequencies() -> None:
    """By the standard's text and NumPy. ONNX Runtime reads the first values of a whole spectrum, which is another result."""
    model = """<ir_version: 9, opset_import: ["": 20]> g (double[2,5,2] x) => (double[2,4,1] y)
        <int64 length = {4}, int64 axis = {1}> { y = DFT <inverse = 1, onesided = 1> (x, length, axis) }"""
    rng = np.random.default_rng(0)
    x, dy = torch.from_numpy(rng.standard_normal((2, 5, 2))).requires_grad_(), rng.standard_normal((2, 4, 1))
    torch.fft.irfft(torch.view_as_complex(x), 4, 1).unsqueeze(-1).backward(torch.from_numpy(dy))
    result = gradients(model, {"x": x.detach().numpy(), "cotangent:y": dy})
    assert_allclose(result["grad:x"], x.grad.numpy(), atol=1e-7)


def test_a_real_signal_may_come_without_its_last_axis() -> None:
    """ONNX Runtime takes it so, and exporters write it (the features of onnx-asr); the standard and its evaluator do not."""
    model = """<ir_version: 9, opset_import: ["": 17]> g (float[B,12] x) => (float[B,F,K,2] y)
        <int64 step = {3}, float[4] window = {0.5, 1, 1, 0.5}> { y = STFT <onesided = 1> (x, step, window) }"""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 12)).astype(np.float32), rng.standard_normal((2, 3, 3, 2)).astype(np.float32)
    signal, window = torch.from_numpy(x).requires_grad_(), torch.tensor([0.5, 1, 1, 0.5])
    spectrum = torch.stft(signal, 4, 3, 4, window, center=False, return_complex=True)
    torch.view_as_real(spectrum.transpose(1, 2)).backward(torch.from_numpy(dy))
    gradient = burnish.grad(onnx.parser.parse_model(model), "x")
    for name in ("onnxruntime", "torch", "reference"):
        result = engines.get(name).load(gradient)({"x": x, "cotangent:y": dy})
        assert_allclose(result["y"], torch.view_as_real(spectrum.transpose(1, 2)).detach().numpy(), atol=1e-5)
        assert_allclose(result["grad:x"], signal.grad.numpy(), atol=1e-5)


def test_frames_have_half_their_spectrum_by_default() -> None:
    """The standard's inference takes the whole one for the default of ``onesided``."""
    model = """<ir_version: 9, opset_import: ["": 17]> g (float[B,12,1] x) => (float[B,F,K,2] y)
        <int64 step = {3}, float[4] window = {0.5, 1, 1, 0.5}> { y = STFT (x, step, window) }"""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 12, 1)).astype(np.float32), rng.standard_normal((2, 3, 3, 2)).astype(np.float32)
    signal, window = torch.from_numpy(x).requires_grad_(), torch.tensor([0.5, 1, 1, 0.5])
    spectrum = torch.stft(signal.squeeze(-1), 4, 3, 4, window, center=False, return_complex=True)
    torch.view_as_real(spectrum.transpose(1, 2)).backward(torch.from_numpy(dy))
    result = gradients(model, {"x": x, "cotangent:y": dy})
    assert result["y"].shape == (2, 3, 3, 2)
    assert_allclose(result["grad:x"], signal.grad.numpy(), atol=1e-5)
