"""Every way to compute a convolution and its gradients against float64: sizes, layouts, threads."""

from __future__ import annotations

import itertools

import pytest
import torch

from burnish.engines.torch.bindings.convolution import algorithms as convolution_ways
from burnish.engines.torch.bindings.convolution import algorithms as convolutions
from burnish.engines.torch.bindings.convolution.algorithms import Windows, places
from burnish.engines.torch.runtime import kernel_choice
from oracles.combinations import spread

SINGLE = 2.0**-24
# x, weight, strides, padding, dilations, groups
CASES = {
    "wide": ([2, 4, 9, 61], [5, 4, 3, 39], (1, 1), (1, 19), (1, 1), 1),
    "tall": ([2, 4, 61, 9], [5, 4, 39, 3], (1, 1), (19, 1), (1, 1), 1),
    "long signal": ([3, 1, 400], [6, 1, 80], (4,), (38,), (1,), 1),
    "signal": ([2, 8, 50], [12, 8, 9], (1,), (4,), (1,), 1),
    "dilated signal": ([2, 8, 50], [12, 8, 3], (1,), (4,), (4,), 1),
    "depthwise signal": ([2, 32, 50], [32, 1, 31], (1,), (15,), (1,), 32),
    "depthwise": ([2, 32, 14, 15], [32, 1, 7, 7], (1, 1), (3, 3), (1, 1), 32),
    "dilated depthwise": ([2, 32, 14, 15], [32, 1, 3, 3], (1, 1), (2, 2), (2, 2), 32),
    "grouped": ([2, 16, 10, 9], [24, 4, 3, 3], (2, 2), (1, 1), (1, 1), 4),
    "strided": ([2, 3, 33, 35], [8, 3, 11, 11], (4, 4), (2, 2), (1, 1), 1),
    "left over": ([2, 3, 12, 14], [8, 3, 2, 3], (3, 4), (0, 1), (1, 1), 1),
    "dilated": ([2, 6, 17, 13], [7, 6, 3, 3], (1, 1), (2, 3), (2, 3), 1),
    "volume": ([2, 3, 6, 7, 8], [4, 3, 3, 3, 3], (1, 2, 1), (1, 1, 0), (1, 1, 2), 1),
    "one pixel": ([2, 5, 20], [7, 5, 1], (1,), (0,), (1,), 1),
    "one result": ([1, 3, 4, 5], [2, 3, 4, 5], (1, 1), (0, 0), (1, 1), 1),
}
LAYOUTS = ("channels last", "channels first", "strided")


def laid_out(tensor, layout):
    if layout == "channels last":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor if layout == "channels first" else torch.stack([tensor, tensor], -1)[..., 0]


def operands_of(case):
    shape, kernel, strides, padding, dilations, groups = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    x, weight = (torch.randn(extents, generator=generator) for extents in (shape, kernel))
    bias = torch.randn(kernel[0], generator=generator)
    counts = places(shape, kernel[2:], Windows(strides, padding, dilations, groups))
    dy = torch.randn([shape[0], kernel[0], *counts], generator=generator)
    return x, weight, bias, dy, (list(strides), list(padding), list(dilations), groups)


def exactly(x, weight, bias, dy, window):
    """Results in float64, and the sums of the magnitudes that they add up."""
    found = []
    for transform in (lambda tensor: tensor.double(), lambda tensor: tensor.double().abs()):
        first, second, third = (transform(tensor).requires_grad_() for tensor in (x, weight, bias))
        convolve = [torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d][x.dim() - 3]
        y = convolve(first, second, third, *window)
        y.backward(transform(dy))
        found.append((y.detach(), first.grad, second.grad))
    return zip(*found, strict=True)


OPERATIONS = {
    "forward": lambda x, weight, bias, dy, window: convolutions.convolve(x, weight, bias, *window, True),
    "input": lambda x, weight, bias, dy, window: convolutions.input_gradient(dy, weight, x, *window, True),
    "weight": lambda x, weight, bias, dy, window: convolutions.weight_gradient(dy, x, weight, *window, True),
}


@pytest.fixture
def take(monkeypatch):
    """Have one way taken, by its name."""

    def taken(name):
        convolutions._known.clear()
        monkeypatch.setattr(kernel_choice, "choose", lambda *_: name)

    yield taken
    convolutions._known.clear()


@pytest.mark.slow
@spread("case", CASES, test_all=4)
def test_every_way_agrees_with_float64(case, threads, take, monkeypatch):
    x, weight, bias, dy, window = operands_of(case)
    expected = dict(zip(OPERATIONS, exactly(x, weight, bias, dy, window), strict=True))
    monkeypatch.setattr(convolution_ways, "SLAB", 1 << 11)  # so that few windows fit
    for operation, layout in itertools.product(OPERATIONS, LAYOUTS):
        given = [laid_out(tensor, layout) for tensor in (x, weight)] + [bias, laid_out(dy, layout)]
        for name in convolutions.possible_ways(operation, max(x.dim(), 4), window[-1]):
            take(name)
            result = OPERATIONS[operation](*given, window)
            exact, magnitude = expected[operation]
            assert result.dtype == torch.float32
            assert result.shape == exact.shape
            # Of sums in float32, in any order.
            assert ((result.double() - exact).abs() <= 16 * SINGLE * magnitude).all(), name


@pytest.mark.parametrize(("case", "ways"), [("wide", 5), ("signal", 5), ("grouped", 4), ("volume", 3)])
def test_there_are_several_ways(case, ways):
    x, *_, window = operands_of(case)
    assert len(convolutions.possible_ways("weight", max(x.dim(), 4), window[-1])) == ways


@pytest.mark.parametrize("case", ["wide", "signal", "depthwise signal", "volume"])
def test_results_lie_the_same_whichever_way_is_taken(case, take):
    x, weight, bias, dy, window = operands_of(case)
    for operation, compute in OPERATIONS.items():
        for name in convolutions.possible_ways(operation, max(x.dim(), 4), window[-1]):
            take(name)
            result = compute(x, weight, bias, dy, window)
            if operation == "weight" and x.dim() != 4:  # as state does
                assert result.is_contiguous()
            else:
                assert result.movedim(1, -1).is_contiguous()


@pytest.mark.slow
def test_the_same_way_twice_gives_the_same_bits(threads, take):
    operands = operands_of("signal")
    for name in convolutions.WAYS:
        take(name)
        for compute in OPERATIONS.values():
            assert torch.equal(compute(*operands), compute(*operands))


def test_windows_are_multiplied_in_slabs(monkeypatch):
    """The matrix of all windows of a wide kernel would be hundreds of times as large as the images."""
    x, weight, bias, _, window = operands_of("wide")
    sizes = []
    multiply = torch.addmm

    def recorded(bias, slab, matrix, out):
        sizes.append(slab.nbytes)
        return multiply(bias, slab, matrix, out=out)

    monkeypatch.setattr(torch, "addmm", recorded)
    monkeypatch.setattr(convolution_ways, "SLAB", 1 << 14)
    convolution_ways.Products().forward(x, weight, bias, Windows(*map(tuple, window[:3])))
    assert len(sizes) > 10
    assert max(sizes) <= 1 << 14


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("shape", "strides", "padding", "extra", "dilations"),
    [
        ([2, 4, 11], [3], [1], [2], [1]),
        ([2, 4, 6, 5], [2, 3], [1, 0], [1, 0], [1, 2]),
        ([1, 4, 3, 4, 3], [2, 1, 2], [1, 0, 1], [1, 0, 0], [1, 1, 1]),
    ],
)
def test_transposed_convolutions_agree_with_float64(shape, strides, padding, extra, dilations, groups, take):
    generator = torch.Generator().manual_seed(groups)
    rank = len(strides)
    x, weight, bias = (torch.randn(extents, generator=generator) for extents in (shape, [4, 3, *[3] * rank], [3 * groups]))
    transpose = [torch.nn.functional.conv_transpose1d, torch.nn.functional.conv_transpose2d, torch.nn.functional.conv_transpose3d]
    exact = transpose[rank - 1](x.double(), weight.double(), bias.double(), strides, padding, extra, groups, dilations)
    for name in convolutions.possible_ways("input", max(rank, 2) + 2, groups):
        take(name)
        found = convolutions.transposed(x, weight, bias, strides, padding, extra, dilations, groups, True)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_no_image_has_no_results():
    x, weight, bias, dy, window = operands_of("signal")
    assert convolutions.convolve(x[:0], weight, bias, *window, True).shape == (0, 12, 50)
    assert convolutions.input_gradient(dy[:0], weight, x[:0], *window, True).shape == (0, 8, 50)
    assert not convolutions.weight_gradient(dy[:0], x[:0], weight, *window, True).any()


@pytest.mark.parametrize("exchanged", [False, True])
def test_the_part_of_a_trial_keeps_its_rows_whole(exchanged):
    windows = Windows((1, 2), (1, 19), (1, 1))
    x = torch.empty(4, 8, 172, 600)
    flows = torch.empty(4, 8, *places(x.shape, (3, 39), windows))
    assert list(flows.shape[2:]) == [172, 300]
    images, part = convolutions._part(x, flows, (3, 39), windows, exchanged)
    assert list(part.shape) == ([1, 8, 172, 23] if exchanged else [1, 8, 13, 300])
    assert places(images.shape, (3, 39), windows) == list(part.shape[2:])
