"""Operators over a stack of images or signals along the first axis: convolution, pooling, batch normalization, resizing."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.importer.open_batch.call import Call, Result, opens
from burnish.importer.open_batch.opening import Count, Element, Opening
from burnish.importer.open_batch.operands import FIRST, STACKED, Extent, Operand, Refused, Shape


@opens(
    *"AveragePool BatchNormalization Col2Im Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool "
    "GroupNormalization InstanceNormalization LRN LpPool STFT SpaceToDepth".split()
)
def images(call: Call) -> Result:
    call.same_for_all(0)
    call.one_result()
    x = call.operand()
    result = call.again(*call.with_rest(stacked(call.opening, x)))[0]
    return unstacked(call, result, x.shape[0])


def stacked(opening: Opening, x: Operand) -> ir.Value:
    """Samples along the first axis: each as it is where it is one image, else all images of one after those of another.

    An operand that is the same for all samples is repeated for each.
    """
    if x.rank == 0:
        raise Refused("takes images, and gets a scalar")
    if x.shape[0] == 1:
        return opening.spread(x, STACKED)
    value = opening.spread(x, FIRST)
    rest = opening.extents(Operand(value, x.shape, FIRST))[1:]
    if 0 in x.shape:
        raise Refused("takes images without elements")
    return opening.emit("Reshape", value, opening.vector([-1, *rest]))


def unstacked(call: Call, result: ir.Value, images_of_one: Extent, index: int = 0) -> Result:
    """What ``stacked`` put after each other, apart again."""
    if images_of_one == 1:
        return result, STACKED
    if not isinstance(images_of_one, int):
        raise Refused("takes images of which a sample has an unknown number")
    rest: list[Element] = [
        extent if isinstance(extent, int) else call.opening.emit("Shape", result, start=axis, end=axis + 1)
        for axis, extent in enumerate(call.result_shape(index)[1:], start=1)
    ]
    return call.opening.reshaped(result, [Count.SAMPLES, images_of_one, *rest]), FIRST


@opens("DeformConv")
def deformed_convolution(call: Call) -> Result:
    """The offsets and the mask are of a sample too."""
    call.same_for_all(0, 2, 4)
    count = call.operand().shape[0]
    values = [
        None if operand is None else stacked(call.opening, operand) if index in (0, 2, 4) else operand.value
        for index, operand in enumerate(call.operands)
    ]
    return unstacked(call, call.again(*values)[0], count)


@opens("AffineGrid")
def affine_grid(call: Call) -> Result:
    call.same_for_all(0)
    theta = call.operand()
    size = call.integers(1, "the size of its result")
    value = stacked(call.opening, theta)
    count = call.opening.emit("Shape", value, start=0, end=1)
    return unstacked(call, call.again(value, call.opening.vector([count, *size[1:]]))[0], theta.shape[0])


@opens("MaxPool")
def max_pool(call: Call) -> list[Result | None]:
    """The indices count through all images: those of a sample begin again with each."""
    x, opening = call.operand(), call.opening
    values = call.again(stacked(opening, x))
    results: list[Result | None] = [unstacked(call, values[0], x.shape[0])]
    if call.is_read(1):
        indices, batch = unstacked(call, values[1], x.shape[0], 1)
        rank = len(call.result_shape(1)) + (batch is not None and batch.is_extra)
        results.append((opening.emit("Sub", indices, _counted_before(opening, x.shape, rank)), batch))
    return results


@opens("MaxUnpool")
def max_unpool(call: Call) -> Result:
    """The indices count through all images of the result."""
    x, indices, opening = call.operand(0), call.operand(1), call.opening
    shape = call.result_shape()
    if call.has(2):
        raise Refused("is given the shape of its result, of one sample")
    if x.shape[0] != 1:
        raise Refused("takes several images of one sample")
    offsets = _counted_before(opening, shape, len(shape))
    counting = opening.emit("Add", opening.spread(indices, STACKED), offsets)
    return call.again(opening.spread(x, STACKED), counting)[0], STACKED


def _counted_before(opening: Opening, shape: Shape, rank: int) -> ir.Value:
    """For each sample, how many elements the samples before it hold; along the first of ``rank`` axes."""
    if not all(isinstance(extent, int) for extent in shape):
        raise Refused("counts positions of images whose extents are not known")
    size = math.prod(extent for extent in shape if isinstance(extent, int))
    bounds = [opening.constant(np.asarray(number, np.int64)) for number in (0, size)]
    end = opening.emit("Squeeze", opening.emit("Mul", opening.count, bounds[1]))
    numbers = opening.emit("Range", bounds[0], end, bounds[1])
    return opening.emit("Reshape", numbers, opening.integers([-1, *[1] * (rank - 1)]))


@opens("Resize")
def resize(call: Call) -> Result:
    """Sizes hold the 1 of one sample."""
    call.same_for_all(0)
    x, opening = call.operand(), call.opening
    if call.attribute("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise Refused("crops what it resizes")
    axes = call.attribute("axes")
    along = list(range(x.rank)) if axes is None else [axis % x.rank for axis in axes]
    operands = call.with_rest(stacked(opening, x))
    if 0 in along and call.has(3):
        if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise Refused("keeps the ratio of sizes, among which that of the batch would be")
        sizes = call.integers(3, "its sizes")
        if sizes[along.index(0)] != x.shape[0]:
            raise Refused("resizes along the axis of images")
        if x.shape[0] == 1:
            of_images: Element = Count.SAMPLES
        else:
            of_images = opening.emit("Shape", operands[0], start=0, end=1)
        operands[3] = opening.vector([of_images if axis == 0 else size for axis, size in zip(along, sizes, strict=True)])
    elif 0 in along:
        scales = call.array(2)
        if scales is None or scales[along.index(0)] != 1:
            raise Refused("computes the scale along the axis of images")
    return unstacked(call, call.again(*operands)[0], x.shape[0])
