"""TensorFloat-32: products of float32 matrices and images with 10 bits of mantissa, much faster on GPUs since Ampere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_float(enabled: bool) -> Iterator[None]:
    """Allow or forbid TF32 within; PyTorch's setting is of the whole process, and is put back."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32, convolution.allow_tf32 = enabled, enabled
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before
