"""Devices by name, the capabilities of their processors, and PyTorch's settings while a graph runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from burnish.errors import EngineError


def device_of(name: object, refusal: str = "The torch engine cannot use the device") -> torch.device:
    """Return the device of a name, after PyTorch has computed on it.

    Args:
        name: a name such as ``cpu``, ``cuda`` or ``cuda:1``.
        refusal: start of an error message, before the name.

    Raises:
        EngineError: PyTorch does not know or have the device, or cannot compute on it; or ``name`` is not a string.
    """
    if not isinstance(name, str | torch.device):
        raise EngineError(f"{refusal} {name!r}: it is no name. Give one, such as 'cpu', 'cuda' or 'cuda:1', or leave device out")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).add(1).item()
    except Exception as error:  # PyTorch raises all kinds of errors, even for missing modules
        raise EngineError(f"{refusal} '{name}': {_reason(error)}. Leave device out for the CPU") from error
    if device.type == "cpu" and device.index:
        raise EngineError(f"{refusal} '{name}': the CPU is one device. Leave device out for it")
    return torch.device("cpu") if device.type == "cpu" else device


def _reason(error: Exception) -> str:
    text = str(error)
    if not text or isinstance(error, ImportError | NotImplementedError) or "INTERNAL ASSERT" in text:
        return f"PyTorch {torch.__version__} as it is installed here does not have it"
    return text.splitlines()[0].split(". ")[0].rstrip(".")


def has_narrow_vectors() -> bool:
    """True if the processor has vectors of bfloat16, on which the kernels were measured, but no tiles, with which oneDNN wins."""
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def has_wide_vectors() -> bool:
    """True if the processor has vectors of at least eight float32."""
    return torch.cpu._is_avx2_supported() or torch.cpu._is_avx512_supported()


@contextmanager
def tensor_float(enabled: bool) -> Iterator[None]:
    """Allow or forbid TF32 during the block; PyTorch's setting is global, and is restored."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32, convolution.allow_tf32 = enabled, enabled
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before


@contextmanager
def cuda_settings(tf32: bool, measured: bool) -> Iterator[None]:
    """Apply settings during the block; PyTorch's settings are global, and are restored.

    Args:
        tf32: True allows TF32 for products of float32 matrices and for convolutions.
        measured: True lets cuDNN time its algorithms for each size of a convolution, and take the fastest; otherwise it uses a
            heuristic.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = measured
    try:
        with tensor_float(tf32):
            yield
    finally:
        cudnn.benchmark = before
