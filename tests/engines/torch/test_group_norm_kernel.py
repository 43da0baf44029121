"""The kernels of group and instance normalization with their activation, beside float64, in every layout, on 1 to 3 threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from burnish.engines.torch import native as kernels
from oracles.combinations import diagonal

needs_kernels = pytest.mark.skipif(not kernels.available("group_norm"), reason="needs the engine's kernels")

ACTIVATIONS: dict[str, tuple[int, float, Callable[[torch.Tensor], torch.Tensor]]] = {
    "none": (0, 0.0, lambda z: z),
    "relu": (1, 0.0, torch.relu),
    "clipped": (2, 1.5, lambda z: torch.clamp(z, 0.0, 1.5)),
    "silu": (3, 0.0, functional.silu),
}
# [N, C, ...], groups (0: one for each channel), channels last.
CASES = [
    ((3, 32, 40, 41), 0, True),
    ((3, 32, 40, 41), 8, True),
    ((2, 7, 13, 9), 0, True),
    ((5, 24, 1, 1), 3, True),
    ((3, 12, 24, 25), 0, False),
    ((3, 12, 24, 25), 4, False),
    ((2, 6, 1000), 0, False),
    ((2, 6, 1000), 1, False),
    ((2, 4, 7, 8, 9), 2, False),
    ((1, 3, 200, 300), 0, True),
]


def worst(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def operands(shape: tuple[int, ...], last: bool, mean: float = 0.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape) + shape[1])
    layout = torch.channels_last if last else torch.contiguous_format
    x, dy = (torch.randn(shape, generator=generator).contiguous(memory_format=layout) for _ in range(2))
    scale, bias = torch.rand(shape[1], generator=generator) + 0.5, torch.randn(shape[1], generator=generator)
    return [x + mean, dy, scale, bias]


def in_float64(
    tensors: list[torch.Tensor], groups: int, activation: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """y, and the gradients of x, scale and bias."""
    x, dy, scale, bias = (tensor.double() for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in (x, scale, bias)]
    y = activation(functional.group_norm(x, groups or x.shape[1], scale, bias, eps=1e-5))
    y.backward(dy)
    return y.detach(), *(leaf.grad for leaf in leaves)


@needs_kernels
@diagonal((("shape", "groups", "last"), CASES), ("activation", list(ACTIVATIONS)))
def test_layers_and_their_gradients_keep_their_digits(shape, groups, last, activation, threads):
    kind, limit, function = ACTIVATIONS[activation]
    for mean in (0.0, 1000.0):
        tensors = operands(shape, last, mean)
        if shape[2:] == (1, 1) and mean:
            continue  # a few numbers a group, far from zero: their deviation itself has few digits
        x, dy, scale, bias = tensors
        exact = in_float64(tensors, groups, function)
        y, *statistics = torch.ops.burnish.group_norm(x, scale, bias, groups, 1e-5, kind, limit)
        gradients = torch.ops.burnish.group_norm_gradient(dy, x, scale, bias, *statistics, groups, kind, limit)
        layout = torch.channels_last if last else torch.contiguous_format
        assert y.is_contiguous(memory_format=layout)
        assert gradients[0].is_contiguous(memory_format=layout)
        for name, found, expected in zip(("y", "dx", "dscale", "dbias"), (y, *gradients), exact, strict=True):
            assert worst(found, expected) < 6e-7, f"{name} at mean {mean:g}"
        again = torch.ops.burnish.group_norm_gradient(dy, x, scale, bias, *statistics, groups, kind, limit)
        assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))


@needs_kernels
def test_the_gradient_may_come_in_another_layout():
    x, dy, scale, bias = operands((2, 16, 9, 11), True)
    _, *statistics = torch.ops.burnish.group_norm(x, scale, bias, 4, 1e-5, 3, 0.0)
    one = torch.ops.burnish.group_norm_gradient(dy, x, scale, bias, *statistics, 4, 3, 0.0)
    other = torch.ops.burnish.group_norm_gradient(dy.contiguous(), x, scale, bias, *statistics, 4, 3, 0.0)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@needs_kernels
@pytest.mark.parametrize("last", [True, False])
def test_constant_groups_are_their_bias(last):
    x, dy, scale, bias = operands((2, 6, 30, 31), last)
    x[:, :3] = 3.7
    y, *statistics = torch.ops.burnish.group_norm(x, scale, bias, 2, 1e-5, 0, 0.0)
    assert torch.equal(y[:, :3], bias[:3, None, None].expand(2, 3, 30, 31))
    dx, *_ = torch.ops.burnish.group_norm_gradient(dy, x, scale, bias, *statistics, 2, 0, 0.0)
    q = (dy * scale[:, None, None]).double()[:, :3]
    expected = (q - q.mean((1, 2, 3), keepdim=True)) / 1e-5**0.5
    assert worst(dx[:, :3], expected) < 1e-6


@needs_kernels
def test_channels_unlike_each_other_share_the_statistics_of_their_group():
    x, dy, scale, bias = operands((2, 8, 20, 20), True)
    x += torch.arange(8.0)[:, None, None] * 100
    exact = in_float64([x, dy, scale, bias], 2, lambda z: z)
    y, *statistics = torch.ops.burnish.group_norm(x, scale, bias, 2, 1e-5, 0, 0.0)
    gradients = torch.ops.burnish.group_norm_gradient(dy, x, scale, bias, *statistics, 2, 0, 0.0)
    for found, expected in zip((y, *gradients), exact, strict=True):
        assert worst(found, expected) < 6e-7


@needs_kernels
def test_no_samples_give_no_gradient():
    x, dy, scale, bias = operands((0, 4, 5, 5), True)
    y, *statistics = torch.ops.burnish.group_norm(x, scale, bias, 2, 1e-5, 3, 0.0)
    dx, dscale, dbias = torch.ops.burnish.group_norm_gradient(dy, x, scale, bias, *statistics, 2, 3, 0.0)
    assert y.shape == dx.shape == x.shape
    assert not dscale.any()
    assert not dbias.any()


@needs_kernels
def test_groups_that_do_not_divide_the_channels_are_refused():
    x, _, scale, bias = operands((1, 4, 5, 5), True)
    with pytest.raises(RuntimeError, match="groups that divide the channels"):
        torch.ops.burnish.group_norm(x, scale, bias, 3, 1e-5, 0, 0.0)
