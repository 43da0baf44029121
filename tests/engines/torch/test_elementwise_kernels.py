"""Fused elementwise arithmetic: its functions and sums against float64, and what layouts and types it reads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from burnish.engines.torch import native as kernels
from burnish.kernels.elementwise.programs import OPERATIONS
from oracles.float32_sums import within_float32

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")
FLOAT, BOOL, BFLOAT16 = 6, 11, 15
FUNCTIONS = {
    "Exp": torch.exp,
    "Log": torch.log,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Sigmoid": torch.sigmoid,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
}


def unary(operation: str, x: torch.Tensor) -> torch.Tensor:
    (y,) = torch.ops.burnish.elementwise([x], [], [OPERATIONS[operation], 1, 0, -1, -1], [FLOAT])
    return y


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("operation", FUNCTIONS)
def test_functions_keep_all_but_the_last_bit(operation):
    """Over floats of all magnitudes and signs, and more closely where the functions vary."""
    every = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    near = torch.linspace(-110, 110, 400_001)
    x = torch.cat(
        [every, near, near / 40, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 88.7228394, 88.723])]
    )
    found, exact = unary(operation, x), FUNCTIONS[operation](x.double())
    rounded = exact.float()
    plain = rounded.isfinite()
    assert torch.equal(found.isnan(), rounded.isnan())
    assert torch.equal(found[~plain & ~rounded.isnan()], rounded[~plain & ~rounded.isnan()])
    unit = torch.from_numpy(np.spacing(np.abs(rounded[plain].numpy()))).double()
    errors = (found[plain].double() - exact[plain]).abs() / unit
    assert errors.max().item() < 2.0, x[plain][errors.argmax()]
    assert torch.equal(found[plain].signbit(), rounded[plain].signbit())


def normal(x: torch.Tensor, density: bool) -> torch.Tensor:
    """The standard normal distribution function, or its density, of one or more elements."""
    places = [2, 1] if density else [1, 2]
    program = [OPERATIONS["Normal"], places[0], 0, places[1], -1]
    (y,) = torch.ops.burnish.elementwise([x], [], program, [FLOAT])
    return y


@pytest.mark.slow
@needs_kernels
def test_the_normal_distribution_keeps_its_digits_far_out():
    """Over floats of all magnitudes and signs, down to where the lower tail has no digits left."""
    every = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    near = torch.linspace(-15, 15, 400_001)
    x = torch.cat([every, near, near / 15, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 14.5, -14.5])])
    wide = x.double()
    exact = {
        False: torch.special.erfc(-wide * math.sqrt(0.5)) / 2,
        True: torch.exp(-wide * wide / 2) / math.sqrt(2 * math.pi),
    }
    for density, wanted in exact.items():
        found = normal(x, density)
        assert torch.equal(found.isnan(), x.isnan())
        plain = ~x.isnan()
        unit = torch.from_numpy(np.spacing(wanted[plain].float().numpy())).double()
        errors = (found[plain].double() - wanted[plain]).abs() / unit
        tail = (x[plain] < -1) if not density else torch.zeros_like(errors, dtype=torch.bool)
        assert errors[~tail].max().item() < (2.0 if density else 3.5), x[plain][~tail][errors[~tail].argmax()]
        assert not tail.any() or errors[tail].max().item() < 8.0, x[plain][tail][errors[tail].argmax()]
    assert normal(torch.zeros(1), density=False).item() == 0.5


@needs_kernels
@pytest.mark.parametrize("count", [1, 3, 15, 16, 17, 255, 257, 1030])
def test_the_normal_distribution_is_the_same_at_every_place(count):
    x = random_tensor((count,), 0) * 3
    for density in (False, True):
        one_by_one = torch.cat([normal(element.reshape(1), density) for element in x])
        assert torch.equal(normal(x, density), one_by_one)
        repeated = [OPERATIONS["Normal"], 4, 0, 3, -1, OPERATIONS["Add"], 2, 1, 3 if density else 4, -1]
        (sums,) = torch.ops.burnish.elementwise([x[:1], torch.zeros(5, count)], [], repeated, [FLOAT])
        assert torch.equal(sums, one_by_one[0].expand(5, count))
    both = [OPERATIONS["Normal"], 1, 0, 2, -1]
    found = torch.ops.burnish.elementwise([x.to(torch.bfloat16)], [], both, [FLOAT, BFLOAT16])
    assert torch.equal(found[0], normal(x.to(torch.bfloat16).float(), density=False))
    assert torch.equal(found[1], normal(x.to(torch.bfloat16).float(), density=True).to(torch.bfloat16))


def random_tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_kernels
@pytest.mark.parametrize(
    "shape",
    [(40,), (30, 40), (1, 40), (7, 1, 1), (7, 30, 1), (30, 1), (7, 1, 40), (1, 30, 1), (1, 1, 1), (1,), ()],
    ids=str,
)
@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
def test_operands_broadcast_from_any_place(shape, layout):
    a = random_tensor((7, 30, 40), 0)
    a = a.permute(2, 0, 1).contiguous().permute(1, 2, 0) if layout == "permuted" else a
    b, c = random_tensor(shape, 1), random_tensor((7, 30, 40), 2)
    (y,) = torch.ops.burnish.elementwise([b, a, c], [], [OPERATIONS["Mul"], 4, 0, 1, -1, OPERATIONS["Sub"], 3, 4, 2, -1], [FLOAT])
    assert torch.equal(y, a * b - c)
    assert y.stride() == a.stride()


@needs_kernels
def test_what_is_expanded_is_not_copied_out_and_may_be_all_there_is():
    row, column = random_tensor((2000,), 0), random_tensor((30, 1), 1)
    sums = torch.ops.burnish.elementwise([row.expand(30, 2000), column], [], [OPERATIONS["Add"], 2, 0, 1, -1], [FLOAT])
    assert torch.equal(sums[0], row + column)


@needs_kernels
def test_masks_select_and_compare():
    x, y = random_tensor((5, 900), 0), random_tensor((5, 900), 1)
    x[0, :5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, y[0, 4].item()])
    mask = random_tensor((5, 900), 2) > 0
    comparisons = {"Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Equal": torch.eq}
    for name, function in comparisons.items():
        (found,) = torch.ops.burnish.elementwise([x, y], [], [OPERATIONS[name], 2, 0, 1, -1], [BOOL])
        assert found.dtype == torch.bool
        assert torch.equal(found, function(x, y)), name
    program = [OPERATIONS["Not"], 4, 0, -1, -1, OPERATIONS["Where"], 3, 4, 1, 2]
    (found,) = torch.ops.burnish.elementwise([mask, x, y], [], program, [FLOAT])
    torch.testing.assert_close(found, torch.where(~mask, x, y), rtol=0, atol=0, equal_nan=True)
    for name, both in (("And", torch.logical_and), ("Or", torch.logical_or)):
        (found,) = torch.ops.burnish.elementwise([mask, x > y], [], [OPERATIONS[name], 2, 0, 1, -1], [BOOL])
        assert torch.equal(found, both(mask, x > y))
    (found,) = torch.ops.burnish.elementwise([y, x], [], [OPERATIONS["ReluGrad"], 2, 0, 1, -1], [FLOAT])
    torch.testing.assert_close(found, torch.ops.aten.threshold_backward(y, x, 0), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("count", [1, 7, 259, 1030])
@pytest.mark.parametrize("repeated", [(), (0,), (1, 2)])
def test_what_is_joined_with_a_product_rounds_as_the_operations_do_one_by_one(count, repeated):
    a, b, c = (random_tensor((1 if place in repeated else count,), place) for place in range(3))
    expected = {"MulAdd": a * b + c, "MulSub": a * b - c, "SubMul": c - a * b}
    for name, wanted in expected.items():
        (found,) = torch.ops.burnish.elementwise([a, b, c], [], [OPERATIONS[name], 3, 0, 1, 2], [FLOAT])
        assert torch.equal(found, wanted), name


@needs_kernels
def test_bfloat16_is_computed_in_float32_and_rounded_as_pytorch_rounds():
    every = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    scale = random_tensor((1,), 0).item()
    program = [OPERATIONS["Mul"], 3, 0, 1, -1, OPERATIONS["Copy"], 2, 3, -1, -1]
    (found,) = torch.ops.burnish.elementwise([every], [scale], program, [BFLOAT16])
    expected = (every.float() * scale).to(torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    wide = torch.arange(-(2**31), 2**31, 8191, dtype=torch.int64).to(torch.int32).view(torch.float32)
    (found,) = torch.ops.burnish.elementwise([wide], [], [OPERATIONS["Copy"], 1, 0, -1, -1], [BFLOAT16])
    torch.testing.assert_close(found, wide.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    image = random_tensor((2, 8, 9, 10), 1).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    bias = random_tensor((1, 8, 1, 1), 2).to(torch.bfloat16)
    (found,) = torch.ops.burnish.elementwise([image, bias], [], [OPERATIONS["Add"], 2, 0, 1, -1], [BFLOAT16])
    assert torch.equal(found, image + bias)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "kept"),
    [((1,), 0), ((7,), 0), ((3, 5), 1), ((1, 300), 1), ((33, 300), 1), ((9, 128, 48), 1), ((1000, 17), 1), ((40, 6, 50), 2)],
    ids=str,
)
def test_sums_over_leading_axes_are_of_unrounded_values(shape, kept, threads):
    x, scale = (random_tensor(shape, place).to(torch.bfloat16) for place in range(2))
    terms, axes = x.double() * scale.double(), list(range(len(shape) - kept))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        program = [OPERATIONS["Mul"], 2, 0, 1, -1]
        y, products, first = torch.ops.burnish.elementwise_sums([x, scale], [], program, [BFLOAT16], [2, 0], kept)
        (alone,) = torch.ops.burnish.elementwise_sums([x, scale], [], program, [], [2], kept)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, (x.float() * scale.float()).to(torch.bfloat16))
    assert products.dtype == first.dtype == torch.float32
    assert products.shape == shape[len(shape) - kept :]
    assert within_float32(products, terms, axes)
    assert within_float32(first, x.double(), axes)
    assert torch.equal(products, alone)


@needs_kernels
def test_sums_do_not_depend_on_threads_or_the_order_of_memory_and_keep_what_is_not_finite():
    x, row = random_tensor((70, 30, 40), 0), random_tensor((40,), 1)
    x[1, 2, 3], x[3, 4, 5], x[4, 5, 6], x[6, 7, 6] = math.nan, math.inf, math.inf, -math.inf
    program = [OPERATIONS["Add"], 2, 0, 1, -1]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for given in (x, x.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
                y, sums = torch.ops.burnish.elementwise_sums([given, row], [], program, [FLOAT], [2], 1)
                torch.testing.assert_close(y, x + row, rtol=0, atol=0, equal_nan=True)
                found.append(sums)
    finally:
        torch.set_num_threads(before)
    for sums in found:
        torch.testing.assert_close(sums, found[0], rtol=0, atol=0, equal_nan=True)
    assert found[0][[3, 6]].isnan().all()
    assert found[0][5] == math.inf
    plain = torch.ones(40, dtype=torch.bool)
    plain[3], plain[5], plain[6] = False, False, False
    assert within_float32(found[0][plain], (x + row).double()[..., plain], [0, 1])


@needs_kernels
def test_sums_of_nothing_are_zero_and_what_repeats_is_added_as_often_as_it_stands_there():
    for shape in ((0, 30), (4, 0), (0, 0)):
        y, sums = torch.ops.burnish.elementwise_sums([torch.empty(shape)], [], [OPERATIONS["Neg"], 1, 0, -1, -1], [FLOAT], [1], 1)
        assert y.shape == shape
        assert torch.equal(sums, torch.zeros(shape[1]))
    one, row = torch.full((1,), 0.5), random_tensor((1, 300), 0)
    sums = torch.ops.burnish.elementwise_sums([one, row, torch.ones(64, 1)], [], [], [], [0, 1, 2], 1)
    assert torch.equal(sums[0], torch.full((300,), 32.0))
    torch.testing.assert_close(sums[1], row[0] * 64, rtol=1e-6, atol=0)
    assert torch.equal(sums[2], torch.full((300,), 64.0))


@needs_kernels
def test_sums_name_what_is_wrong_with_their_operands():
    x = torch.ones(3, 4)
    for summed, kept, message in (([5], 1, "no register 5"), ([0], 3, "no 3 axes to keep"), ([-1], 1, "no register -1")):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.burnish.elementwise_sums([x], [], [], [], summed, kept)
