"""Every kernel that a step calls, called again with operands that lie otherwise in memory: what they hold is what counts.

Graphs hand on what broadcasts, slices and transpositions make: a bias of one number for all channels has a stride of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import burnish
from burnish.engines.torch import native as kernels
from burnish.models import residual_network
from oracles.combinations import spread
from oracles.small_networks import batch_of, mobile, transformer

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")


def laid_out_otherwise(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same numbers with gaps of NaN between, and with their axes turned in memory."""
    gap = float("nan") if tensor.is_floating_point() else 1
    for axis in {0, tensor.dim() - 1}:
        extents = [2 * extent if index == axis else extent for index, extent in enumerate(tensor.shape)]
        spread = torch.full(extents, gap, dtype=tensor.dtype)
        view = spread[::2] if axis == 0 else spread[..., ::2]
        yield view.copy_(tensor)
    turned = tuple(reversed(range(tensor.dim())))
    yield tensor.permute(turned).contiguous().permute(turned)


class Repetition(TorchDispatchMode):
    """Compares each call of a kernel with calls on the same numbers in other layouts, and on broadcast ones."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator.namespace == "burnish" and not operator._schema.is_mutable:
            self.called.add(operator._opname)
            for index, operand in enumerate(args):
                if isinstance(operand, torch.Tensor) and operand.dim() and operand.numel():
                    self.compare(operator, args, index, operand, result)
        return result

    def compare(self, operator: Any, args: Any, index: int, operand: torch.Tensor, expected: Any) -> None:
        for other in laid_out_otherwise(operand):
            check(operator(*args[:index], other, *args[index + 1 :]), expected, operator, index)
        broadcast = operand[:1].expand(operand.shape)
        results = [operator(*args[:index], each, *args[index + 1 :]) for each in (broadcast, broadcast.contiguous())]
        check(*results, operator, index)


def check(found: Any, expected: Any, operator: Any, index: int) -> None:
    pairs = zip(found, expected, strict=True) if isinstance(expected, (tuple, list)) else [(found, expected)]
    for one, other in pairs:
        if isinstance(other, torch.Tensor) and other.numel():
            scale = float(other.abs().nan_to_num().max())
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-4 * scale, equal_nan=True, msg=lambda text: f"{operator}, operand {index}: {text}"
            )


@needs_kernels
@spread(
    ("network", "operators"),
    [
        (residual_network, {"batch_norm_training", "batch_norm_gradient", "cross_entropy"}),
        (mobile, {"depthwise_convolution", "depthwise_convolution_gradient"}),
        (transformer, {"standardize", "standardize_gradient", "elementwise"}),
    ],
    test=1,
)
def test_kernels_read_operands_wherever_they_lie(network, operators):
    model = network()
    session = burnish.Session(burnish.compile(model, optimizer="sgd"), engine="torch", threads=1)
    batch = batch_of(model)
    session.step(batch)
    with Repetition() as repetition:
        session.step(batch)
        session.evaluate(batch)
    assert operators <= repetition.called
