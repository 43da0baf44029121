"""Pixel preprocessing as part of a model, which then takes decoded images of any size."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.data.model_metadata import DataDescription
from burnish.data.preprocessing import CROP, LARGEST, PixelsLike, Preprocessing, read_pixels
from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.graph.annotations import PIXELS
from burnish.importer import Source, load
from burnish.program import Entry, Role
from burnish.settings import suggestion

RESIZE_MODES = {"nearest": None, "bilinear": "linear", "bicubic": "cubic"}
PILLOW_CUBIC = -0.5
"""Pillow's coefficient of cubic interpolation; its weights of gray are in 65536ths (ITU-R 601)."""
GRAY_WEIGHTS, GRAY_ONE = (19595, 38470, 7471), 1 << 16


def prepend_preprocessing(source: Source, pixels: PixelsLike | None = None, input: str | None = None) -> ir.Model:
    """Return a model that takes decoded images of any size: RGB, uint8, ``[batch, height, width, 3]``.

    Resize, crop, normalization, channel order and layout become standard operators before the old input, whose name the new one
    takes. Resized pixels equal Pillow's within 1 of 255, as Pillow rounds between its two passes, in an order that depends on its
    version. With ``nearest``, ties may differ. EXIF orientation is not applied.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        pixels: a preset, a ``Preprocessing``, or its settings; that of the model's metadata by default.
        input: name of the image input; None if it is the only one.

    Returns:
        A canonical model. Its metadata declare raw pixels, and the size of resized files.

    Raises:
        ConfigurationError: the preprocessing is unknown, ONNX lacks its interpolation, or there is no such input.
        DataError: the input does not take images, or the preprocessing does not fit it or leaves its size open.
        ModelError: invalid ONNX model.
    """
    model = load(source)
    value = _input(model, input)
    described = DataDescription.read(model.metadata_props)
    if pixels is None and described.preprocessing is None:
        raise ConfigurationError(
            "prepend_preprocessing: the model does not say what is done to its pixels: give a preset, such as "
            "pixels='imagenet', or settings"
        )
    assert value.dtype is not None
    assert value.shape is not None
    extents = tuple(extent if isinstance(extent, int) else extent.value for extent in value.shape.dims)
    entry = Entry(value.name or "", Role.DATA, value.dtype, extents)
    base = described.preprocessing
    done = (read_pixels(pixels, base) if base is not None else read_pixels(pixels)) if pixels is not None else base
    assert done is not None
    done = done.for_images(entry, "prepend_preprocessing")
    if done.interpolation not in RESIZE_MODES:
        raise ConfigurationError(
            f"prepend_preprocessing: ONNX has no '{done.interpolation}' interpolation, which the images were resized by: train "
            f"with {', '.join(RESIZE_MODES)}"
        )
    _insert(model, value, done)
    _describe(model, done)
    return load(model)


def _input(model: ir.Model, name: str | None) -> ir.Value:
    inputs = {value.name or "": value for value in model.graph.inputs}
    if name is None and len(inputs) == 1:
        return next(iter(inputs.values()))
    if name is None or name not in inputs:
        asked = "several" if name is None else f"no '{name}'{suggestion(name, inputs)}"
        raise ConfigurationError(
            f"prepend_preprocessing: the model has {asked}; name the input that takes images: {', '.join(map(repr, inputs))}"
        )
    return inputs[name]


def _insert(model: ir.Model, old: ir.Value, done: Preprocessing) -> None:
    graph = model.graph
    assert old.shape is not None
    dtype = old.dtype
    assert dtype is not None
    images = ir.Value(
        name=f"{old.name}.images",
        type=ir.TensorType(ir.DataType.UINT8),
        shape=ir.Shape([old.shape.dims[0], "height", "width", 3]),
    )
    first = next(iter(graph), None)
    builder = Builder(graph, before=first)
    graph.inputs[list(graph.inputs).index(old)] = images
    numbers = _numbers(_resized(_channels(builder.tensor(images), done), done), done)
    if done.layout == "NHWC":
        numbers = builder.op("Transpose", numbers, perm=(0, 2, 3, 1))
    elif done.layout == "NHW":
        numbers = builder.op("Squeeze", numbers, builder.integers([1]))
    result = builder.cast(numbers, dtype).value
    old.replace_all_uses_with(result)
    result.shape = old.shape
    name = old.name
    old.name = f"{name}.replaced"
    images.name = name


def _channels(images: Tensor, done: Preprocessing) -> Tensor:
    """Return pixels as float32 [batch, channels, height, width], in the model's channel order."""
    builder = images.builder
    if done.channels == "gray":
        weighted = builder.cast(images, ir.DataType.INT32) * builder.constant(np.asarray(GRAY_WEIGHTS, np.int32))
        total = builder.op("ReduceSum", weighted, builder.integers([3]), keepdims=0) + GRAY_ONE // 2
        gray = builder.cast(total / GRAY_ONE, ir.DataType.FLOAT)
        return builder.op("Unsqueeze", gray, builder.integers([1]))
    if done.channels == "bgr":
        images = builder.op("Gather", images, builder.integers([2, 1, 0]), axis=3)
    return builder.op("Transpose", builder.cast(images, ir.DataType.FLOAT), perm=(0, 3, 1, 2))


def _resized(pixels: Tensor, done: Preprocessing) -> Tensor:
    """Return pixels in the model's size, whole numbers from 0 to 255."""
    builder = pixels.builder
    assert done.size is not None
    head = builder.op("Shape", pixels, start=0, end=2)
    sides = builder.integers(done.size)
    if done.resize == CROP:
        extents = builder.op("Shape", pixels, start=2, end=4)
        shorter = builder.op("ReduceMin", extents, builder.integers([0]), keepdims=1)
        sides = builder.op("Div", extents * done.side, shorter)
    height = builder.op("Shape", pixels, start=2, end=3)
    down, across = (builder.op("Slice", sides, builder.integers([axis]), builder.integers([axis + 1])) for axis in (0, 1))
    if done.interpolation == "nearest":
        resized = _nearest(_nearest(pixels, across, 3), down, 2)
    else:
        # Pillow usually resizes along the width, rounds, and then resizes along the height.
        resized = _smoothed(pixels, builder.op("Concat", head, height, across, axis=0), done.interpolation)
        resized = _smoothed(resized, builder.op("Concat", head, sides, axis=0), done.interpolation)
    if done.resize != CROP:
        return resized
    # Round half to even, as in Python's round, which torchvision's CenterCrop uses.
    over = builder.cast(sides - builder.integers(done.size), ir.DataType.FLOAT) * 0.5
    corner = builder.cast(builder.op("Round", over), ir.DataType.INT64)
    return builder.op("Slice", resized, corner, corner + builder.integers(done.size), builder.integers([2, 3]))


def _smoothed(pixels: Tensor, sizes: Tensor, interpolation: str) -> Tensor:
    """Emit one pass of a resize, rounded half up as in Pillow."""
    builder = pixels.builder
    resized = builder.op(
        "Resize",
        pixels,
        None,
        None,
        sizes,
        mode=RESIZE_MODES[interpolation],
        coordinate_transformation_mode="half_pixel",
        cubic_coeff_a=PILLOW_CUBIC if interpolation == "bicubic" else None,
        antialias=1,
        exclude_outside=1,  # at the edges Pillow normalizes the weights of existing pixels
    )
    return builder.op("Clip", builder.op("Floor", resized + 0.5), builder.scalar(0, resized), builder.scalar(LARGEST, resized))


def _nearest(pixels: Tensor, size: Tensor, axis: int) -> Tensor:
    """Emit nearest-neighbor resizing along an axis, in exact integer arithmetic."""
    builder = pixels.builder
    extent = builder.op("Shape", pixels, start=axis, end=axis + 1)
    end, zero, one = (builder.op("Squeeze", size), *(builder.constant(np.asarray(number, np.int64)) for number in (0, 1)))
    places = builder.op("Range", zero, end, one)
    return builder.op("Gather", pixels, (places * 2 + 1) * extent / (size * 2), axis=axis)


def _numbers(pixels: Tensor, done: Preprocessing) -> Tensor:
    """Return ``(pixel * scale - mean) / std`` in float32 by two operations, with constants that are rounded once."""
    builder = pixels.builder
    channels = 1 if done.channels == "gray" else 3
    mean, std = (np.broadcast_to(np.asarray(one, np.float64), channels)[None, :, None, None] for one in (done.mean, done.std))
    if np.any(mean):
        pixels = pixels - builder.constant((mean / done.scale).astype(np.float32))
    factor = done.scale / std
    return pixels if np.all(factor == 1) else pixels * builder.constant(factor.astype(np.float32))


def _describe(model: ir.Model, done: Preprocessing) -> None:
    """Set the metadata for raw pixels and for resizing files of any size to one batch.

    Files are resized as the model does it, so its own resize has no effect. For a center crop, files keep a square of the shorter
    side; unless the two sides differ by a multiple of 4 (as 256 and 224 do), the model's crop may be off by one pixel.
    """
    assert done.size is not None
    is_cut = done.resize == CROP
    taken = Preprocessing(
        scale=1.0,
        channels="rgb",
        layout="NHWC",
        interpolation=done.interpolation,
        resize=done.resize,
        shorter_side=done.side if is_cut else None,
        size=(done.side, done.side) if is_cut else done.size,
    )
    PIXELS.set(model, taken.options())
