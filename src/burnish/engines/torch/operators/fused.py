"""What ``burnish.engines.torch.fusions`` puts into graphs: the engine's own kernels, and pooling with PyTorch's own places."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch import attention, products
from burnish.engines.torch.dtypes import TORCH_DTYPES
from burnish.engines.torch.images import SIGNAL, VOLUME, as_image, from_image
from burnish.engines.torch.rules import Call, translates
from burnish.graph import BURNISH_DOMAIN
from burnish.ops.activation import CLIP_GRAD


def _of_elements(op: Call, name: str) -> Any:
    """The kernel for the elements of the first operand: those for bfloat16 have libraries of their own."""
    suffix = "_bfloat16" if op.dtype(0) == ir.DataType.BFLOAT16 else ""
    return getattr(torch.ops.burnish, name + suffix).default


def _image(op: Call, index: int) -> Any:
    """An operand of the first one's rank as an image, None where it is left out."""
    return as_image(op.tensor(index), op.rank(0)) if op.has(index) else None


@translates("FusedBatchNorm", domain=BURNISH_DOMAIN)
def batch_norm(op: Call) -> Any:
    results = _of_elements(op, "batch_norm_training")(
        _image(op, 0),
        op.tensor(1),
        op.tensor(2),
        _image(op, 3),
        op.attribute("epsilon"),
        op.attribute("activation"),
        op.attribute("limit"),
    )
    return from_image(results[0], op.extents(0)), *(results[index] for index in range(1, 5))


@translates("FusedBatchNormGrad", domain=BURNISH_DOMAIN)
def batch_norm_gradient(op: Call) -> Any:
    results = _of_elements(op, "batch_norm_gradient")(
        _image(op, 0),
        _image(op, 1),
        op.tensor(2),
        op.tensor(3),
        op.tensor(4),
        _image(op, 5),
        _image(op, 6),
        op.optional(7),
        op.attribute("activation"),
        op.attribute("limit"),
        bool(op.attribute("keep")),
    )
    kept = from_image(results[3], op.extents(0)) if op.is_read(3) else None
    return from_image(results[0], op.extents(0)), results[1], results[2], kept


@translates("FusedBatchNormMoments", domain=BURNISH_DOMAIN)
def batch_norm_moments(op: Call) -> Any:
    results = _of_elements(op, "batch_norm_moments")(_image(op, 0))
    return results[0], results[1]


@translates("FusedBatchNormMerge", domain=BURNISH_DOMAIN)
def batch_norm_merge(op: Call) -> Any:
    results = torch.ops.burnish.batch_norm_merge.default(op.tensor(0), op.tensor(1), op.attribute("epsilon"))
    return tuple(results[index] for index in range(7))


@translates("FusedBatchNormApply", domain=BURNISH_DOMAIN)
def batch_norm_apply(op: Call) -> Any:
    vectors = [op.tensor(index) for index in range(1, 5)]
    result = _of_elements(op, "batch_norm_apply")(
        _image(op, 0), *vectors, _image(op, 5), op.attribute("activation"), op.attribute("limit")
    )
    return from_image(result, op.extents(0))


@translates("FusedBatchNormGradSums", domain=BURNISH_DOMAIN)
def batch_norm_gradient_sums(op: Call) -> Any:
    results = _of_elements(op, "batch_norm_gradient_sums")(
        _image(op, 0),
        _image(op, 1),
        op.tensor(2),
        op.tensor(3),
        _image(op, 4),
        op.optional(5),
        op.optional(6),
        _image(op, 7),
        op.attribute("activation"),
        op.attribute("limit"),
        bool(op.attribute("keep")),
    )
    return results[0], from_image(results[1], op.extents(0)) if op.is_read(1) else None


@translates("FusedBatchNormGradMerge", domain=BURNISH_DOMAIN)
def batch_norm_gradient_merge(op: Call) -> Any:
    results = torch.ops.burnish.batch_norm_gradient_merge.default(*op.tensors())
    return tuple(results[index] for index in range(4))


@translates("FusedBatchNormGradApply", domain=BURNISH_DOMAIN)
def batch_norm_gradient_apply(op: Call) -> Any:
    result = _of_elements(op, "batch_norm_gradient_apply")(
        _image(op, 0),
        _image(op, 1),
        *(op.tensor(index) for index in range(2, 7)),
        _image(op, 7),
        op.optional(8),
        op.attribute("activation"),
        op.attribute("limit"),
    )
    return from_image(result, op.extents(0))


@translates("FusedStandardize", domain=BURNISH_DOMAIN)
def standardize(op: Call) -> Any:
    results = torch.ops.burnish.standardize.default(
        op.tensor(0),
        op.optional(1),
        op.optional(2),
        op.attribute("axis"),
        op.attribute("epsilon"),
        op.attribute("offset"),
        bool(op.attribute("centered")),
    )
    return tuple(results[index] for index in range(4))


@translates("FusedStandardizeGrad", domain=BURNISH_DOMAIN)
def standardize_gradient(op: Call) -> Any:
    results = torch.ops.burnish.standardize_gradient.default(
        op.tensor(0),
        op.tensor(1),
        op.optional(2),
        op.optional(3),
        op.tensor(4),
        op.optional(5),
        op.attribute("axis"),
        op.attribute("offset"),
        bool(op.attribute("centered")),
        bool(op.attribute("parameters")),
    )
    return tuple(results[index] for index in range(3))


def _window_suffix(op: Call, weight: int) -> str:
    """What the kernels for windows of 5x5 have behind their names; those for 3x3 have nothing."""
    return "_5x5" if op.known_extents(weight)[2] == 5 else ""


@translates("DepthwiseConv", domain=BURNISH_DOMAIN)
def depthwise_convolution(op: Call) -> Any:
    return _of_elements(op, "depthwise_convolution" + _window_suffix(op, 1))(
        op.tensor(0), op.tensor(1), op.optional(2), op.attribute("stride"), list(op.attribute("pads"))
    )


@translates("DepthwiseConvGrad", domain=BURNISH_DOMAIN)
def depthwise_convolution_gradient(op: Call) -> Any:
    wanted = [bool(op.attribute(name)) for name in ("input", "weight")]
    results = _of_elements(op, "depthwise_convolution_gradient" + _window_suffix(op, 2))(
        op.tensor(0), op.tensor(1), op.tensor(2), op.attribute("stride"), list(op.attribute("pads")), *wanted
    )
    return results[0], results[1]


def _window(op: Call) -> list[Any]:
    """Extents, strides, pads and dilations of windows over images or volumes, and whether sizes are rounded up."""
    windows = [list(op.attribute(name)) for name in ("kernel_shape", "strides", "pads", "dilations")]
    if op.rank(0) == SIGNAL:
        windows = [[neutral, *window] for neutral, window in zip((1, 1, 0, 1), windows, strict=True)]
    return [*windows, bool(op.attribute("ceil_mode"))]


def _signal_as_image(op: Call, index: int) -> Any:
    return as_image(op.tensor(index), SIGNAL) if op.rank(0) == SIGNAL else op.tensor(index)


def _like_first(op: Call, pooled: Any) -> Any:
    return from_image(pooled, op.extents(0)) if op.rank(0) == SIGNAL else pooled


@translates("FusedMaxPool", domain=BURNISH_DOMAIN)
def max_pool(op: Call) -> Any:
    over = torch.ops.aten.max_pool3d_with_indices if op.rank(0) == VOLUME else torch.ops.aten.max_pool2d_with_indices
    results = over.default(_signal_as_image(op, 0), *_window(op))
    return _like_first(op, results[0]), _like_first(op, results[1])


@translates("FusedMaxPoolGrad", domain=BURNISH_DOMAIN)
def max_pool_gradient(op: Call) -> Any:
    """(dy, places, x) -> dx."""
    dy, places, x = (_signal_as_image(op, index) for index in range(3))
    windows = _window(op)
    if op.rank(0) == VOLUME:
        return torch.ops.aten.max_pool3d_with_indices_backward.default(dy, x, *windows, places)
    return _like_first(op, torch.ops.aten.max_pool2d_with_indices_backward.default(dy, x, *windows, places))


@translates(CLIP_GRAD)
def clip_gradient(op: Call) -> Any:
    low, high = (op.operand(index) if op.has(index) else None for index in (2, 3))
    if isinstance(low, int | float) and isinstance(high, int | float):
        return torch.ops.aten.hardtanh_backward.default(op.tensor(0), op.tensor(1), low, high)
    inside: Any = None
    if low is not None:
        inside = op.tensor(1) > low
    if high is not None:
        below = op.tensor(1) < high
        inside = below if inside is None else torch.logical_and(inside, below)
    return op.tensor(0) * inside


@translates("FusedCrossEntropy", domain=BURNISH_DOMAIN)
def cross_entropy(op: Call) -> Any:
    results = torch.ops.burnish.cross_entropy.default(op.tensor(0), op.tensor(1), op.attribute("ignored"))
    return tuple(results[index] for index in range(3))


@translates("FusedCrossEntropyGrad", domain=BURNISH_DOMAIN)
def cross_entropy_gradient(op: Call) -> Any:
    """(logits, labels, saved, cotangent of the total) -> cotangent of the logits."""
    return torch.ops.burnish.cross_entropy_gradient.default(*op.tensors(), op.attribute("ignored"))


@translates("FusedLinear", domain=BURNISH_DOMAIN)
def linear(op: Call) -> Any:
    products.expect(op.extents(1), TORCH_DTYPES[op.dtype(0)])
    if op.rank(0) == 2 and op.dtype(0) == ir.DataType.FLOAT:
        products.expect_small()
    flags = [bool(op.attribute(name)) for name in ("transposed", "relu")]
    return products.linear(op.tensor(0), op.tensor(1), op.optional(2), *flags)


@translates("FusedLinearWeightGrad", domain=BURNISH_DOMAIN)
def linear_weight_gradient(op: Call) -> Any:
    return products.linear_weight_gradient(op.tensor(0), op.tensor(1))


@translates("FusedLinearGrad", domain=BURNISH_DOMAIN)
def linear_gradients(op: Call) -> Any:
    """(dy, x, weight or nothing) -> dx, dw, db."""
    products.expect_small()
    flags = [bool(op.attribute(name)) for name in ("transposed", "swapped", "relu", "bias")]
    results = products.linear_gradients(op.tensor(0), op.tensor(1), op.optional(2), *flags)
    return tuple(results[index] if op.is_read(index) else None for index in range(3))


@translates("FusedBatchedProduct", domain=BURNISH_DOMAIN)
def batched_product(op: Call) -> Any:
    return products.batched(op.tensor(0), op.tensor(1), list(op.attribute("order")))


@translates("FusedAttention", domain=BURNISH_DOMAIN)
def fused_attention(op: Call) -> Any:
    """(query, key, value, mask or nothing) -> the result and the logarithms of the sums of exponentials."""
    attention.expect(op.dtype(0))
    settings = op.attribute("scale"), bool(op.attribute("zeros"))
    return attention.attention(op.tensor(0), op.tensor(1), op.tensor(2), op.optional(3), *settings)


@translates("FusedAttentionGrad", domain=BURNISH_DOMAIN)
def fused_attention_gradient(op: Call) -> Any:
    """(flow, query, key, value, result, logarithms, mask or nothing) -> the gradients of query, key and value."""
    heads = op.tensor(1), op.tensor(2), op.tensor(3)
    settings = op.attribute("scale"), bool(op.attribute("zeros"))
    return attention.attention_gradient(op.tensor(0), *heads, op.tensor(4), op.tensor(5), op.optional(6), *settings)


# As PyTorch counts element types.
SCALAR_TYPES = {ir.DataType.FLOAT: 6, ir.DataType.BOOL: 11, ir.DataType.BFLOAT16: 15}


@translates("FusedElementwise", domain=BURNISH_DOMAIN)
def elementwise(op: Call) -> Any:
    constants = list(op.attribute("constants"))[: op.attribute("constant_count")]
    types = [SCALAR_TYPES[ir.DataType(number)] for number in op.attribute("dtypes")]
    results = torch.ops.burnish.elementwise.default(op.tensors(), constants, list(op.attribute("program")), types)
    return tuple(results[index] for index in range(len(op.node.outputs)))


@translates("FusedElementwiseSums", domain=BURNISH_DOMAIN)
def elementwise_sums(op: Call) -> Any:
    """Results of a program, and sums over leading axes of what registers hold; program and dtypes have one number too many."""
    constants = list(op.attribute("constants"))[: op.attribute("constant_count")]
    types = [SCALAR_TYPES[ir.DataType(number)] for number in op.attribute("dtypes")[:-1]]
    registers = list(op.attribute("summed")), op.attribute("kept")
    program = list(op.attribute("program"))[:-1]
    results = torch.ops.burnish.elementwise_sums.default(op.tensors(), constants, program, types, *registers)
    return tuple(results[index] for index in range(len(op.node.outputs)))


@translates("WinogradConv", domain=BURNISH_DOMAIN)
def winograd_convolution(op: Call) -> Any:
    return torch.ops.burnish.winograd_convolution.default(op.tensor(0), op.tensor(1), op.optional(2), op.attribute("padding"))


@translates("WinogradConvInputGrad", domain=BURNISH_DOMAIN)
def winograd_input_gradient(op: Call) -> Any:
    """(dy, w) -> dx."""
    return torch.ops.burnish.winograd_input_gradient.default(op.tensor(0), op.tensor(1), op.attribute("padding"))


@translates("WinogradConvWeightGrad", domain=BURNISH_DOMAIN)
def winograd_weight_gradient(op: Call) -> Any:
    """(dy, x) -> dw."""
    return torch.ops.burnish.winograd_weight_gradient.default(op.tensor(0), op.tensor(1), op.attribute("padding"))


@translates("PointwiseConv", domain=BURNISH_DOMAIN)
def pointwise_convolution(op: Call) -> Any:
    products.expect_pointwise()
    return products.pointwise_convolution(op.tensor(0), op.tensor(1), op.optional(2), op.attribute("strides"))


@translates("PointwiseConvInputGrad", domain=BURNISH_DOMAIN)
def pointwise_input_gradient(op: Call) -> Any:
    """(dy, w, x) -> dx; of x the shape is read."""
    products.expect_pointwise()
    return products.pointwise_input_gradient(op.tensor(0), op.tensor(1), op.tensor(2), op.attribute("strides"))


@translates("PointwiseConvGrad", domain=BURNISH_DOMAIN)
def pointwise_gradients(op: Call) -> Any:
    """(dy, x, w) -> dx, dw."""
    products.expect_pointwise_gradients()
    results = products.pointwise_gradients(*op.tensors())
    return results[0], results[1]


@translates("ConvWeightGradProducts", domain=BURNISH_DOMAIN)
def convolution_weight_gradient(op: Call) -> Any:
    """(dy, x) -> dw."""
    window = [op.attribute(name) for name in ("extents", "strides", "padding")]
    return torch.ops.burnish.convolution_weight_gradient.default(op.tensor(0), op.tensor(1), *window)
