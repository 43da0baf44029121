"""Operators that read images at points: whole models beside PyTorch, batches of any size, and batches of none."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

import burnish
from burnish import engines
from burnish.errors import EngineError

ENGINES = ("onnxruntime", "torch", "reference")
TRANSFORMER = """<ir_version: 8, opset_import: ["" : 20]>
spatial_transformer (float[batch, 1, 6, 7] x, float[42, 6] localization, float[6] bias) => (float[batch, 1, 6, 7] y) {
  rows = Flatten (x)
  numbers = Gemm (rows, localization, bias)
  shape = Constant <value_ints = [-1, 2, 3]> ()
  maps = Reshape (numbers, shape)
  size = Shape (x)
  grid = AffineGrid (maps, size)
  y = GridSample <padding_mode = "border"> (x, grid)
}"""
BILINEAR = """<ir_version: 8, opset_import: ["" : 16]>
sampled (float[batch, 2, 4, 5] x, float[batch, rows, 3, 2] grid) => (float[batch, 2, rows, 3] y) {
  y = GridSample <mode = "bilinear", align_corners = 1> (x, grid)
}"""


def transformer_in_torch(x: torch.Tensor, localization: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    maps = (x.flatten(1) @ localization + bias).reshape(-1, 2, 3)
    grid = functional.affine_grid(maps, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_spatial_transformer_has_the_gradients_of_pytorch_at_any_batch(engine: str) -> None:
    rng = np.random.default_rng(0)
    model = burnish.grad(onnx.parser.parse_model(TRANSFORMER), wrt=["x", "localization", "bias"], of="y")
    run = engines.get(engine).load(model)
    for batch in (1, 3):
        values = {
            "x": rng.standard_normal((batch, 1, 6, 7)),
            "localization": 0.05 * rng.standard_normal((42, 6)),
            "bias": np.array([0.9, 0.1, 0.05, -0.1, 1.1, -0.07]),
        }
        cotangent = rng.standard_normal((batch, 1, 6, 7))
        leaves = {name: torch.tensor(array.astype(np.float32), requires_grad=True) for name, array in values.items()}
        y = transformer_in_torch(*leaves.values())
        expected = torch.autograd.grad(y, list(leaves.values()), torch.tensor(cotangent.astype(np.float32)))
        feeds = {name: array.astype(np.float32) for name, array in {**values, "cotangent:y": cotangent}.items()}
        results = run(feeds)
        np.testing.assert_allclose(results["y"], y.detach().numpy(), rtol=2e-5, atol=2e-5)
        for name, gradient in zip(leaves, expected, strict=True):
            scale = float(gradient.abs().max())
            np.testing.assert_allclose(results[f"grad:{name}"], gradient.numpy(), rtol=1e-4, atol=2e-5 * scale, err_msg=name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("batch", "rows"), [(2, 4), (0, 4), (2, 0)])
def test_a_file_of_opset_16_samples_batches_of_any_size(engine: str, batch: int, rows: int) -> None:
    rng = np.random.default_rng(1)
    x, grid = rng.standard_normal((batch, 2, 4, 5)), rng.uniform(-1.2, 1.2, (batch, rows, 3, 2))
    cotangent = rng.standard_normal((batch, 2, rows, 3))
    run = engines.get(engine).load(burnish.grad(onnx.parser.parse_model(BILINEAR), wrt=["x", "grid"], of="y"))
    feeds = {"x": x, "grid": grid, "cotangent:y": cotangent}
    results = run({name: array.astype(np.float32) for name, array in feeds.items()})
    leaves = [torch.tensor(array, requires_grad=True) for array in (x, grid)]
    y = functional.grid_sample(*leaves, align_corners=True)
    expected = torch.autograd.grad(y, leaves, torch.tensor(cotangent))
    for name, gradient in zip(("x", "grid"), expected, strict=True):
        assert results[f"grad:{name}"].shape == tuple(gradient.shape)
        np.testing.assert_allclose(results[f"grad:{name}"], gradient.numpy(), rtol=1e-4, atol=1e-4)


VOLUME = """<ir_version: 8, opset_import: ["" : 20]>
sampled (float[1, 1, 2, 2, 2] x, float[1, 1, 1, 1, 3] grid) => (float[1, 1, 1, 1, 1] y) {
  y = GridSample <mode = "cubic"> (x, grid)
}"""
SIGNAL = """<ir_version: 8, opset_import: ["" : 19]>
deformed (float[1, 1, 4] x, float[1, 1, 2] w, float[1, 2, 3] offset) => (float[1, 1, 3] y) {
  y = DeformConv (x, w, offset)
}"""


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (VOLUME, "GridSample .*volumes by cubic interpolation, which the torch engine needs to run it; use engine='onnxruntime'"),
        (SIGNAL, "DeformConv .*its data are no images, which the torch engine needs to run it; use engine='onnxruntime'"),
    ],
)
def test_what_the_torch_engine_does_not_read_is_named(text: str, match: str) -> None:
    model = onnx.parser.parse_model(text)
    shapes = {value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in model.graph.input}
    feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(EngineError, match=match):
        engines.get("torch").load(burnish.load(model))(feeds)


CROPPED = """<ir_version: 8, opset_import: ["" : 18]>
cropped (float[1, 1, 5, 5] x) => (float[1, 1, 3, 7] y) <float[4] roi = {-0.2, 0.1, 0.7, 1.2}, float[2] scales = {0.7, 1.5}> {
  y = Resize <mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize", axes = [2, 3]> (x, roi, scales)
}"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_crop_goes_from_end_to_end_of_the_elements_that_it_has(engine: str) -> None:
    """Scales that give 3.5 and 7.5 elements: by the standard the last of the 3 and 7 lies where the region ends."""
    rng = np.random.default_rng(3)
    x, cotangent = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 1, 5, 5), (1, 1, 3, 7)))
    weights = []
    for start, end, number in ((-0.2, 0.7, 3), (0.1, 1.2, 7)):
        positions = 4 * np.linspace(start, end, number)[:, None]
        inside = (positions >= 0) & (positions <= 4)
        weights.append(inside * np.maximum(1 - np.abs(positions - np.arange(5)), 0))
    rows, columns = weights
    results = engines.get(engine).load(burnish.grad(onnx.parser.parse_model(CROPPED), wrt=["x"], of="y"))(
        {"x": x, "cotangent:y": cotangent}
    )
    np.testing.assert_allclose(results["y"], rows @ x @ columns.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results["grad:x"], rows.T @ cotangent @ columns, rtol=1e-5, atol=1e-5)
