"""The kernels of batch normalization over several workers against float64: any parts of a batch, layouts, dtypes and threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from burnish.engines.torch import native as kernels
from oracles.combinations import diagonal

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")

EPSILON, LIMIT = 1e-5, 1.0
SINGLE, HALF = 2.0**-24, 2.0**-8  # half a unit in the last place of float32 and of bfloat16, relative
OPERATORS = torch.ops.burnish
# Of channels, height and width: one channel, no multiple of a vector, more than the shortest row, and rows of a matrix.
EXTENTS = [(1, 5, 7), (37, 9, 9), (144, 6, 5), (40,)]
PARTS = [[3, 2], [4, 0, 1], [1, 1, 7, 2]]


def images(shape, generator, dtype=torch.float32):
    tensor = torch.randn(shape, generator=generator).to(dtype)
    return tensor.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else tensor


def kernel(name, x):
    """The kernel for the elements of x."""
    return getattr(OPERATORS, name + ("_bfloat16" if x.dtype == torch.bfloat16 else ""))


def run(parts, scale, bias, activation, added=None, flows=None, more=None, keep=False):
    """What the workers of some parts come to: y, statistics, and with ``flows`` dx, dscale, dbias and what is kept."""
    moments, pivots = zip(*(kernel("batch_norm_moments", x)(x) for x in parts), strict=True)
    statistics = OPERATORS.batch_norm_merge(torch.stack(moments), scale, EPSILON)
    count, center, precise, _, _, _, gain = statistics
    nothing = [None] * len(parts)
    ys = [
        kernel("batch_norm_apply", x)(x, pivot, center, gain, bias, other, activation, LIMIT)
        for x, pivot, other in zip(parts, pivots, added or nothing, strict=True)
    ]
    if flows is None:
        return ys, statistics
    masks = [(y, None, None) if added else (None, gain, bias) for y in ys]
    found = [
        kernel("batch_norm_gradient_sums", x)(dy, x, pivot, center, *mask, rest, activation, LIMIT, keep)
        for dy, x, pivot, mask, rest in zip(flows, parts, pivots, masks, more or nothing, strict=True)
    ]
    total = torch.stack([sums for sums, _ in found]).sum(0)
    slope, offset, dscale, dbias = OPERATORS.batch_norm_gradient_merge(total, count, precise, scale)
    inputs = []
    for dy, x, pivot, (y, _, offsets), (_, kept) in zip(flows, parts, pivots, masks, found, strict=True):
        operands = (kept, None, None, 0) if keep or more else (dy, y, offsets, activation)
        inputs.append(
            kernel("batch_norm_gradient_apply", x)(
                operands[0], x, pivot, center, gain, slope, offset, *operands[1:3], operands[3], LIMIT
            )
        )
    return ys, statistics, inputs, dscale, dbias, [kept for _, kept in found]


def exactly(x, scale, bias, dy, y, activation):
    """The gradients of x, scale and bias in float64, of the whole batch; the kink is where ``y`` has it."""
    operands = [tensor.double().requires_grad_() for tensor in (x, scale, bias)]
    before = functional.batch_norm(operands[0], None, None, operands[1], operands[2], training=True, eps=EPSILON)
    flow = dy.double()
    if activation:
        flow = flow * (y > 0)
    if activation == 2:
        flow = flow * (y < LIMIT)
    before.backward(flow)
    normalized = functional.batch_norm(x.double(), None, None, training=True, eps=EPSILON)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    terms = (flow * normalized).abs().sum(axes), flow.abs().sum(axes)
    return before.detach(), [operand.grad for operand in operands], terms, flow


@diagonal(
    (("extents", "sizes"), list(itertools.product(EXTENTS, PARTS))),
    ("dtype", [torch.float32, torch.bfloat16]),
    ("activation", [0, 1, 2]),
    ("threads", [1, 2]),
)
def test_parts_come_to_what_the_whole_batch_does(extents, sizes, dtype, activation, threads):
    generator = torch.Generator().manual_seed(sum(extents))
    x, dy, added, more = (images((sum(sizes), *extents), generator, dtype) for _ in range(4))
    channels = extents[0]
    scale, bias = torch.rand(channels, generator=generator) + 0.5, torch.randn(channels, generator=generator)
    rounding = HALF if dtype == torch.bfloat16 else 4 * SINGLE
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for other, rest in itertools.product((None, added), (None, more)):
            parted = [None if tensor is None else tensor.split(sizes) for tensor in (x, other, dy, rest)]
            ys, statistics, inputs, dscale, dbias, kept = run(
                parted[0], scale, bias, activation, *parted[1:], keep=activation > 0
            )
            y, dx = torch.cat(ys), torch.cat(inputs)
            total = dy if rest is None else (dy.float() + rest.float()).to(dtype)
            # Without something added the kink is where the result has it before it is rounded.
            decided = y if other is not None else torch.cat(run(x.float().split(sizes), scale, bias, activation)[0])
            exact, gradients, terms, flow = exactly(x, scale, bias, total, decided, activation)
            exact = exact if other is None else exact + other.double()
            spread = exact.abs().max().item() + 1
            exact = (exact, exact.relu(), exact.clamp(0, LIMIT))[activation]
            assert y.dtype == dx.dtype == dtype
            assert (y.double() - exact).abs().max() <= rounding * spread
            axes = [axis for axis in range(x.ndim) if axis != 1]
            variance, mean = torch.var_mean(x.double(), axes, correction=0)
            assert statistics[0].item() == x.numel() / channels
            torch.testing.assert_close(statistics[1], mean, rtol=0, atol=2e-7)
            torch.testing.assert_close(statistics[5].double(), variance, rtol=1e-6, atol=1e-7)
            gain = statistics[6].double().view(1, -1, *[1] * (x.ndim - 2))
            assert ((dx.double() - gradients[0]).abs() <= 2 * rounding * (gradients[0].abs() + gain * total.abs().max())).all()
            for found, expected, magnitude in zip((dscale, dbias), gradients[1:], terms, strict=True):
                assert ((found.double() - expected).abs() <= 8 * SINGLE * magnitude + 1e-30).all()
            if activation or rest is not None:
                assert torch.equal(torch.cat(kept).double(), flow)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("activation", [1, 2])
def test_a_mask_from_x_is_that_of_the_result(activation):
    """The gradient is the same bits whether it finds the layer's result, or computes it again."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (images((6, 24, 9, 9), generator) for _ in range(2))
    scale, bias = torch.rand(24, generator=generator) + 0.5, torch.randn(24, generator=generator)
    zeros = torch.zeros_like(x)
    again = run([x], scale, bias, activation, flows=[dy])
    found = run([x], scale, bias, activation, added=[zeros], flows=[dy])
    kept = run([x], scale, bias, activation, flows=[dy], keep=True)
    for other in (found, kept):
        for one, two in zip((again[2][0], *again[3:5]), (other[2][0], *other[3:5]), strict=True):
            assert torch.equal(one, two)


def test_layouts_and_views_give_the_same_bits():
    generator = torch.Generator().manual_seed(2)
    x, dy, added = (images((3, 24, 10, 11), generator) for _ in range(3))
    scale, bias = torch.rand(24, generator=generator) + 0.5, torch.randn(24, generator=generator)
    padded = torch.zeros(3, 24, 12, 13)
    padded[:, :, 1:11, 1:12] = x
    strided = torch.stack([scale, scale], 1)[:, 0]
    expected = run([x, x], scale, bias, 1, added=[added, added], flows=[dy, dy], keep=True)
    inner = padded[:, :, 1:11, 1:12]
    found = run(
        [x.contiguous(), inner], strided, bias, 1, added=[added.contiguous(), added], flows=[dy, dy.contiguous()], keep=True
    )
    for one, other in zip(expected, found, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("ratio", [1e2, 1e4])
def test_a_large_mean_costs_no_digits(ratio):
    """Means of ``ratio`` standard deviations, and parts whose means differ by some of them."""
    generator = torch.Generator().manual_seed(3)
    x = images((12, 16, 12, 12), generator) + ratio
    x[:5] += 3
    dy = images(x.shape, generator)
    scale, bias = torch.ones(16), torch.zeros(16)
    ys, statistics, inputs, *_ = run(x.split([5, 0, 7]), scale, bias, 0, flows=dy.split([5, 0, 7]))
    expected, gradients, _, _ = exactly(x, scale, bias, dy, None, 0)
    variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert (torch.cat(ys).double() - expected).norm() / expected.norm() < 2e-7
    assert (torch.cat(inputs).double() - gradients[0]).norm() / gradients[0].norm() < 2e-7
    torch.testing.assert_close(statistics[1], mean, rtol=1e-10, atol=1e-7)
    torch.testing.assert_close(statistics[5].double(), variance, rtol=1e-6, atol=0)


def test_no_samples_at_all():
    x = images((0, 8, 4, 4), torch.Generator())
    ys, statistics, inputs, dscale, dbias, _ = run([x, x], torch.ones(8), torch.zeros(8), 1, flows=[x, x])
    assert [tuple(result.shape) for result in (*ys, *inputs)] == [(0, 8, 4, 4)] * 4
    count, center, _, mean, _, variance, _ = statistics
    assert not any(tensor.any() for tensor in (count, center, mean, variance, dscale, dbias))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_channel_on_every_worker(value):
    x, dy = (images((5, 24, 7, 7), torch.Generator().manual_seed(4)) for _ in range(2))
    x[1, 5, 3, 3] = value
    ys, _, inputs, *_ = run(x.split([2, 3]), torch.ones(24), torch.zeros(24), 0, flows=dy.split([2, 3]))
    broken = torch.zeros(24, dtype=torch.bool)
    broken[5] = True
    for result in (*ys, *inputs):
        assert torch.equal(result.isnan().any(3).any(2).any(0), broken)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, c: OPERATORS.batch_norm_apply(x, c, c, c, c, None, 0, 0.0),
            r"center: a vector with the values and of the type that its channels need expected",
        ),
        (
            lambda x, c: OPERATORS.batch_norm_apply(x, c, c.double(), c[1:], c, None, 0, 0.0),
            r"batch_norm_apply: gain: a vector with the values",
        ),
        (
            lambda x, c: OPERATORS.batch_norm_gradient_sums(x[:1], x, c, c.double(), None, None, None, None, 0, 0.0, False),
            r"batch_norm_gradient_sums: dy: the shape and the type of x expected",
        ),
        (
            lambda x, c: OPERATORS.batch_norm_gradient_sums(x, x, c, c.double(), None, None, c, None, 1, 0.0, False),
            r"batch_norm_gradient_sums: y, or gain and bias, expected",
        ),
        (
            lambda x, c: OPERATORS.batch_norm_gradient_apply(x, x, c, c.double(), c, c, c, None, None, 1, 0.0),
            r"batch_norm_gradient_apply: y or the bias expected",
        ),
        (
            lambda x, c: OPERATORS.batch_norm_merge(c.view(1, -1), c, EPSILON),
            r"batch_norm_merge: moments of several parts in float64 expected",
        ),
        (
            lambda x, c: OPERATORS.batch_norm_gradient_merge(c, c.double(), c.double(), c),
            r"batch_norm_gradient_merge: total: a vector with the values",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.zeros(2, 8, 3, 3), torch.zeros(8))
