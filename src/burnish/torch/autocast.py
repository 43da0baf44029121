"""Automatic mixed precision: the effect of ``torch.autocast`` on a graph.

Under autocast a graph uses its own form of mixed precision (``burnish.MixedPrecision``): products in the dtype of autocast;
statistics, sums and gradients of parameters in float32. Its outputs keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from burnish.rewriting.precision import MixedPrecision

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def autocast_precision(device: str) -> str | None:
    """Return the name of autocast's dtype on a device; None if autocast is off."""
    return NAMES.get(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def autocast_off(device: str, precision: str | None) -> AbstractContextManager[object]:
    """Return the context to run a graph in: autocast is off, because the graph has its own casts."""
    return torch.autocast(device, enabled=False) if precision else nullcontext()


@contextmanager
def all_autocast_off() -> Iterator[None]:
    """Turn autocast off on every device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
        yield


def precision_of(name: str | None) -> MixedPrecision | None:
    """Return a graph's precision under autocast. It does not scale the loss: ``torch.amp.GradScaler`` does."""
    return None if name is None else MixedPrecision(name, loss_scale=None)


def cast_input(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Cast an input to the dtype of its graph; code before the graph may compute in another dtype under autocast."""
    return tensor.to(dtype) if tensor.is_floating_point() and dtype is not None else tensor
