"""The engine's kernel of attention against float64: blocks and their rests, masks, threads, and what is refused."""

from __future__ import annotations

import pytest
import torch

from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.attention import attention, attention_gradient
from burnish.engines.torch.runtime.devices import has_wide_vectors
from burnish.kernels.thresholds import Attention
from oracles.combinations import diagonal

needs_kernel = pytest.mark.skipif(not kernels.available("attention"), reason="the engine's kernels cannot be built here")

# Samples, heads, queries, keys and elements of a head: fewer than a tile and tiles with a rest, one query, blocks of queries and
# of keys with a rest, odd numbers of keys and elements.
SHAPES = [(2, 3, 20, 40, 8), (1, 2, 7, 301, 17), (3, 2, 1, 130, 64), (1, 2, 200, 257, 33), (2, 1, 97, 600, 96), (1, 5, 33, 1, 32)]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-19}
"""Of bfloat16 that of one number, relative, at most: probabilities, or their gradients, are rounded, and so is the result. Of
float32 that of a score, which is an exponent: they are up to 2**5 here, and their sums of products are rounded more than once."""
both = pytest.mark.parametrize("dtype", list(ROUNDING), ids=["bfloat16", "float32"])


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads_of_layer(samples: int, count: int, heads: int, extent: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """As a layer gives them: heads are slices of its rows."""
    return drawn((samples, count, heads, extent), seed).to(dtype).transpose(1, 2)


def exact(operands: list[torch.Tensor], mask: torch.Tensor | None, scale: float, flow: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of query, key and value, in float64."""
    query, key, value = (tensor.double().requires_grad_() for tensor in operands)
    scores = query @ key.transpose(2, 3) * scale
    result = torch.softmax(scores if mask is None else scores + mask.double(), -1) @ value
    return [result.detach(), *torch.autograd.grad(result, (query, key, value), flow.double())]


@needs_kernel
@both
@diagonal(("shape", SHAPES), ("mask", ["none", "keys", "queries", "all", "strided"]))
def test_attention_and_its_gradient_keep_their_digits(shape, mask, threads, dtype):
    samples, heads, queries, keys, extent = shape
    counts = (queries, keys, keys, queries)
    *operands, flow = (heads_of_layer(samples, count, heads, extent, seed, dtype) for seed, count in enumerate(counts))
    added = {
        "none": None,
        "keys": drawn((samples, 1, 1, keys), 4),
        "queries": drawn((1, 1, queries, 1), 4),
        "all": drawn((samples, heads, queries, keys), 4),
        "strided": drawn((1, 1, keys, queries), 4).transpose(2, 3),
    }[mask]
    result, logarithms = torch.ops.burnish.attention(*operands, added, 0.3, False)
    scores = operands[0].double() @ operands[1].double().transpose(2, 3) * 0.3
    expected = torch.logsumexp(scores if added is None else scores + added.double(), -1)
    torch.testing.assert_close(logarithms.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.ops.burnish.attention_gradient(flow, *operands, result, logarithms, added, 0.3)
    for name, found, wanted in zip("yqkv", (result, *gradients), exact(operands, added, 0.3, flow), strict=True):
        assert found.dtype == dtype
        # The gradient of the score of a single key is nothing but what rounding left of the difference of two equal numbers.
        size = float(flow.double().norm()) if keys == 1 and name in "qk" else float(wanted.norm())
        assert float((found.double() - wanted).norm()) <= ROUNDING[dtype] * size, name


@needs_kernel
@both
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    *operands, flow = (drawn((2, 3, 150, 40), seed).to(dtype) for seed in range(4))
    results = []
    before = torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        result, logarithms = torch.ops.burnish.attention(*operands, None, 0.2, False)
        gradients = torch.ops.burnish.attention_gradient(flow, *operands, result, logarithms, None, 0.2)
        results.append([result, logarithms, *gradients])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def with_one(bad: float, operand: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value and mask, of which one holds the bad number."""
    drawn_ones = [*(drawn((1, 2, keys, 8), seed).to(dtype) for seed in range(3)), drawn((1, 1, keys, keys), 3)]
    drawn_ones[operand][0, 0, 1] = bad
    return drawn_ones


@needs_kernel
@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e36])
@pytest.mark.parametrize("operand", range(4), ids=["query", "key", "value", "mask"])
@pytest.mark.parametrize("keys", [4, 40, 300])
def test_what_is_not_finite_is_never_lost(bad, operand, keys, dtype):
    *operands, mask = with_one(bad, operand, keys, dtype)
    query, key, value = (tensor.float() for tensor in operands)
    usual = torch.softmax(query @ key.transpose(2, 3) * 0.5 + mask, -1) @ value
    result, _ = torch.ops.burnish.attention(*operands, mask, 0.5, False)
    torch.testing.assert_close(result.float(), usual, rtol=4 * ROUNDING[dtype], atol=4 * ROUNDING[dtype], equal_nan=True)


@needs_kernel
@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("operand", range(4), ids=["query", "key", "value", "mask"])
@pytest.mark.parametrize("keys", [4, 40, 300])
def test_what_is_not_finite_is_never_lost_in_gradients(bad, operand, keys, dtype):
    *operands, mask = with_one(bad, operand, keys, dtype)
    result, logarithms = torch.ops.burnish.attention(*operands, mask, 0.5, False)
    flow = torch.ones_like(result)
    gradients = torch.ops.burnish.attention_gradient(flow, *operands, result, logarithms, mask, 0.5)
    for found, wanted in zip(gradients, exact(operands, mask, 0.5, flow)[1:], strict=True):
        assert found[wanted.isnan()].isnan().all()
        if wanted.isfinite().all():
            torch.testing.assert_close(found.double(), wanted, rtol=8 * ROUNDING[dtype], atol=8 * ROUNDING[dtype])


@needs_kernel
@both
def test_keys_that_a_mask_hides_have_no_weight_and_no_gradient(dtype):
    counts = (70, 600, 600, 70)
    *operands, flow = (drawn((1, 2, count, 16), seed).to(dtype) for seed, count in enumerate(counts))
    mask = torch.zeros(1, 1, 1, 600)
    mask[..., :300] = -torch.inf  # a block of keys as a whole
    mask[..., 599] = -torch.inf
    result, logarithms = torch.ops.burnish.attention(*operands, mask, 0.25, False)
    gradients = torch.ops.burnish.attention_gradient(flow, *operands, result, logarithms, mask, 0.25)
    seen = [operands[0], *(tensor[:, :, 300:599] for tensor in operands[1:])]
    for found, wanted in zip((result, *gradients), exact(seen, None, 0.25, flow), strict=True):
        if found.shape[2] == 600:
            assert not found[:, :, :300].any()
            assert not found[:, :, 599].any()
        shown = found[:, :, 300:599] if found.shape[2] == 600 else found
        assert float((shown.double() - wanted).norm()) <= ROUNDING[dtype] * float(wanted.norm())


@needs_kernel
@both
def test_a_query_that_sees_no_key_is_nan(dtype):
    operands = [drawn((1, 2, 30, 16), seed).to(dtype) for seed in range(4)]
    mask = torch.full((1, 1, 1, 30), -torch.inf)
    result, logarithms = torch.ops.burnish.attention(*operands[:3], mask, 0.25, False)
    assert result.isnan().all()
    gradients = torch.ops.burnish.attention_gradient(operands[3], *operands[:3], result, logarithms, mask, 0.25)
    assert all(gradient.isnan().all() for gradient in gradients)


@needs_kernel
@both
@pytest.mark.parametrize("keys", [30, 300])
def test_a_query_that_sees_no_key_is_zero_and_has_no_gradient_where_that_is_wanted(keys, dtype):
    counts = (30, keys, keys, 30)
    *operands, flow = (drawn((1, 2, count, 16), seed).to(dtype) for seed, count in enumerate(counts))
    mask = torch.zeros(1, 1, 30, keys)
    mask[:, :, 3] = -torch.inf
    result, logarithms = torch.ops.burnish.attention(*operands, mask, 0.25, True)
    gradients = torch.ops.burnish.attention_gradient(flow, *operands, result, logarithms, mask, 0.25)
    assert not result[:, :, 3].any()
    assert not gradients[0][:, :, 3].any()
    seen = torch.arange(30) != 3
    shown = [operands[0][:, :, seen], *operands[1:]]
    expected = exact(shown, None, 0.25, flow[:, :, seen])
    for found, wanted in zip((result[:, :, seen], gradients[0][:, :, seen], *gradients[1:]), expected, strict=True):
        assert float((found.double() - wanted).norm()) <= ROUNDING[dtype] * float(wanted.norm())
    operands[0][:, :, 5, 0] = torch.nan
    assert not torch.ops.burnish.attention(*operands, mask, 0.25, True)[0][:, :, 5].any()


@needs_kernel
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.ones(1, 2, 3, 4)}, "heads of float32 or bfloat16 with four axes"),
        ({"value": torch.ones(2, 3, 4).bfloat16()}, "heads of float32 or bfloat16 with four axes"),
        ({"value": torch.ones(1, 2, 5, 4)}, "heads of float32 or bfloat16 with four axes"),
        ({"query": torch.ones(1, 2, 3, 4).double()}, "heads of float32 or bfloat16 with four axes"),
        ({"key": torch.ones(1, 2, 6, 4).bfloat16()}, "that fit"),
        ({"query": torch.ones(1, 2, 3, 5).bfloat16()}, "that fit"),
        ({"mask": torch.ones(1, 1, 3, 4)}, "a mask that broadcasts"),
        ({"mask": torch.ones(3, 5)}, "with four axes"),
        ({"mask": torch.ones(1, 1, 3, 5).bfloat16()}, "a mask of float32"),
    ],
)
def test_heads_that_do_not_fit_are_refused(changed, message):
    query, key = torch.ones(1, 2, 3, 4).bfloat16(), torch.ones(1, 2, 5, 4).bfloat16()
    operands = {"query": query, "key": key, "value": key, "mask": None, **changed}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.burnish.attention(*operands.values(), 1.0, False)


@needs_kernel
@pytest.mark.parametrize(
    ("place", "given", "message"),
    [
        (0, torch.ones(1, 2, 3, 5).bfloat16(), "the shape and the type of the queries"),
        (0, torch.ones(1, 2, 3, 4), "the shape and the type of the queries"),
        (5, torch.ones(1, 2, 4), "for each query"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(place, given, message):
    heads = torch.ones(1, 2, 3, 4).bfloat16()
    operands = [*[heads] * 5, torch.ones(1, 2, 3)]
    operands[place] = given
    with pytest.raises(RuntimeError, match=message):
        torch.ops.burnish.attention_gradient(*operands, None, 1.0)


def test_without_the_kernel_pytorchs_attend(monkeypatch):
    monkeypatch.setattr(kernels, "find_operator", lambda name: None)
    *operands, flow = (drawn((2, 3, 20, 16), seed).bfloat16() for seed in range(4))
    mask = drawn((20, 20), 4)
    hidden = mask.clone()
    hidden[3] = -torch.inf
    for added in (None, mask, hidden):
        result, logarithms = attention(*operands, added, 0.3)
        gradients = attention_gradient(flow, *operands, result, logarithms, added, 0.3)
        for found, wanted in zip((result, *gradients), exact(operands, added, 0.3, flow), strict=True):
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.double(), wanted, rtol=2**-5, atol=2**-4, equal_nan=True)


@needs_kernel
@pytest.mark.skipif(not has_wide_vectors(), reason="the processor has no vectors of eight float32")
@pytest.mark.parametrize("queries", [Attention.FEWEST_QUERIES - 1, Attention.FEWEST_QUERIES])
def test_many_queries_of_float32_are_the_kernels_and_few_are_pytorchs(queries, monkeypatch):
    called = []
    own = {name: getattr(torch.ops.burnish, name).default for name in ("attention", "attention_gradient")}
    monkeypatch.setattr(kernels, "find_operator", lambda name: called.append(name) or own[name])
    counts = (queries, 40, 40, queries)
    *operands, flow = (drawn((2, 3, count, 16), seed) for seed, count in enumerate(counts))
    mask = drawn((queries, 40), 4)
    mask[3] = -torch.inf
    for zeros in (False, True):
        result, logarithms = attention(*operands, mask, 0.3, zeros)
        gradients = attention_gradient(flow, *operands, result, logarithms, mask, 0.3, zeros)
        seen = torch.arange(queries) != 3
        shown = [operands[0][:, :, seen], *operands[1:]]
        expected = exact(shown, mask[seen], 0.3, flow[:, :, seen])
        torch.testing.assert_close(result[:, :, seen].double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients[0][:, :, seen].double(), expected[1], rtol=1e-5, atol=1e-5)
        if zeros:
            assert not result[:, :, 3].any()
            torch.testing.assert_close(gradients[1].double(), expected[2], rtol=1e-5, atol=1e-5)
        else:
            assert result[:, :, 3].isnan().all()
            assert all(gradient.isnan().any() for gradient in gradients)
    assert called == (["attention", "attention_gradient"] * 2 if queries == Attention.FEWEST_QUERIES else [])
