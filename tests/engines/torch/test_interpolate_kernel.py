"""The kernel of Resize and of its gradient: beside PyTorch's interpolation, its adjoint, and ONNX Runtime in programs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch.nn import functional

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.resize import UNCHANGED, Interpolation, Taken, source_positions, taps
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from oracles.combinations import spread
from oracles.kernel_graphs import kernel_graphs

needs_kernels = pytest.mark.skipif(not kernels.available("interpolate"), reason="needs the engine's kernels")

LINEAR = Interpolation("linear", "half_pixel", "round_prefer_floor", -0.75, False, False, 0.0)


def linear(extent: int, target: int) -> Taken:
    scale = target / extent
    return Taken(*taps(source_positions(extent, target, scale, "half_pixel", (0.0, 1.0), np.float64), extent, scale, LINEAR))


def images(*shape: int, last: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.randn(shape, generator=generator).contiguous(memory_format=layout)


@needs_kernels
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("channels", [1, 3, 16, 37])
@pytest.mark.parametrize("target", [(14, 22), (7, 30), (20, 11), (5, 4)])
def test_images_are_interpolated_as_pytorch_does(target, channels, last, threads):
    x = images(3, channels, 7, 11, last=last)
    rows, columns = linear(7, target[0]), linear(11, target[1])
    y = torch.ops.burnish.interpolate(x, *rows.table(), *columns.table())
    expected = functional.interpolate(x.double(), size=target, mode="bilinear", align_corners=False)
    assert (y - expected).abs().max() < 1e-6
    assert channels == 1 or y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    # The adjoint, by its definition: <A x, dy> = <x, A' dy>.
    dy = images(3, channels, *target, last=last)
    dx = torch.ops.burnish.interpolate(dy, *rows.turned(7), *columns.turned(11))
    assert dx.shape == x.shape
    exact = x.double().requires_grad_()
    functional.interpolate(exact, size=target, mode="bilinear", align_corners=False).backward(dy.double())
    assert (dx - exact.grad).abs().max() < 2e-6


@needs_kernels
def test_a_part_of_joined_channels_is_read_where_it_lies():
    whole = images(2, 24, 9, 8, last=True)
    rows, columns = linear(9, 18), linear(8, 16)
    for part in (whole[:, :16], whole[:, 16:], whole[:, 5:6], whole[:, :, 1:7], whole[:, :, :, ::2]):
        height, width = part.shape[2:]
        rows, columns = linear(height, 2 * height), linear(width, 2 * width)
        found = torch.ops.burnish.interpolate(part, *rows.table(), *columns.table())
        assert torch.equal(found, torch.ops.burnish.interpolate(part.contiguous(), *rows.table(), *columns.table()))


@needs_kernels
@pytest.mark.parametrize("last", [True, False])
def test_an_axis_may_stay_as_it_is(last):
    x = images(2, 16, 6, 5, last=last)
    rows, columns = linear(6, 9), linear(5, 3)
    both = torch.ops.burnish.interpolate(x, *rows.table(), *columns.table())
    first = torch.ops.burnish.interpolate(x, *rows.table(), *UNCHANGED)
    assert first.shape == (2, 16, 9, 5)
    assert torch.allclose(torch.ops.burnish.interpolate(first, *UNCHANGED, *columns.table()), both)
    assert torch.equal(torch.ops.burnish.interpolate(x, *UNCHANGED, *UNCHANGED), x)


@needs_kernels
def test_an_element_that_no_result_reads_has_a_gradient_of_zero():
    nearest = Taken(np.array([[0, 3]]), np.ones((1, 2)))
    dx = torch.ops.burnish.interpolate(torch.ones(1, 2, 2, 1), *nearest.turned(5), *UNCHANGED)
    assert dx[0, 0, :, 0].tolist() == [1, 0, 0, 1, 0]


@needs_kernels
def test_places_outside_of_the_image_are_refused():
    starts, places, weights = linear(8, 4).table()
    with pytest.raises(RuntimeError, match="places inside of the image expected"):
        torch.ops.burnish.interpolate(torch.ones(1, 1, 7, 3), starts, places, weights, *UNCHANGED)


def resizing(extents: list[int], operand: list[float] | list[int], attributes: dict[str, object]) -> onnx.ModelProto:
    """A convolution of one pixel, resized beside what it read and joined with it, so that gradients come in parts."""
    rank = len(extents)
    sizes = isinstance(operand[0], int)
    kind = onnx.TensorProto.INT64 if sizes else onnx.TensorProto.FLOAT
    weights = np.random.default_rng(0).normal(size=(5, 3, *[1] * rank)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"]),
        helper.make_node("Concat", ["h", "x"], ["joined"], axis=1),
        helper.make_node("Resize", ["joined", "", *([""] if sizes else []), "operand"], ["y"], **attributes),
    ]
    initializers = [onnx.numpy_helper.from_array(weights, "w"), helper.make_tensor("operand", kind, [len(operand)], operand)]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3, *extents])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "resizing", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


MODELS = {
    "linear": ([6, 7], [1.0, 1.0, 2.0, 2.0], {"mode": "linear"}),
    "corners": ([6, 7], [1.0, 1.0, 1.5, 3.0], {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    "rows": ([6, 7], [1.0, 1.0, 2.5, 1.0], {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
    "sizes": ([6, 7], [9, 14], {"mode": "linear", "axes": [2, 3]}),
    "smaller": ([8, 12], [1.0, 1.0, 0.5, 0.25], {"mode": "linear", "antialias": 1}),
    "cubic": ([6, 7], [1.0, 1.0, 2.0, 2.0], {"mode": "cubic", "cubic_coeff_a": -0.5}),
    "nearest": ([6, 7], [1.0, 1.0, 2.0, 1.7], {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}),
    "signal": ([9], [1.0, 1.0, 2.0], {"mode": "linear"}),
    "volume": ([4, 5, 6], [1.0, 1.0, 2.0, 1.0, 1.5], {"mode": "linear"}),
    "channels": ([6, 7], [1.0, 2.0, 2.0, 1.0], {"mode": "nearest"}),
}


@needs_kernels
@spread("name", list(MODELS), test=4)
def test_programs_train_as_on_onnxruntime(name):
    program = burnish.compile(resizing(*MODELS[name]), loss="mse", optimizer=burnish.optim.sgd(lr=0.1))
    known = translated_operators(BURNISH_DOMAIN) | FUSED
    found = Counter(node.op_type for node in fuse(kernel_graphs(program, known)["step"], kernels=True).graph)
    assert found["FusedResize"] == found["FusedResizeGrad"] == 1
    assert not found["Resize"] + found["ResizeGrad"]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 3, *MODELS[name][0])).astype(np.float32)
    sessions = [burnish.Session(program, engine, threads=1) for engine in (TorchEngine(), "onnxruntime")]
    targets = rng.normal(size=sessions[1].predict({"x": x})["y"].shape).astype(np.float32)
    for size in (2, 2, 1):
        losses = [session.step({"x": x[:size], "targets": targets[:size]})["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    np.testing.assert_allclose(*(session.state()["param/w"] for session in sessions), rtol=1e-5, atol=1e-6)


@needs_kernels
def test_extents_that_a_batch_brings_are_resized_when_they_are_known():
    model = resizing([6, 7], [1.0, 1.0, 2.0, 2.0], {"mode": "linear"})
    for axis in (2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f"extent{axis}"
    program = burnish.compile(model, loss="mse", optimizer="sgd")
    sessions = [burnish.Session(program, engine, threads=1) for engine in (TorchEngine(), "onnxruntime")]
    rng = np.random.default_rng(2)
    for height, width in ((6, 7), (3, 9)):
        x = rng.normal(size=(2, 3, height, width)).astype(np.float32)
        targets = rng.normal(size=(2, 8, 2 * height, 2 * width)).astype(np.float32)
        losses = [session.step({"x": x, "targets": targets}, lr=0.1)["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)
