"""Translations of ATen operators to ONNX that PyTorch's exporter lacks or that training needs in another form.

``torch.onnx.export`` traces each function with the arguments of an ATen call; ``op`` emits nodes.

``aten.rnn_tanh`` and ``aten.rnn_relu`` become the standard's RNN, with dropout between layers; the exporter drops that and
unrolls the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset20
from onnxscript.onnx_types import TensorType

from burnish.importer.pytorch.layers import stop_gradient
from burnish.operators.elementwise import STOP_GRADIENT


def recurrent(activation: str) -> Callable[..., Any]:
    """Return the translation of a recurrent network.

    Args:
        activation: ``Tanh`` or ``Relu``.
    """

    def translated(
        input: TensorType,
        hx: TensorType,
        params: Sequence[TensorType],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
        state: Any = hx
        x: Any = input
        size = state.shape[2]
        if batch_first:
            x = op.Transpose(x, perm=[1, 0, 2])
        states = []
        for layer in range(num_layers):
            first = layer * directions
            start = op.Slice(hx, _integers([first]), _integers([first + directions]), _integers([0]))
            weights = [params[(first + direction) * each : (first + direction + 1) * each] for direction in range(directions)]
            x, last = op.RNN(
                x,
                _together([one[0] for one in weights]),
                _together([one[1] for one in weights]),
                _together([op.Concat(one[2], one[3], axis=0) for one in weights]) if has_biases else None,
                None,
                start,
                activations=[activation] * directions,
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=size,
            )
            # [time, direction, batch, size] to [time, batch, direction and size]
            x = op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), _integers([0, 0, directions * size]))
            states.append(last)
            if train and dropout > 0 and layer + 1 < num_layers:
                ratio = op.Constant(value=ir.tensor(np.asarray(dropout, input.dtype.numpy())))
                x, _ = op.Dropout(x, ratio, op.Constant(value=ir.tensor(np.asarray(True))))
        if batch_first:
            x = op.Transpose(x, perm=[1, 0, 2])
        return x, states[0] if num_layers == 1 else op.Concat(*states, axis=0)

    return translated


def _together(matrices: Sequence[Any]) -> Any:
    each = [op.Unsqueeze(matrix, _integers([0])) for matrix in matrices]
    return each[0] if len(each) == 1 else op.Concat(*each, axis=0)


aten = torch.ops.aten

op: Any = opset20

OPSET = 20
"""Opset of the emitted operators and of the export."""

DEFAULT = ir.DataType.FLOAT
"""Default dtype of numbers."""


def batch_norm(x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float) -> Any:
    """Translate batch normalization with running statistics to the standard's operator, which burnish binds to a mode."""
    channels, dtype = running_mean.shape[0], running_mean.dtype.numpy()
    scale = op.Constant(value=ir.tensor(np.ones(channels, dtype))) if weight is None else weight
    shift = op.Constant(value=ir.tensor(np.zeros(channels, dtype))) if bias is None else bias
    y = op.BatchNormalization(x, scale, shift, running_mean, running_var, epsilon=eps, momentum=1.0 - momentum)
    return y, op.Constant(value=ir.tensor(np.zeros(0, dtype))), op.Constant(value=ir.tensor(np.zeros(0, dtype)))


def batch_norm_without_statistics(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    """Write out batch normalization that uses batch statistics in every mode."""
    axes = _integers([axis for axis in range(len(x.shape)) if axis != 1])
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    y = op.Div(centered, op.Sqrt(op.Add(variance, op.Constant(value=ir.tensor(np.asarray(eps, x.dtype.numpy()))))))
    per_channel = _integers([-1, *[1] * (len(x.shape) - 2)])
    y = y if weight is None else op.Mul(y, op.Reshape(weight, per_channel))
    return (y if bias is None else op.Add(y, op.Reshape(bias, per_channel))), mean, variance


def scalar_tensor(s: float, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """Emit a number with all digits of its dtype; the exporter's version rounds to float32. It may be an extent."""
    if isinstance(s, ir.Value):
        return s if dtype == -1 else op.Cast(s, to=dtype)
    return op.Constant(value=ir.tensor(np.asarray(s, ir.DataType(DEFAULT if dtype == -1 else dtype).numpy())))


def full(
    size: Any, fill_value: float, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False
) -> TensorType:
    """Fill a shape with a number, with all digits of its dtype; by default in the dtype of the number."""
    if dtype == -1 and isinstance(fill_value, int):
        dtype = ir.DataType.BOOL if isinstance(fill_value, bool) else ir.DataType.INT64
    value = scalar_tensor(fill_value, dtype)
    if isinstance(size, ir.Value):
        return op.Expand(value, op.Cast(size, to=ir.DataType.INT64))
    if not size:
        return value
    each = [op.Reshape(extent, _integers([1])) if isinstance(extent, ir.Value) else _integers([extent]) for extent in size]
    return op.Expand(value, op.Concat(*each, axis=0))


def new_full(
    x: TensorType,
    size: Any,
    fill_value: float,
    dtype: int = -1,
    layout: str = "",
    device: str = "",
    pin_memory: bool = False,
) -> TensorType:
    """Fill a shape with a number, by default in the dtype of x."""
    return full(size, fill_value, x.dtype if dtype == -1 else dtype)


def full_like(
    x: TensorType,
    fill_value: float,
    dtype: int = -1,
    layout: str = "",
    device: str = "",
    pin_memory: bool = False,
    memory_format: str = "",
) -> TensorType:
    """Fill the shape of x with a number."""
    return op.Expand(scalar_tensor(fill_value, x.dtype if dtype == -1 else dtype), op.Shape(x))


def convolution(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    """Translate a convolution over any number of axes, with optional bias; x may be one sample without a batch."""
    rank = len(weight.shape) - 2
    strides, dilations = _each_axis(stride, rank), _each_axis(dilation, rank)
    attributes: dict[str, Any] = {"group": groups, "strides": strides, "dilations": dilations}
    if isinstance(padding, str):
        attributes["auto_pad"] = "SAME_UPPER" if padding == "same" else "VALID"
    else:
        attributes["pads"] = _each_axis(padding, rank) * 2
    operands = [weight] if bias is None else [weight, bias]
    if len(x.shape) == rank + 2:
        return op.Conv(x, *operands, **attributes)
    first = _integers([0])
    return op.Squeeze(op.Conv(op.Unsqueeze(x, first), *operands, **attributes), first)


def convolve(
    x: TensorType,
    weight: TensorType,
    bias: Optional[TensorType] = None,  # noqa: UP045
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> TensorType:
    """``aten.conv1d``, ``conv2d`` and ``conv3d``."""
    return convolution(x, weight, bias, stride, padding, dilation, groups)


def convolve_padded(
    x: TensorType,
    weight: TensorType,
    bias: Optional[TensorType] = None,  # noqa: UP045
    stride: Sequence[int] = (1,),
    padding: str = "valid",
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> TensorType:
    """The same with ``padding`` as ``same`` or ``valid``."""
    return convolution(x, weight, bias, stride, padding, dilation, groups)


def hard_sigmoid(x: TensorType) -> TensorType:
    """Translate hardsigmoid; ``HardSigmoid`` stores 1/6 in float32, so other dtypes are written out."""
    if x.dtype == ir.DataType.FLOAT:
        return op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
    zero, three, six = (op.Constant(value=ir.tensor(np.asarray(number, x.dtype.numpy()))) for number in (0, 3, 6))
    return op.Div(op.Clip(op.Add(x, three), zero, six), six)


def hard_swish(x: TensorType) -> TensorType:
    """Translate hardswish, with the same restriction."""
    return op.HardSwish(x) if x.dtype == ir.DataType.FLOAT else op.Mul(x, hard_sigmoid(x))


def atan2(y: TensorType, x: TensorType) -> TensorType:
    """Emit the angle of a point without 0/0; its gradient at the origin is 0, as in PyTorch."""
    zero, one = _number(0, y), _number(1, y)
    is_steep = op.Greater(op.Abs(y), op.Abs(x))
    longer, shorter = op.Where(is_steep, y, x), op.Where(is_steep, x, y)
    is_origin = op.Equal(longer, zero)
    angle = op.Atan(op.Div(op.Where(is_origin, zero, shorter), op.Where(is_origin, one, longer)))
    half = op.Where(op.Less(y, zero), _number(-np.pi / 2, y), _number(np.pi / 2, y))
    behind = op.Where(op.Less(x, zero), op.Add(half, half), zero)
    return op.Where(is_steep, op.Sub(half, angle), op.Add(angle, behind))


def sinc(x: TensorType) -> TensorType:
    """Emit sin(πx)/(πx); at 0 it is 1 with gradient 0."""
    is_zero, scaled = op.Equal(x, _number(0, x)), op.Mul(x, _number(np.pi, x))
    return op.Where(is_zero, _number(1, x), op.Div(op.Sin(scaled), op.Where(is_zero, _number(1, x), scaled)))


def xlogy(x: TensorType, y: TensorType) -> TensorType:
    """Emit x·log(y), 0 if x is 0, with gradient 0 for x if log(y) is undefined, as in PyTorch."""
    nothing = op.And(op.Equal(x, _number(0, x)), op.LessOrEqual(y, _number(0, y)))
    return op.Mul(x, op.Log(op.Where(nothing, _number(1, y), y)))


def quotient(x: TensorType, y: TensorType) -> TensorType:
    """``prims.div``, also by an extent, which the exporter keeps in float32 for any dtype."""
    return op.Div(x, op.CastLike(y, x) if isinstance(y, ir.Value) and y.dtype != x.dtype else y)


def constant_in_the_backward(x: TensorType) -> TensorType:
    """Return x as a constant for the backward pass."""
    y = op.Identity(x)
    node = y.producer()
    # The exporter only emits operators with an ONNX schema.
    (node.domain, node.op_type), node.version = STOP_GRADIENT.key, 1
    return y


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_statistics,
    stop_gradient._opoverload: constant_in_the_backward,
    aten.rnn_tanh.input: recurrent("Tanh"),
    aten.rnn_relu.input: recurrent("Relu"),
    aten.hardsigmoid.default: hard_sigmoid,
    aten.hardswish.default: hard_swish,
    aten.atan2.default: atan2,
    aten.sinc.default: sinc,
    aten.special_sinc.default: sinc,
    aten.xlogy.Tensor: xlogy,
    aten.special_xlogy.default: xlogy,
    torch.ops.prims.div.default: quotient,
    aten.scalar_tensor.default: scalar_tensor,
    aten.full.default: full,
    aten.full_like.default: full_like,
    aten.new_full.default: new_full,
    **dict.fromkeys((aten.conv1d.default, aten.conv2d.default, aten.conv3d.default), convolve),
    **dict.fromkeys((aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding), convolve_padded),
}


def _each_axis(setting: Any, rank: int) -> list[int]:
    numbers = [setting] if isinstance(setting, int) else list(setting)
    return numbers * rank if len(numbers) == 1 else numbers


def _number(number: float, like: TensorType) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(number, like.dtype.numpy())))


def _integers(values: list[int]) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(values, np.int64)))
