"""What the processor multiplies with, where the engine's own kernels depend on it."""

from __future__ import annotations

import torch


def has_narrow_vectors() -> bool:
    """Whether it has vectors of bfloat16, on which the kernels were measured, but no tiles, with which oneDNN wins."""
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def has_wide_vectors() -> bool:
    """Whether it has vectors of at least eight float32."""
    return torch.cpu._is_avx2_supported() or torch.cpu._is_avx512_supported()
