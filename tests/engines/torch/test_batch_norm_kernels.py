"""The kernels of batch normalization and its gradient against float64: sizes, layouts, dtypes, threads, what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from burnish.engines.torch import native as kernels
from oracles.combinations import diagonal

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")

ACTIVATIONS = {0: lambda y: y, 1: torch.relu, 2: lambda y: torch.clamp(y, 0, 1)}
LIMIT = 1.0
SINGLE, HALF = 2.0**-24, 2.0**-8  # half a unit in the last place of float32 and of bfloat16, relative
# One channel, fewer than a vector, no multiple of a vector, more than the shortest row; images of which elements fill no row.
SIZES = [(3, 1, 5, 7), (2, 3, 17, 19), (5, 24, 13, 13), (2, 37, 9, 9), (3, 144, 6, 5), (4, 1001, 3, 3), (700, 40), (1, 96, 1, 2)]


def images(shape, generator, dtype=torch.float32):
    tensor = torch.randn(shape, generator=generator).to(dtype)
    return tensor.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else tensor


def kernel(name, x):
    """The kernel for the elements of x."""
    return getattr(torch.ops.burnish, name + ("_bfloat16" if x.dtype == torch.bfloat16 else ""))


def run(x, scale, bias, added, dy, activation, keep=False, more=None):
    """Results of both kernels; the gradient reads y where something was added, and the bias where nothing was."""
    forward = kernel("batch_norm_training", x)(x, scale, bias, added, 1e-5, activation, LIMIT)
    y = forward[0] if added is not None else None
    backward = kernel("batch_norm_gradient", x)(
        dy, x, scale, forward[2], forward[4], y, more, None if y is not None else bias, activation, LIMIT, keep
    )
    return forward, backward


def exactly(x, scale, bias, added, dy, activation, y=None):
    """In float64, with the sums of the magnitudes that the parameters' gradients add up, and the largest value before the
    activation, which rounding goes by. The kink is where ``y`` has it."""
    operands = [tensor.double().requires_grad_() for tensor in (x, scale, bias)]
    axes = [axis for axis in range(x.ndim) if axis != 1]
    before = functional.batch_norm(operands[0], None, None, operands[1], operands[2], training=True, eps=1e-5)
    before = before if added is None else before + added.double()
    decided = before.detach() if y is None else y.double()
    flow = dy.double()
    if activation:
        flow = flow * (decided > 0)
    if activation == 2:
        flow = flow * (decided < LIMIT)
    before.backward(flow)
    normalized = functional.batch_norm(x.double(), None, None, training=True, eps=1e-5)
    terms = (flow * normalized).abs().sum(axes), flow.abs().sum(axes)
    before = before.detach()
    return ACTIVATIONS[activation](before), [operand.grad for operand in operands], terms, flow, before.abs().max().item()


def far_from_kinks(before, gap):
    return min(before.abs().min().item(), (before - LIMIT).abs().min().item()) > gap


@diagonal(("shape", SIZES), ("dtype", [torch.float32, torch.bfloat16]), ("activation", [0, 1, 2]), ("threads", [1, 2]))
def test_any_size_agrees_with_float64(shape, dtype, activation, threads):
    generator = torch.Generator().manual_seed(shape[1])
    x, dy, added = (images(shape, generator, dtype) for _ in range(3))
    scale, bias = torch.rand(shape[1], generator=generator) + 0.5, torch.randn(shape[1], generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for other in (None, added):
            forward, backward = run(x, scale, bias, other, dy, activation, keep=True)
            result = forward[0] if other is not None else None
            y, gradients, terms, flow, largest = exactly(x, scale, bias, other, dy, activation, result)
            rounding = HALF if dtype == torch.bfloat16 else 4 * SINGLE
            spread = largest + 1  # not of what a limit leaves: its digits are those of what was added up
            assert (forward[0].double() - y).abs().max() <= rounding * spread
            near = 8 * SINGLE * spread  # of a kink, where the mask may fall on either side
            if (
                other is None
                and activation
                and not far_from_kinks(
                    functional.batch_norm(x.double(), None, None, scale.double(), bias.double(), training=True, eps=1e-5), near
                )
            ):
                continue
            assert backward[0].dtype == backward[3].dtype == dtype or not backward[3].numel()
            # The three terms of dx may cancel, each of which is at most a channel's gain times the largest dy or its kin.
            gain = (scale * forward[2]).double().view(1, -1, *[1] * (x.ndim - 2))
            assert (
                (backward[0].double() - gradients[0]).abs() <= 2 * rounding * (gradients[0].abs() + gain * dy.abs().max())
            ).all()
            for found, expected, magnitude in zip(backward[1:3], gradients[1:], terms, strict=True):
                assert ((found.double() - expected).abs() <= 8 * SINGLE * magnitude + 1e-30).all()
            if activation:
                assert torch.equal(backward[3].double(), flow)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_and_views_give_the_same_bits(dtype):
    generator = torch.Generator().manual_seed(1)
    x, dy, added = (images((3, 24, 10, 11), generator, dtype) for _ in range(3))
    scale, bias = torch.rand(24, generator=generator) + 0.5, torch.randn(24, generator=generator)
    expected = run(x, scale, bias, added, dy, 1, keep=True)
    padded = torch.zeros(3, 24, 12, 13, dtype=dtype)
    padded[:, :, 1:11, 1:12] = x
    strided = torch.stack([scale, scale], 1)[:, 0]
    for found in (
        run(x.contiguous(), scale, bias, added.contiguous(), dy.contiguous(), 1, keep=True),
        run(padded[:, :, 1:11, 1:12], strided, bias, added, dy, 1, keep=True),
    ):
        for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
            assert torch.equal(one, other)


def test_a_pilot_unlike_the_other_rows_costs_no_digits():
    """The rows that the pilot is taken from are those of one image in 16: here they lie far from all others."""
    x = torch.randn(64, 32, 16, 16, generator=torch.Generator().manual_seed(2)).contiguous(memory_format=torch.channels_last)
    rows = x.permute(0, 2, 3, 1).reshape(-1, 32)
    rows[:: len(rows) // 16] += 3e4
    x = rows.reshape(64, 16, 16, 32).permute(0, 3, 1, 2)
    y, mean, _, variance, _ = torch.ops.burnish.batch_norm_training(x, torch.ones(32), torch.zeros(32), None, 1e-5, 0, 0.0)
    exact = x.double()
    torch.testing.assert_close(variance.double(), exact.var((0, 2, 3), correction=0), rtol=1e-6, atol=0)
    torch.testing.assert_close(mean.double(), exact.mean((0, 2, 3)), rtol=1e-6, atol=0)
    expected = functional.batch_norm(exact, None, None, training=True, eps=1e-5)
    assert (y.double() - expected).norm() / expected.norm() < 2e-7


def test_a_constant_channel_is_its_bias():
    x = torch.full((4, 16, 9, 9), 12345.678).contiguous(memory_format=torch.channels_last)
    bias = torch.randn(16)
    y, mean, _, variance, _ = torch.ops.burnish.batch_norm_training(x, torch.ones(16), bias, None, 1e-5, 0, 0.0)
    assert torch.equal(y, bias.view(1, 16, 1, 1).expand_as(y))
    assert torch.equal(mean, torch.full((16,), 12345.678))
    assert not variance.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_channel_alone(value, activation, dtype):
    x, dy = (images((3, 24, 7, 7), torch.Generator().manual_seed(3), dtype) for _ in range(2))
    x[1, 5, 3, 3] = value
    forward, backward = run(x, torch.ones(24), torch.zeros(24), None, dy, activation)
    broken = torch.zeros(24, dtype=torch.bool)
    broken[5] = True
    assert torch.equal(forward[0].isnan().any(3).any(2).any(0), broken)
    assert torch.equal(forward[3].isnan(), broken)
    assert torch.equal(backward[0].isnan().any(3).any(2).any(0), broken)


def test_bfloat16_is_rounded_to_the_nearest_with_ties_to_even():
    """With unit gain the result is the sum of a normalized and an added value; it is rounded as PyTorch rounds."""
    x, added = (images((4, 24, 9, 9), torch.Generator().manual_seed(4), torch.bfloat16) for _ in range(2))
    scale, bias = torch.ones(24), torch.zeros(24)
    narrow = torch.ops.burnish.batch_norm_training_bfloat16(x, scale, bias, added, 1e-5, 1, 0.0)
    wide = torch.ops.burnish.batch_norm_training(x.float(), scale, bias, added.float(), 1e-5, 1, 0.0)
    assert narrow[0].dtype == torch.bfloat16
    assert torch.equal(narrow[0], wide[0].bfloat16())
    for one, other in zip(narrow[1:], wide[1:], strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_gradients_of_two_branches_in_bfloat16_are_rounded_once_summed():
    generator = torch.Generator().manual_seed(5)
    x, one, other, added = (images((3, 24, 9, 9), generator, torch.bfloat16) for _ in range(4))
    scale, bias = torch.rand(24) + 0.5, torch.randn(24)
    _, apart = run(x, scale, bias, added, one, 1, keep=True, more=other)
    _, summed = run(x, scale, bias, added, one + other, 1, keep=True)
    for found, expected in zip(apart, summed, strict=True):
        assert torch.equal(found, expected)


def test_no_element_has_no_statistics():
    x = torch.empty(0, 8, 4, 4)
    forward, backward = run(x, torch.ones(8), torch.zeros(8), None, x, 1)
    assert forward[0].shape == backward[0].shape == x.shape
    assert forward[1].isnan().all()
    assert not backward[2].any()


def test_what_does_not_fit_is_refused():
    x, scale, bias = torch.randn(2, 8, 4, 4), torch.ones(8), torch.zeros(8)
    with pytest.raises(RuntimeError, match="images or rows of float32 expected"):
        torch.ops.burnish.batch_norm_training(x.double(), scale, bias, None, 1e-5, 0, 0.0)
    with pytest.raises(RuntimeError, match="images or rows of bfloat16 expected"):
        torch.ops.burnish.batch_norm_training_bfloat16(x, scale, bias, None, 1e-5, 0, 0.0)
    with pytest.raises(RuntimeError, match="added: the shape and the type of x expected"):
        torch.ops.burnish.batch_norm_training(x, scale, bias, x[:1], 1e-5, 0, 0.0)
    forward = torch.ops.burnish.batch_norm_training(x, scale, bias, None, 1e-5, 1, 0.0)
    with pytest.raises(RuntimeError, match="dy: the shape and the type of x expected"):
        torch.ops.burnish.batch_norm_gradient(x.bfloat16(), x, scale, forward[2], forward[4], None, None, bias, 1, 0.0, False)
    with pytest.raises(RuntimeError, match="y or the bias expected"):
        torch.ops.burnish.batch_norm_gradient(x, x, scale, forward[2], forward[4], None, None, None, 1, 0.0, False)
