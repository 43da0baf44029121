"""Gradients of convolutions in bfloat16 by the engine's kernel and as products: against float64, and where they come in."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.convolution import products as convolution_gradients
from burnish.engines.torch.translate.translation import translate
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.convolution.fusion import use_narrow_gradients
from burnish.kernels.thresholds import NarrowConvolutions
from oracles.combinations import diagonal, named
from oracles.small_networks import batch_of, mobile

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the engine's kernels")

SHAPES = [  # images, kernels, channels, height, width, extents, strides, padding: whole blocks and tails, odd batches
    (2, 64, 64, 14, 14, (1, 1), (1, 1), (0, 0)),
    (3, 17, 33, 9, 11, (1, 1), (1, 1), (0, 0)),
    (1, 5, 3, 1, 1, (1, 1), (1, 1), (0, 0)),
    (5, 24, 100, 7, 7, (1, 1), (2, 2), (0, 0)),
    (2, 40, 48, 10, 9, (1, 1), (3, 2), (0, 0)),
    (2, 40, 48, 10, 9, (1, 1), (1, 1), (1, 0)),
    (16, 64, 64, 28, 28, (1, 1), (1, 1), (0, 0)),
    (4, 32, 64, 28, 28, (3, 3), (1, 1), (1, 1)),
    (3, 17, 33, 9, 11, (3, 3), (2, 2), (1, 1)),
    (1, 8, 32, 9, 9, (3, 3), (1, 1), (1, 1)),
    (6, 70, 96, 7, 7, (3, 3), (1, 1), (1, 1)),
    (9, 33, 31, 14, 14, (3, 3), (2, 2), (1, 1)),
    (2, 9, 20, 12, 13, (5, 3), (2, 1), (2, 1)),
    (2, 9, 20, 12, 13, (2, 2), (3, 3), (0, 0)),
    (2, 9, 20, 4, 5, (2, 3), (1, 2), (3, 4)),
    (2, 264, 320, 6, 6, (3, 3), (1, 1), (1, 1)),
]


def operands(shape) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """dy, x, and the window: extents, strides and padding."""
    images, count, channels, height, width, *window = shape
    generator = torch.Generator().manual_seed(images + count + channels)
    out = [(side + 2 * pad - extent) // stride + 1 for side, extent, stride, pad in zip((height, width), *window, strict=True)]
    sizes = [(images, count, *out), (images, channels, height, width)]
    dy, x = (torch.randn(size, generator=generator).bfloat16().contiguous(memory_format=torch.channels_last) for size in sizes)
    return dy, x, [list(part) for part in window]


def of_pytorch(dy: torch.Tensor, x: torch.Tensor, window: list[list[int]]) -> torch.Tensor:
    extents, strides, padding = window
    weight = x.new_empty(dy.shape[1], x.shape[1], *extents)
    given = (dy, x, weight, None, strides, padding, [1, 1], False, [0, 0], 1, [False, True, False])
    return torch.ops.aten.convolution_backward(*given)[1]


def own(dy: torch.Tensor, x: torch.Tensor, window: list[list[int]]) -> torch.Tensor:
    return torch.ops.burnish.convolution_weight_gradient_bfloat16(dy, x, *window)


def check(found: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Half a unit in the last place of the result, and what sums of float32 lose of their terms' magnitudes."""
    assert found.dtype == torch.bfloat16
    assert found.shape == exact.shape
    excess = (found.double() - exact).abs() - 2.0**-8 * exact.abs() - 2.0**-19 * magnitude
    assert excess.max() <= 0


@needs_kernels
@diagonal(("shape", named(SHAPES, lambda shape: "-".join(map(str, shape[:5])))), ("workers", [1, 2, 3, 5]), test=34)
def test_gradients_of_kernels_are_exact_to_their_rounding(shape, workers):
    dy, x, window = operands(shape)
    before = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        found, again = own(dy, x, window), own(dy, x, window)
    finally:
        torch.set_num_threads(before)
    exact, magnitude = of_pytorch(dy.double(), x.double(), window), of_pytorch(dy.double().abs(), x.double().abs(), window)
    check(found, exact, magnitude)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, again)


@needs_kernels
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[8]], ids=["pixel", "window"])
def test_any_layout_gives_the_same_bits(shape):
    dy, x, window = operands(shape)
    expected = own(dy, x, window)
    plain = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (dy, x)]
    strided = [torch.stack([tensor, tensor], dim=-1)[..., 1] for tensor in (dy, x)]
    for other in (plain, strided):
        assert torch.equal(own(*other, window), expected)


@needs_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[8], SHAPES[9]], ids=["pixel", "strided", "window", "alone"])
def test_what_is_not_finite_reaches_what_it_meets(shape, poison):
    for place in ((0, 0, 0, 0), (-1, 5, -1, -1), (0, 2, 1, 1)):
        for which in (0, 1):
            dy, x, window = operands(shape)
            (dy, x)[which][place] = poison
            # Padding is not multiplied: which kernels' pixels meet it follows from a gradient of finite numbers.
            met = [torch.ones_like(tensor, dtype=torch.float64) for tensor in (dy, x)]
            met[which].zero_()[place] = 1
            reached = of_pytorch(*met, window) > 0
            assert torch.equal(own(dy, x, window).isfinite(), ~reached)


@needs_kernels
def test_a_batch_of_nothing_has_a_gradient_of_zeros():
    window = [[3, 3], [1, 1], [1, 1]]
    dw = own(torch.empty(0, 32, 4, 4).bfloat16(), torch.empty(0, 16, 4, 4).bfloat16(), window)
    assert torch.equal(dw, torch.zeros(32, 16, 3, 3).bfloat16())
    assert own(torch.empty(2, 0, 4, 4).bfloat16(), torch.empty(2, 16, 4, 4).bfloat16(), window).shape == (0, 16, 3, 3)


@needs_kernels
def test_operands_that_do_not_fit_are_refused():
    dy, x, window = operands(SHAPES[7])
    with pytest.raises(RuntimeError, match="bfloat16 images"):
        own(dy.float(), x.float(), window)
    with pytest.raises(RuntimeError, match="bfloat16 images"):
        own(dy[0], x[0], window)
    for wrong in ([[3], [1], [1]], [[3, 3], [0, 1], [1, 1]], [[0, 3], [1, 1], [1, 1]], [[3, 3], [1, 1], [-1, 1]]):
        with pytest.raises(RuntimeError, match="extents, strides and padding"):
            own(dy, x, wrong)
    for given in ((dy[:1], x), (dy[:, :, 1:], x), (dy, x[:, :, :, 1:])):
        with pytest.raises(RuntimeError, match="gradient of their convolution"):
            own(*given, window)
    with pytest.raises(RuntimeError, match="gradient of their convolution"):
        own(dy, x, [[3, 3], [1, 1], [0, 0]])


CHOICES = [  # a shape, and whether the kernel is asked for
    ((16, 64, 64, 14, 14, (1, 1), (1, 1), (0, 0)), True),
    ((4, 64, 64, 14, 14, (1, 1), (1, 1), (0, 0)), False),  # few pixels
    ((1, 64, 64, 16, 16, (1, 1), (1, 1), (0, 0)), True),
    ((2, 64, 64, 14, 14, (1, 1), (2, 2), (0, 0)), True),
    ((16, 64, 8, 14, 14, (1, 1), (1, 1), (0, 0)), False),  # few channels
    ((2, 64, 64, 14, 14, (3, 3), (1, 1), (1, 1)), True),
    ((1, 64, 64, 14, 14, (3, 3), (1, 1), (1, 1)), False),  # an image alone
    ((3, 64, 64, 14, 14, (3, 3), (1, 1), (1, 1)), False),
    ((9, 64, 64, 14, 14, (3, 3), (1, 1), (1, 1)), False),
    ((11, 64, 64, 14, 14, (3, 3), (1, 1), (1, 1)), True),
    ((2, 64, 48, 14, 14, (3, 3), (1, 1), (1, 1)), False),  # channels that leave much of a panel empty
    ((2, 16, 64, 14, 14, (3, 3), (1, 1), (1, 1)), False),
    ((2, 40, 64, 4, 300, (3, 3), (1, 1), (1, 1)), False),  # wide maps
]


@needs_kernels
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize(("shape", "taken"), CHOICES)
def test_gradients_of_kernels_whichever_way_they_are_computed(shape, taken, built, monkeypatch):
    dy, x, window = operands(shape)
    asked, found_kernel = [], kernels.find_operator
    monkeypatch.setattr(kernels, "find_operator", lambda name: asked.append(name) or (found_kernel(name) if built else None))
    weight = torch.empty(dy.shape[1], x.shape[1], *window[0])
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported() and not (taken and built):
        pytest.skip("PyTorch's own convolutions round between terms where the processor has no vectors for bfloat16")
    found = convolution_gradients.weight_gradient(dy, x, weight, *window[1:])
    assert bool(asked) == taken
    exact, magnitude = of_pytorch(dy.double(), x.double(), window), of_pytorch(dy.double().abs(), x.double().abs(), window)
    check(found, exact, magnitude)


def test_images_with_their_channels_second_are_left_to_pytorch(monkeypatch):
    dy, x, window = operands(CHOICES[0][0])
    monkeypatch.setattr(kernels, "find_operator", pytest.fail)
    plain = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (dy, x)]
    found = convolution_gradients.weight_gradient(*plain, torch.empty(64, 64, 1, 1), *window[1:])
    check(found, *(of_pytorch(a, b, window) for a, b in ((dy.double(), x.double()), (dy.double().abs(), x.double().abs()))))


@pytest.mark.parametrize("images", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "channels", "strides"), [(64, 32, [2, 2]), (33, 47, [1, 2]), (40, 64, [3, 2]), (32, 32, [2, 5]), (7, 40, [2, 2])]
)
def test_gradients_of_images_that_are_seen_in_part(count, channels, strides, dtype, images):
    generator = torch.Generator().manual_seed(count)
    out = [(side - 1) // stride + 1 for side, stride in zip((9, 10), strides, strict=True)]
    dy = torch.randn(images, count, *out, generator=generator).bfloat16().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(count, channels, 1, 1, generator=generator).bfloat16()
    x = torch.empty(images, channels, 9, 10, dtype=dtype).contiguous(memory_format=torch.channels_last)
    if count < NarrowConvolutions.LEAST_CHANNELS and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("PyTorch's own convolutions round between terms where the processor has no vectors for bfloat16")
    found = convolution_gradients.strided_input_gradient(dy, weight, x, strides)

    def of_float64(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        dx = torch.zeros(x.shape, dtype=torch.float64)
        dx[:, :, :: strides[0], :: strides[1]] = torch.einsum("nkhw,kc->nchw", dy, weight[:, :, 0, 0])
        return dx

    assert found.is_contiguous(memory_format=torch.channels_last)
    if images:
        check(found, of_float64(dy.double(), weight.double()), of_float64(dy.double().abs(), weight.double().abs()))
    else:
        assert found.shape == x.shape
        assert found.dtype == torch.bfloat16


def gradients(weight=(64, 32, 1, 1), dtype=ir.DataType.BFLOAT16, of_images=ir.DataType.BFLOAT16, **attributes) -> ir.Graph:
    """The gradients of a convolution, as they are rewritten."""
    x, w = ir.val("x", of_images, ["batch", weight[1], 17, 17]), ir.val("w", dtype, list(weight))
    dy = ir.val("dy", dtype, ["batch", weight[0], None, None])
    places = {"ConvInputGrad": [dy, w, x], "ConvWeightGrad": [dy, x, w]}
    nodes = [ir.node(kind, operands, attributes, domain=BURNISH_DOMAIN) for kind, operands in places.items()]
    for node in nodes:
        node.outputs[0].dtype = dtype
    results = [node.outputs[0] for node in nodes]
    graph = ir.Graph([x, w, dy], results, nodes=nodes, opset_imports={"": 21, BURNISH_DOMAIN: 1})
    use_narrow_gradients(graph)
    return graph


def kinds(**given) -> list[str]:
    return [node.op_type for node in gradients(**given)]


def test_which_gradients_are_taken():
    apart, kernels_alone, both = (
        ["ConvInputGrad", "ConvWeightGrad"],
        ["ConvInputGrad", "ConvWeightGradNarrow"],
        ["ConvInputGradNarrow", "ConvWeightGradNarrow"],
    )
    assert kinds() == kernels_alone
    assert kinds(weight=(64, 32, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2]) == kernels_alone
    assert kinds(strides=[2, 2]) == both
    assert kinds(strides=[1, 2], pads=[0, 0, 0, 0], dilations=[1, 1], group=1) == both
    assert kinds(strides=[2, 2], pads=[1, 1, 1, 1]) == kernels_alone
    assert kinds(strides=[2, 2], of_images=ir.DataType.FLOAT) == ["ConvInputGradNarrow", "ConvWeightGrad"]
    for dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        assert kinds(dtype=dtype, strides=[2, 2]) == apart
    for attributes in ({"auto_pad": "SAME_UPPER"}, {"pads": [0, 0, 1, 1]}, {"group": 2}, {"dilations": [2, 1]}):
        assert kinds(strides=[2, 2], **attributes) == apart
    for weight in ((64, 32, 1), (64, 32, 1, 1, 1), (64, 32, None, 1)):
        assert kinds(weight=weight) == apart


@pytest.mark.parametrize("suits", [True, False])
@pytest.mark.parametrize("window", [{"strides": [2, 2]}, {"weight": (64, 32, 3, 3), "pads": [1, 1, 1, 1]}])
def test_what_they_become_depends_on_the_processor(window, suits, monkeypatch):
    monkeypatch.setattr("burnish.engines.torch.bindings.convolution.has_narrow_vectors", lambda: suits)
    module = translate(ir.Model(gradients(**window), ir_version=10), torch.device("cpu"))
    called = [getattr(node.target, "__name__", "") for node in module.graph.nodes if node.op == "call_function"]
    own_names = {"weight_gradient", "strided_input_gradient"}
    if suits:
        assert own_names & set(called) == (own_names if "weight" not in window else {"weight_gradient"})
    else:
        assert not own_names & set(called)
        assert sum("convolution_backward" in name for name in called) == 2


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="bfloat16 runs in float32 on this processor")
def test_a_network_trains_alike_with_and_without(monkeypatch):
    monkeypatch.setattr("burnish.engines.torch.bindings.convolution.has_narrow_vectors", lambda: True)
    monkeypatch.setattr(NarrowConvolutions, "LEAST_CHANNELS", 1)
    asked = []
    monkeypatch.setattr(convolution_gradients, "_is_fast", lambda *given: asked.append(given) is None)
    model = mobile()
    program = burnish.compile(model, optimizer=burnish.optim.sgd(lr=0.01, momentum=0.9), precision="bfloat16")
    sessions = [burnish.Session(program, engine, threads=2) for engine in (TorchEngine(), TorchEngine(compile="none"))]
    for seed in range(2):
        losses = [session.step(batch_of(model, seed))["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert asked
    states = [session.state() for session in sessions]
    for name, array in states[1].items():
        if name.startswith("param/"):
            np.testing.assert_allclose(states[0][name], array, rtol=5e-2, atol=5e-3, err_msg=name)
