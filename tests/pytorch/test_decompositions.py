"""Operators that PyTorch decomposes, and those that burnish decomposes itself, as PyTorch does, at ties too."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import burnish.torch
from burnish.errors import UnsupportedOperatorError
from oracles.combinations import spread

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

from burnish.importer.pytorch.decompositions import KEPT

NAN = float("nan")


class Of(nn.Module):
    """A function of tensors, as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = [function]

    def forward(self, *tensors):
        return self.function[0](*tensors)


def results(module, *tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = module(*leaves)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    gradients = torch.autograd.grad(output, leaves, cotangent, materialize_grads=True)
    return [output.detach(), *gradients]


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


TIED = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
HOLED = torch.tensor([1.0, NAN, 3.0, NAN], dtype=torch.float64)
OTHER = torch.tensor([2.0, 5.0, 3.0, NAN], dtype=torch.float64)
CASES = {
    "hstack": (lambda x, y: torch.hstack([x, y]), numbers(2, 3), numbers(2, 4)),
    "column_stack": (lambda x, y: torch.column_stack([x, y]), numbers(3), numbers(3, 2)),
    "distances": (torch.cdist, numbers(2, 3, 4), numbers(2, 5, 4)),
    "distances of equal points": (lambda x: torch.cdist(x, x), numbers(3, 4)),
    "distances of the first norm": (lambda x, y: torch.cdist(x, y, p=1.0), numbers(3, 4), numbers(2, 4)),
    "cumprod": (lambda x: x.cumprod(0), numbers(5, 2)),
    "cumprod of zeros": (lambda x: x.cumprod(1), TIED),
    "cummax": (lambda x: torch.cummax(x, 1).values, TIED),
    "cummin and its places": (lambda x: torch.cummin(x, 0)[0] * torch.cummin(x, 0)[1], TIED),
    "cummax of NaN": (lambda x: torch.cummax(x, 0).values, OTHER),
    "hypot": (torch.hypot, numbers(3, 4), numbers(4) + 2),
    "bilinear": (F.bilinear, numbers(5, 3), numbers(5, 4), numbers(2, 3, 4)),
    "var_mean over an open axis": (lambda x: torch.stack(torch.var_mean(x)) + torch.std_mean(x, 0)[0].sum(), numbers(3, 4)),
    "a sum with a factor of an extent": (lambda x: x.add(float(x.shape[0]), alpha=0.3).add(3.0, alpha=0.2), numbers(3, 4)),
    "fmax": (torch.fmax, HOLED, OTHER),
    "fmin": (torch.fmin, HOLED, OTHER),
    "copysign": (torch.copysign, numbers(4), torch.tensor([-0.0, 0.0, -1.0, 2.0], dtype=torch.float64)),
    "amax": (torch.amax, TIED),
    "amin of a number": (torch.amin, numbers()),
    "kthvalue": (lambda x: x.kthvalue(2, 1).values, numbers(3, 4)),
    "median": (lambda x: x.median(1, keepdim=True).values, numbers(3, 4)),
    "median of all": (torch.median, TIED),
    "median of a number": (lambda x: x.median(0).values, numbers()),
    "median of NaN": (lambda x: x.median(0).values, OTHER),
    "adaptive means": (nn.AdaptiveAvgPool3d((2, 3, 1)), numbers(2, 3, 5, 4, 3)),
    "adaptive maxima": (nn.AdaptiveMaxPool2d((2, 3)), numbers(2, 3, 5, 7)),
    "adaptive maxima of equal entries": (nn.AdaptiveMaxPool2d((2, 3)), torch.ones(1, 1, 5, 7, dtype=torch.float64)),
    "adaptive maxima of equal windows": (nn.AdaptiveMaxPool2d(2), numbers(2, 3, 4, 6)),
    "one maximum of equal entries": (nn.AdaptiveMaxPool2d(1), torch.ones(2, 3, 4, 6, dtype=torch.float64)),
    "stable sort": (lambda x: x.sort(dim=1, stable=True)[0], TIED),
    "places of a stable sort": (lambda x: x.sort(dim=1, stable=True, descending=True)[1] * x, TIED),
    "places of maxima": (lambda x: nn.AdaptiveMaxPool2d((2, 3), return_indices=True)(x)[1] * x.sum(), numbers(2, 3, 5, 7)),
}


@pytest.mark.slow
@spread("name", CASES, test_all=16)
def test_what_is_decomposed_is_what_pytorch_computes(name):
    function, *tensors = CASES[name]
    module = Of(function)
    wrapped = burnish.torch.wrap(copy.deepcopy(module), tuple(tensors))
    for found, wanted in zip(results(wrapped, *tensors), results(module, *tensors), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 1, -3])
@pytest.mark.parametrize("last", [True, False])
def test_bags_of_float64_keep_its_digits(mode, padding, last):
    bag = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding, include_last_offset=last, dtype=torch.float64)
    indices, offsets = torch.tensor([0, 2, 1, 4, 4, 1]), torch.tensor([0, 3, 3, 5, *([6] if last else [])])
    wrapped = burnish.torch.wrap(copy.deepcopy(bag), (indices, offsets))
    found, wanted = wrapped(indices, offsets), bag(indices, offsets)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(wrapped.weight.grad, bag.weight.grad, rtol=1e-14, atol=1e-14)


@pytest.mark.slow
def test_tensors_of_numbers_have_the_dtype_of_pytorch():
    def made(x):
        count = x.shape[0]
        whole = torch.full((count, 2), 7)
        eye = (
            torch.eye(2)
            + torch.linspace(0, 1, 2)
            + torch.full((2,), 0.1)
            + torch.ones(2) * torch.zeros(2)
            + torch.arange(0.0, 1.0, 0.5)
        )
        return x @ eye, whole // 2, torch.full((count,), True)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        x = numbers(3, 2)
        wrapped = burnish.torch.wrap(Of(made), x)
        torch.testing.assert_close(wrapped(numbers(4, 2)), made(numbers(4, 2)))
    finally:
        torch.set_default_dtype(before)


def test_every_operator_that_is_kept_is_one_that_pytorch_decomposes():
    names = {operator.overloadpacket.__name__ for operator in torch.export.default_decompositions()}
    assert names >= KEPT


def test_a_function_that_its_translation_gets_wrong_is_refused_by_name():
    with pytest.raises(UnsupportedOperatorError, match=r"the translation of torch\.special\.erfcx to ONNX loses all digits"):
        burnish.torch.wrap(Of(torch.special.erfcx), (numbers(3),))


def test_statistics_of_ones_own_are_frozen():
    module = Of(lambda x, mean, variance: nn.functional.batch_norm(x, mean, variance, training=False))
    tensors = numbers(4, 3), numbers(3), numbers(3).square() + 1
    wrapped = burnish.torch.wrap(copy.deepcopy(module), tensors)
    torch.testing.assert_close(wrapped(*tensors), module(*tensors))
