"""Preprocessing as operators of a model: what ONNX Runtime makes of decoded images, beside what Pillow and NumPy make of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from PIL import Image

import burnish
from burnish.data import DataDescription
from burnish.data.image.reader import ImageReader
from burnish.data.preprocessing import PRESETS, read_pixels
from burnish.errors import ConfigurationError, DataError
from burnish.graph import Builder
from burnish.surgery import prepend_preprocessing
from specs.program_inputs import data_entry

SIZES = [(40, 61), (61, 40), (33, 33), (20, 90), (17, 19), (200, 300)]


def passes_on(*shape: int, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """A model that gives its input back."""
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(["batch", *shape]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20}, name="passes_on")
    y = Builder(graph).op("Identity", Builder(graph).tensor(x))
    y.value.name = "y"
    graph.outputs.append(y.value)
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": images})[0]


@pytest.mark.parametrize(
    ("shape", "pixels"),
    [
        ((3, 32, 32), "imagenet"),
        ((3, 24, 33), {"preset": "imagenet", "interpolation": "bicubic"}),
        ((3, 21, 21), "caffe"),
        ((31, 33, 3), "unit"),
        ((3, 30, 29), {"preset": "raw", "interpolation": "nearest"}),
        ((1, 28, 28), {"mean": 0.5, "std": 0.25}),
        ((28, 28), {"interpolation": "bicubic"}),
        ((3, 16, 16), {"preset": "-1..1", "resize": "crop", "shorter_side": 19}),
    ],
)
def test_the_model_reads_images_as_the_host_prepares_them(tmp_path, shape, pixels):
    """Pixels that are interpolated differ by one of 255 at most; by ``nearest`` few are others, those between two pixels."""
    described = read_pixels(pixels)
    reader = ImageReader(data_entry(*shape), described, "test")
    model = prepend_preprocessing(passes_on(*shape), pixels)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    level = described.scale / min(described.std)
    differing = []
    for number, (height, width) in enumerate(SIZES):
        image = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        path = tmp_path / f"{number}.png"
        Image.fromarray(image).save(path)
        expected = reader.numbers([reader.read(path)])
        (found,) = session.run(None, {"x": image[None]})
        assert found.shape == expected.shape
        difference = np.abs(found - expected) / level
        if described.interpolation != "nearest":
            assert difference.max() <= 1 + 1e-4
        differing.append((difference > 0.5).mean())
    # Noise on purpose: where Pillow resizes along the height first, a fifth of such pixels round the other way.
    assert max(differing) < 0.3
    assert np.median(differing) < 0.06


def test_several_images_at_once():
    images = np.random.default_rng(0).integers(0, 256, (3, 20, 30, 3), np.uint8)
    model = prepend_preprocessing(passes_on(3, 8, 8), "imagenet")
    alone = np.concatenate([run(model, image[None]) for image in images])
    np.testing.assert_array_equal(run(model, images), alone)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.UINT8])
def test_the_dtype_of_the_input(dtype):
    images = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 3), np.uint8)
    found = run(prepend_preprocessing(passes_on(8, 8, 3, dtype=dtype), "raw"), images)
    assert found.dtype == dtype.numpy()
    np.testing.assert_array_equal(found, images)


def test_what_the_model_says_of_its_pixels_is_done_and_said_no_more():
    model = passes_on(3, 8, 8)
    model.metadata_props.update(DataDescription(PRESETS["imagenet"]).metadata())
    with_images = prepend_preprocessing(model)
    onnx.checker.check_model(ir.to_proto(with_images), full_check=True)
    assert DataDescription.read(with_images.metadata_props).preprocessing == read_pixels(
        {"preset": "raw", "channels": "rgb", "layout": "NHWC", "resize": "crop", "shorter_side": 9, "size": (9, 9)}
    )
    (value,) = with_images.graph.inputs
    assert (value.name, value.dtype, str(value.shape)) == ("x", ir.DataType.UINT8, "[batch,height,width,3]")
    images = np.random.default_rng(0).integers(0, 256, (1, 30, 20, 3), np.uint8)
    np.testing.assert_array_equal(run(with_images, images), run(prepend_preprocessing(passes_on(3, 8, 8), "imagenet"), images))
    assert burnish.load(model).graph.inputs[0].dtype == ir.DataType.FLOAT


@pytest.mark.parametrize(
    "pixels",
    ["unit", {"interpolation": "bicubic"}, {"preset": "imagenet", "shorter_side": 12}, {"interpolation": "nearest"}],
)
def test_files_are_read_for_the_model_as_they_were_without_it(tmp_path, pixels):
    """Twice the same resize: the second, in the model, finds images of its own size."""
    described = read_pixels(pixels)
    before = ImageReader(data_entry(3, 8, 8), described, "test")
    model = prepend_preprocessing(passes_on(3, 8, 8), pixels)
    with_images = DataDescription.read(model.metadata_props).preprocessing
    assert with_images is not None
    reader = ImageReader(data_entry("height", "width", 3, dtype=ir.DataType.UINT8), with_images, "test")
    for number, (height, width) in enumerate(SIZES):
        path = tmp_path / f"{number}.png"
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)).save(path)
        found = run(model, reader.numbers([reader.read(path)]))
        np.testing.assert_allclose(found, before.numbers([before.read(path)]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (passes_on(3, 8, 8), {}, ConfigurationError, "does not say what is done to its pixels: give a preset, such as"),
        (passes_on(3, 8, 8), {"pixels": {"interpolation": "box"}}, ConfigurationError, "ONNX has no 'box' interpolation"),
        (passes_on(3, 8, 8), {"pixels": "unit", "input": "z"}, ConfigurationError, "has no 'z'; name the input .*: 'x'"),
        (passes_on(5), {"pixels": "unit"}, DataError, "which is not that of images"),
    ],
)
def test_what_cannot_be_put_into_a_model(model, options, error, message):
    with pytest.raises(error, match=message):
        prepend_preprocessing(model, **options)
