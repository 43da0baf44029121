"""Automatic mixed precision: what ``torch.autocast`` means for a graph.

Under autocast a graph computes in its own form of mixed precision (``burnish.MixedPrecision``): products in the dtype of
autocast; statistics, sums and gradients of parameters in float32. Its outputs keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from burnish.rewriting.precision import MixedPrecision

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def autocast_precision(device: str) -> str | None:
    """The dtype that autocast computes in on a device, by name; None where it is off."""
    return NAMES.get(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def autocast_off(device: str, precision: str | None) -> AbstractContextManager[object]:
    """The context in which a graph runs: its casts are in it."""
    return torch.autocast(device, enabled=False) if precision else nullcontext()


@contextmanager
def all_autocast_off() -> Iterator[None]:
    """Let PyTorch compute as written, on every device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
        yield


def precision_of(name: str | None) -> MixedPrecision | None:
    """The precision of a graph under autocast; the loss is not scaled: ``torch.amp.GradScaler`` does that."""
    return None if name is None else MixedPrecision(name, loss_scale=None)


def cast_input(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """An input in the dtype of its graph: what comes before it may have computed in another."""
    return tensor.to(dtype) if tensor.is_floating_point() and dtype is not None else tensor
