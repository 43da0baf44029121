"""Convolutions by Winograd's minimal filtering: against float64 beside direct ones, and where they come into graphs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.convolution.fusion import use_winograd
from burnish.models import residual_network
from oracles.kernel_graphs import kernel_graphs

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the engine's kernels")

Results = dict[str, torch.Tensor]
SHAPES = [  # images, channels, kernels, height, width, padding: whole blocks and tails of all extents
    (2, 64, 64, 14, 14, (1, 1)),
    (3, 16, 48, 13, 9, (1, 1)),
    (1, 33, 17, 11, 15, (0, 0)),
    (8, 70, 130, 5, 4, (2, 2)),
    (2, 19, 81, 10, 12, (0, 2)),
    (17, 32, 32, 3, 3, (2, 0)),
    (1, 200, 144, 22, 21, (1, 0)),
    (5, 96, 16, 8, 31, (2, 1)),
    (64, 16, 16, 1, 2, (1, 1)),
]


def operands(shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and dy of (images, channels, kernels, height, width, padding)."""
    images, channels, count, height, width = shape[:5]
    padding = shape[5] if len(shape) > 5 else (1, 1)
    generator = torch.Generator().manual_seed(sum(shape[:5]))
    x = torch.randn(images, channels, height, width, generator=generator)
    weight = torch.randn(count, channels, 3, 3, generator=generator)
    dy = torch.randn(images, count, height + 2 * padding[0] - 2, width + 2 * padding[1] - 2, generator=generator)
    return tuple(tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight, dy))


def winograd(x, weight, dy, padding, bias=None) -> Results:
    return {
        "y": torch.ops.burnish.winograd_convolution(x, weight, bias, padding),
        "dx": torch.ops.burnish.winograd_input_gradient(dy, weight, padding),
        "dw": torch.ops.burnish.winograd_weight_gradient(dy, x, padding),
    }


def direct(x, weight, dy, padding, bias=None) -> Results:
    ones = [1, 1]
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, ones, padding, ones, False, [0, 0], 1, [True, True, False]
    )
    return {"y": functional.conv2d(x, weight, bias, padding=padding), "dx": dx, "dw": dw}


def exact(x, weight, dy, padding, bias=None) -> Results:
    bias = None if bias is None else bias.double()
    return direct(x.double(), weight.double(), dy.double(), padding, bias)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape[:5])))
def test_errors_are_near_those_of_direct_convolution(shape, threads):
    x, weight, dy = operands(shape)
    padding = list(shape[5])
    bias = torch.randn(shape[2], generator=torch.Generator().manual_seed(0))
    found = winograd(x, weight, dy, padding, bias)
    beside = direct(x, weight, dy, padding, bias)
    expected = exact(x, weight, dy, padding, bias)
    for name, result in expected.items():
        assert found[name].shape == result.shape
        assert found[name].is_contiguous(memory_format=torch.channels_last)
        assert not torch.equal(found[name], beside[name]), f"{name} was not computed by Winograd's filtering"
        error = (found[name].double() - result).norm() / result.norm()
        error_of_direct = (beside[name].double() - result).norm() / result.norm()
        assert error < 2.5 * error_of_direct + 1e-7


def test_the_same_bits_from_run_to_run(threads):
    x, weight, dy = operands((3, 48, 80, 15, 13))
    first, again = (winograd(x, weight, dy, [1, 1]) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_any_layout_gives_the_same_bits():
    x, weight, dy = operands((2, 40, 24, 12, 10))
    expected = winograd(x, weight, dy, [1, 1])
    contiguous = winograd(*(tensor.contiguous() for tensor in (x, weight, dy)), [1, 1])
    strided = [torch.stack([tensor, tensor], dim=-1)[..., 1] for tensor in (x, weight, dy)]
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert all(torch.equal(expected[name], contiguous[name]) for name in expected)
    found = winograd(*strided, [1, 1])
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("place", [(6, 9), (9, 6), (0, 15), (15, 4)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_what_it_reaches_in_direct_convolution(poison, place):
    row, column = place
    x, weight, dy = operands((2, 32, 32, 16, 16))
    x[1, 5, row, column] = poison
    dy[0, 7, row, column] = poison
    found, beside = winograd(x, weight, dy, [1, 1]), direct(x, weight, dy, [1, 1])
    for name in ("y", "dx"):
        assert torch.equal(found[name].isfinite(), beside[name].isfinite()), name
        assert not found[name].isfinite().all()
    touched = ~beside["dw"].isfinite()
    assert touched.any()
    assert torch.equal(~found["dw"].isfinite(), touched.any(dim=3, keepdim=True).any(dim=2, keepdim=True).expand_as(touched))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 3, 64, 20, 20), (4, 64, 8, 20, 20), (1, 32, 32, 4, 4), (0, 32, 32, 8, 8)])
def test_what_would_not_win_is_left_to_direct_convolution(shape):
    x, weight, dy = operands(shape)
    found, expected = winograd(x, weight, dy, [1, 1]), direct(x, weight, dy, [1, 1])
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_operands_that_do_not_fit_are_refused():
    x, weight, dy = operands((2, 32, 48, 8, 8))
    kernels_of = torch.ops.burnish
    with pytest.raises(RuntimeError, match="same number of channels"):
        kernels_of.winograd_convolution(x, weight.transpose(0, 1), None, [1, 1])
    with pytest.raises(RuntimeError, match="kernels of 3x3"):
        kernels_of.winograd_convolution(x, weight[..., :2], None, [1, 1])
    with pytest.raises(RuntimeError, match="padding of 0 to 2"):
        kernels_of.winograd_convolution(x, weight, None, [3, 1])
    with pytest.raises(RuntimeError, match="float32"):
        kernels_of.winograd_input_gradient(dy.double(), weight.double(), [1, 1])
    with pytest.raises(RuntimeError, match="a channel of dy"):
        kernels_of.winograd_input_gradient(x, weight, [1, 1])
    with pytest.raises(RuntimeError, match="gradient of their 3x3"):
        kernels_of.winograd_weight_gradient(dy, x, [0, 1])


def graph_of(attributes: dict, dtype: ir.DataType = ir.DataType.FLOAT, extents=(3, 3)) -> ir.Graph:
    x = ir.val("x", dtype, [2, 32, 9, 9])
    weight = ir.val("w", dtype, [32, 32 // attributes.get("group", 1), *extents])
    node = ir.node("Conv", [x, weight], attributes)
    node.outputs[0].dtype = dtype
    return ir.Graph([x, weight], [node.outputs[0]], nodes=[node], opset_imports={"": 21})


@pytest.mark.parametrize(
    ("attributes", "padding"),
    [
        ({}, [0, 0]),
        ({"pads": [1, 2, 1, 2], "strides": [1, 1], "dilations": [1, 1]}, [1, 2]),
        ({"auto_pad": "SAME_LOWER"}, [1, 1]),
        ({"auto_pad": "VALID"}, [0, 0]),
        ({"pads": [1, 1, 0, 1]}, None),
        ({"pads": [3, 3, 3, 3]}, None),
        ({"pads": [-1, 0, -1, 0]}, None),
        ({"strides": [2, 2]}, None),
        ({"dilations": [1, 2]}, None),
        ({"group": 2}, None),
    ],
)
def test_which_convolutions_are_taken(attributes, padding):
    graph = graph_of(attributes)
    use_winograd(graph)
    (node,) = graph
    assert node.op_type == ("Conv" if padding is None else "WinogradConv")
    assert padding is None or list(node.attributes["padding"].as_ints()) == padding


def test_other_types_and_extents_are_not_taken():
    for graph in (graph_of({}, ir.DataType.BFLOAT16), graph_of({}, extents=(1, 1)), graph_of({}, extents=(5, 3))):
        use_winograd(graph)
        assert [node.op_type for node in graph] == ["Conv"]


def step_graph(program: burnish.Program, winograd: bool) -> set[str]:
    known = translated_operators(BURNISH_DOMAIN) | FUSED
    return {node.op_type for node in fuse(kernel_graphs(program, known)["step"], kernels=True, winograd=winograd).graph}


@pytest.mark.slow
def test_a_program_trains_alike_with_and_without():
    program = burnish.compile(residual_network(), optimizer=burnish.optim.sgd(lr=0.01, momentum=0.9))
    ours = {"WinogradConv", "WinogradConvInputGrad", "WinogradConvWeightGrad"}
    assert ours <= step_graph(program, winograd=True)
    assert not ours & step_graph(program, winograd=False)
    generator = np.random.default_rng(0)
    engines = (TorchEngine(), TorchEngine(winograd=False), TorchEngine(channels_last=False))
    sessions = [burnish.Session(program, engine, threads=2) for engine in engines]
    for size in (6, 6, 3):
        batch = {"x": generator.normal(size=(size, 1, 8, 8)).astype(np.float32), "labels": generator.integers(0, 10, size)}
        losses = [session.step(batch)["loss"] for session in sessions]
        assert losses == pytest.approx([losses[1]] * 3, rel=1e-5)
    states = [session.state() for session in sessions]
    for name, array in states[1].items():
        if name.startswith(("param/", "stat/")):
            for other in (states[0], states[2]):
                np.testing.assert_allclose(other[name], array, rtol=2e-3, atol=2e-4, err_msg=name)
    different = [name for name, array in states[0].items() if not np.array_equal(array, states[1][name])]
    assert different, "the option changed nothing"
