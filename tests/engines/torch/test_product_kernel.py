"""The engine's products of matrices against float64: layouts, tails, sums that are cut, and what is refused."""

from __future__ import annotations

import pytest
import torch

from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings import linear as products
from oracles.combinations import diagonal

pytestmark = pytest.mark.skipif(not kernels.available("products"), reason="the engine's kernels cannot be built here")

# Below a tile, a tile, one more than tiles; sums of less and of more than one block; columns, and rows, of more than one block.
SHAPES = [
    (1, 1, 1),
    (8, 384, 48),
    (9, 385, 49),
    (7, 769, 47),
    (17, 1000, 433),
    (100, 1537, 50),
    (3, 2, 800),
    (65, 1541, 391),
    (401, 513, 66),
    (13, 300, 3091),
    (203, 260, 3079),
]


def normal(rows: int, columns: int, transposed: bool, generator: torch.Generator) -> torch.Tensor:
    if transposed:
        return torch.randn(columns, rows, generator=generator).t()
    return torch.randn(rows, columns, generator=generator)


@diagonal(("shape", SHAPES), ("transposed", [(False, False), (False, True), (True, False), (True, True)]), test=7)
def test_a_product_keeps_its_digits(transposed, shape, threads):
    rows, depth, columns = shape
    generator = torch.Generator().manual_seed(depth)
    left, right = normal(rows, depth, transposed[0], generator), normal(depth, columns, transposed[1], generator)
    bias = torch.randn(columns, generator=generator)
    for added in (None, bias):
        found = torch.ops.burnish.product(left, right, added)
        exact = left.double() @ right.double() + (0.0 if added is None else added.double())
        # Of a sum of n products of normal numbers.
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=4e-6 * depth**0.5)
        assert torch.equal(found, torch.ops.burnish.product(left, right, added))


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the kernel is chosen on processors with AVX2 or AVX-512")
@pytest.mark.parametrize(("rows", "taken"), [(256, True), (16, torch.cpu._is_avx512_supported()), (1, False)])
def test_large_products_take_the_kernel(rows, taken, threads):
    x, weight = torch.ones(rows, 2048), torch.ones(1024, 2048)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = products.linear(x, weight, None, True, False)
    assert torch.equal(found, torch.full((rows, 1024), 2048.0))
    assert ("burnish::product" in {event.key for event in profile.key_averages()}) == taken


def test_no_sum_is_zero_and_no_element_is_none(threads):
    bias = torch.ones(10)
    empty = torch.empty(7, 0)
    assert torch.equal(torch.ops.burnish.product(empty, empty.t()[:, :0].new_empty(0, 10), bias), bias.expand(7, 10))
    assert torch.ops.burnish.product(torch.empty(0, 5), torch.ones(5, 3), None).shape == (0, 3)


def test_operands_of_which_no_axis_lies_side_by_side():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(60, 60, generator=generator)[::2, ::2] for _ in range(2))
    exact = left.double() @ right.double()
    found = torch.ops.burnish.product(left, right, None)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=4e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_not_finite_stays_in_its_row_and_column(transposed):
    generator = torch.Generator().manual_seed(0)
    left = normal(21, 801, transposed, generator)
    right = normal(801, 101, not transposed, generator).abs()
    left[3, 800], left[4, 5], left[5, 6], right[7, 100] = torch.nan, torch.inf, -torch.inf, torch.nan
    found = torch.ops.burnish.product(left, right, None)
    assert found[3].isnan().all()
    assert found[:, 100].isnan().all()
    assert (found[4, :100] == torch.inf).all()
    assert (found[5, :100] == -torch.inf).all()
    assert found[6:, :100].isfinite().all()


@pytest.mark.slow
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="bfloat16 runs in float32 on this processor")
def test_a_large_layer_of_bfloat16_keeps_its_digits():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(300, 700, generator=generator).bfloat16(), torch.randn(400, 700, generator=generator).bfloat16()
    bias = torch.randn(800, generator=generator).bfloat16()[::2]
    x[3, 5] = torch.nan
    for relu in (False, True):
        for given, transposed in ((weight, True), (weight.t().contiguous(), False)):
            found = products.linear(x, given, bias, transposed, relu)
            exact = x.double() @ weight.double().t() + bias.double()
            exact = exact.relu() if relu else exact
            torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4, equal_nan=True)
            assert found[3].isnan().all()


@pytest.mark.parametrize(
    ("left", "right", "bias", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 5), None, "two matrices"),
        (torch.ones(2, 3), torch.ones(3, 5, dtype=torch.bfloat16), None, "two matrices"),
        (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 5, dtype=torch.bfloat16), None, "two matrices of float32"),
        (torch.ones(2, 2, 3), torch.ones(3, 5), None, "two matrices"),
        (torch.ones(2, 3), torch.ones(3, 5), torch.ones(4), "one element per column"),
    ],
)
def test_what_does_not_fit_is_refused(left, right, bias, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.burnish.product(left, right, bias)
