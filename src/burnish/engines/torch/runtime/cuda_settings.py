"""The settings of PyTorch that graphs on CUDA run under: TF32, and how cuDNN chooses its algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from burnish.engines.torch.runtime.tensor_float import tensor_float


@contextmanager
def cuda_settings(tf32: bool, measured: bool) -> Iterator[None]:
    """Set what holds within; PyTorch's settings are of the whole process, and are put back.

    Args:
        tf32: allow TF32 for products of float32 matrices and for convolutions.
        measured: let cuDNN time its algorithms for each size of a convolution, and take the fastest; else it guesses.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = measured
    try:
        with tensor_float(tf32):
            yield
    finally:
        cudnn.benchmark = before
