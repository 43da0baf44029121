"""Layers whose samples have an axis of their own: on images and sequences, normalization, attention and losses."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.importer.open_batch.call import Call, Result, Rule
from burnish.importer.open_batch.opening import Count, Element, Opening
from burnish.importer.open_batch.operands import FIRST, STACKED, Batch, Extent, Operand, Refused, Shape
from burnish.importer.open_batch.rules.elements import LOSS_REMEDY, check_shape_stays, reduced


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


def deformed_convolution(call: Call) -> Result:
    """The offsets and the mask are of a sample too."""
    call.same_for_all(0, 2, 4)
    count = call.operand().shape[0]
    values = [
        None if operand is None else stacked(call.opening, operand) if index in (0, 2, 4) else operand.value
        for index, operand in enumerate(call.operands)
    ]
    return unstacked(call, call.again(*values)[0], count)


def affine_grid(call: Call) -> Result:
    call.same_for_all(0)
    theta = call.operand()
    size = call.integers(1, "the size of its result")
    value = stacked(call.opening, theta)
    count = call.opening.emit("Shape", value, start=0, end=1)
    return unstacked(call, call.again(value, call.opening.vector([count, *size[1:]]))[0], theta.shape[0])


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


def last_axes(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x = call.operand()
    assert x.batch is not None
    first = call.axis(x.rank, -1)
    if not x.batch.is_extra and x.batch.axis >= first:
        raise Refused(f"normalizes over the axes from {first} on, among which the samples of a batch stand")
    if x.batch.axis > first:
        x = Operand(call.opening.placed(x, FIRST), x.shape, FIRST)
        assert x.batch is not None
    weights = [_beside(call, operand, x) for operand in call.operands[1:]]
    axis = first - x.rank
    return [(value, x.batch) for value in call.again(x.value, *weights, axis=axis)]


def over_axes(call: Call) -> Result:
    x = call.operand()
    axes = [axis % x.rank for axis in call.attribute("axes", None) or (0, 2, 3)]
    return call.again(x.value, axes=reduced(x, axes))[0], x.batch


def _beside(call: Call, weight: Operand | None, x: Operand) -> ir.Value | None:
    """A scale or bias, which is broadcast against what it is for: with an axis for the samples where it reaches past that."""
    assert x.batch is not None
    if weight is None:
        return None
    check_shape_stays(x, weight)
    missing = x.rank - weight.rank
    if not x.batch.is_extra or x.batch.axis <= missing:
        return weight.value
    return call.opening.unsqueezed(weight.value, x.batch.axis - missing)


def _at(axis: int) -> Batch:
    return Batch(axis, is_extra=False)


def recurrent(call: Call) -> list[Result | None]:
    """States and lengths that are the same for all samples are repeated for each, as the standard does not broadcast them."""
    call.same_for_all(0, 4, 5, 6)
    opening, batch_first = call.opening, bool(call.attribute("layout", 0))
    of_states = _at(0 if batch_first else 1)
    of_operands = {0: _at(0 if batch_first else 1), 4: _at(0), 5: of_states, 6: of_states}
    values = []
    for index, operand in enumerate(call.operands):
        batch = of_operands.get(index)
        if operand is None or batch is None:
            values.append(None if operand is None else operand.value)
            continue
        if operand.shape[batch.axis] != 1:
            raise Refused(f"gets {operand.shape[batch.axis]} sequences of one sample")
        values.append(opening.spread(operand, batch))
    of_results = (_at(0 if batch_first else 2), of_states, of_states)
    return list(zip(call.again(*values), of_results, strict=False))


MASK, PAST_KEY, LENGTHS = 3, 4, 6


def attention(call: Call) -> list[Result | None]:
    count = call.operand().shape[0]
    _know_results(call)
    values = [
        None if operand is None else _mask(call, operand, count) if index == MASK else _stacked(call, operand, count)
        for index, operand in enumerate(call.operands)
    ]
    results = call.again(*values)
    if not call.has(PAST_KEY):
        for index in (1, 2):
            if call.is_read(index):
                results[index].name = ""
                results[index] = _present(call, values[index], index)
    return [unstacked(call, value, count, index) if value.name != "" else None for index, value in enumerate(results)]


def _present(call: Call, value: ir.Value | None, index: int) -> ir.Value:
    """The keys or values without past ones, which are the operand by heads; inference has no type for the node's result."""
    if call.operand(index).rank == 4:
        return call.opening.emit("Identity", value)
    _, heads, _, size = _by_heads(call, index, "kv_num_heads")
    parts = [0, 0, heads if isinstance(heads, int) else -1, size if isinstance(size, int) else -1]
    apart = call.opening.emit("Reshape", value, call.opening.integers(parts))
    return call.opening.emit("Transpose", apart, perm=[0, 2, 1, 3])


def _know_results(call: Call) -> None:
    """Give further results their shapes, which the standard infers only where there are past keys."""
    query, key, value = (_by_heads(call, index, name) for index, name in enumerate(("q_num_heads", *["kv_num_heads"] * 2)))
    keys = key[2]
    if isinstance(keys, int) and isinstance(value[2], int) and keys != value[2]:
        raise Refused(f"has {keys} keys and {value[2]} values")
    if call.has(PAST_KEY):
        past = call.operand(PAST_KEY).shape[2]
        keys = keys + past if isinstance(keys, int) and isinstance(past, int) else None
    shapes = ((*key[:2], keys, key[3]), (*value[:2], keys, value[3]), (*query[:3], keys))
    for result, shape in zip(call.node.outputs[1:], shapes, strict=False):
        if result.shape is None:
            result.shape = ir.Shape(shape)


def _by_heads(call: Call, index: int, heads: str) -> Shape:
    """The shape [batch, heads, sequence, size] of an operand for one sample, which may have the heads in its last axis."""
    shape = call.operand(index).shape
    if len(shape) == 4:
        return shape
    batch, sequence, size = shape
    count = call.attribute(heads)
    return batch, count, sequence, size // count if isinstance(size, int) else None


def _stacked(call: Call, operand: Operand, count: Extent) -> ir.Value:
    if operand.rank == 0 or operand.shape[0] != count:
        raise Refused(f"reads '{operand.value.name}', which does not begin with an axis of {count} places")
    return stacked(call.opening, operand)


def _mask(call: Call, mask: Operand, count: Extent) -> ir.Value:
    """A mask, which is broadcast to the scores [batch, heads, queries, keys]."""
    if mask.batch is None and (mask.rank < 4 or mask.shape[0] == 1):
        return mask.value
    if mask.batch is not None and mask.rank < 4:
        shape = (*[1] * (4 - mask.rank), *mask.shape)
        mask = Operand(call.opening.placed(mask, FIRST, 4), shape, FIRST)
    return _stacked(call, mask, count)


def rotary_embedding(call: Call) -> Result:
    """With positions, the tables are the same for all samples; without, they have a row for each sample."""
    has_positions = call.has(3)
    if has_positions:
        call.same_for_all(0, 3)
    count = call.operand().shape[0]
    values = [
        operand.value if has_positions and index in (1, 2) else _stacked(call, operand, count)
        for index, operand in enumerate(call.present)
    ]
    return unstacked(call, call.again(*values)[0], count)


def class_loss(call: Call) -> list[Result | None]:
    """Without a reduction, each sample has its own loss. A sum or mean goes over all samples, and is refused."""
    call.same_for_all(0, 1)
    reduction = call.attribute("reduction", "mean")
    if reduction != "none":
        raise Refused(f"takes the {reduction} over all samples, and of a batch there is only one", LOSS_REMEDY)
    scores, labels = call.operand(0), call.operand(1)
    count = scores.shape[0]
    if labels.shape != (count, *scores.shape[2:]):
        raise Refused(f"has labels of the shape {labels.shape} for scores of the shape {scores.shape}")
    values = [stacked(call.opening, operand) for operand in (scores, labels)]
    results = call.again(*call.with_rest(*values))
    return [unstacked(call, value, count, index) if value.name != "" else None for index, value in enumerate(results)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        "AveragePool BatchNormalization Col2Im Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool "
        "GroupNormalization InstanceNormalization LRN LpPool STFT SpaceToDepth".split(),
        images,
    ),
    "DeformConv": deformed_convolution,
    "AffineGrid": affine_grid,
    "MaxPool": max_pool,
    "MaxUnpool": max_unpool,
    "Resize": resize,
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), last_axes),
    "MeanVarianceNormalization": over_axes,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), recurrent),
    "Attention": attention,
    "RotaryEmbedding": rotary_embedding,
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), class_loss),
}
