"""Convolutions and transposed convolutions in the configurations that the standard's reference evaluates.

ONNX Runtime's kernels are float32 only, so float64 runs on ``onnx.reference``. Its ConvTranspose refuses groups of more than one
channel and ``output_shape``; what needs those is in ``tests/operators/test_convolution.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from burnish.errors import UnsupportedOperatorError
from specs.operator_spec import ErrorInput, OperatorSpec, Sample, normal

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def torch_convolution(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    group: int = 1,
    auto_pad: str = "NOTSET",
    kernel_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """ONNX Conv in PyTorch: all padding explicit, so that it may differ between the two ends."""
    kernel = tuple(w.shape[2:])
    assert kernel_shape is None or tuple(kernel_shape) == kernel
    rank = len(kernel)
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    pads = pads or (0,) * (2 * rank)
    begin, end = list(pads[:rank]), list(pads[rank:])
    if auto_pad.startswith("SAME"):
        for axis, size in enumerate(x.shape[2:]):
            outputs = -(-size // strides[axis])
            total = max((outputs - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1 - size, 0)
            begin[axis] = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            end[axis] = total - begin[axis]
    flat = [amount for axis in reversed(range(rank)) for amount in (begin[axis], end[axis])]
    return CONVOLUTIONS[rank](functional.pad(x, flat), w, bias, stride=tuple(strides), dilation=tuple(dilations), groups=group)


def torch_transposed_convolution(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    group: int = 1,
    auto_pad: str = "NOTSET",
    kernel_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """ONNX ConvTranspose in PyTorch: the unpadded result, extended by ``output_padding`` at the end, then cropped."""
    kernel = tuple(w.shape[2:])
    rank = len(kernel)
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    pads = pads or (0,) * (2 * rank)
    extra = output_padding or (0,) * rank
    begin, end = list(pads[:rank]), list(pads[rank:])
    for axis, size in enumerate(x.shape[2:]):
        natural = (size - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1 + extra[axis]
        if output_shape is not None:
            total = natural - output_shape[axis]
        elif auto_pad.startswith("SAME"):
            total = natural - size * strides[axis]
        else:
            continue
        begin[axis] = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        end[axis] = total - begin[axis]
    y = TRANSPOSED[rank](x, w, None, stride=tuple(strides), dilation=tuple(dilations), groups=group)
    flat = [amount for axis in reversed(range(rank)) for amount in (-begin[axis], extra[axis] - end[axis])]
    y = functional.pad(y, flat)
    return y if bias is None else y + bias.reshape(1, -1, *(1,) * rank)


def convolution_samples(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(name: str, x: Sequence[int], w: Sequence[int], bias: bool = False, **attributes: Any) -> Sample:
        inputs = [normal(rng, *x), normal(rng, *w)] + ([normal(rng, w[0])] if bias else [])
        return Sample(inputs, attributes, name=name, most_nodes=3)

    yield sample("kernel_shape_absent", (2, 3, 5, 4), (4, 3, 3, 2))
    yield sample("bias", (2, 3, 5, 5), (4, 3, 3, 3), bias=True, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    yield sample("pointwise", (2, 3, 4, 4), (5, 3, 1, 1), kernel_shape=[1, 1])
    yield sample("pointwise_strided", (2, 3, 5, 6), (4, 3, 1, 1), strides=[2, 2])
    yield sample("pointwise_strided_along_one_axis", (2, 3, 5, 6), (4, 3, 1, 1), strides=[3, 1])
    yield sample("pointwise_padded", (2, 2, 3, 4), (3, 2, 1, 1), pads=[1, 0, 2, 1])
    yield sample("pointwise_padded_strided", (2, 2, 3, 4), (3, 2, 1, 1), pads=[1, 1, 1, 1], strides=[2, 3])
    yield sample("pointwise_groups", (2, 4, 3, 3), (6, 2, 1, 1), group=2)
    yield sample("pointwise_depthwise_strided", (2, 3, 5, 5), (3, 1, 1, 1), group=3, strides=[2, 2])
    yield sample("strided_even_leftover", (2, 3, 6, 7), (4, 3, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1])
    yield sample("strided_leftover_without_pads", (2, 2, 6, 8), (3, 2, 3, 3), strides=[2, 3])
    yield sample("stride_above_kernel", (2, 2, 8, 9), (3, 2, 2, 1), strides=[4, 3])
    yield sample("stem", (2, 3, 9, 9), (4, 3, 7, 7), strides=[2, 2], pads=[3, 3, 3, 3])
    yield sample("asymmetric_pads", (2, 2, 4, 5), (3, 2, 3, 3), pads=[0, 2, 1, 0])
    yield sample("asymmetric_pads_strided", (2, 2, 6, 5), (3, 2, 3, 3), pads=[2, 0, 1, 1], strides=[2, 2])
    yield sample("pads_above_reach", (2, 2, 3, 3), (3, 2, 2, 2), pads=[2, 3, 2, 1])
    yield sample("kernel_above_input", (2, 2, 2, 3), (3, 2, 5, 5), pads=[2, 2, 2, 2])
    yield sample("dilated", (2, 2, 7, 8), (3, 2, 3, 3), dilations=[2, 2], pads=[2, 2, 2, 2])
    yield sample("dilated_strided", (2, 2, 8, 9), (3, 2, 3, 2), dilations=[2, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    yield sample("groups", (2, 4, 5, 5), (6, 2, 3, 3), bias=True, group=2, pads=[1, 1, 1, 1])
    yield sample("groups_dilated", (2, 4, 6, 7), (4, 2, 2, 3), group=2, dilations=[1, 2])
    yield sample("depthwise", (2, 3, 5, 5), (3, 1, 3, 3), group=3, pads=[1, 1, 1, 1])
    yield sample("depthwise_strided", (2, 3, 6, 6), (3, 1, 3, 3), group=3, strides=[2, 2], pads=[1, 1, 1, 1])
    yield sample("depthwise_strided_odd", (2, 3, 7, 5), (3, 1, 3, 3), group=3, strides=[2, 2], pads=[1, 1, 1, 1])
    yield sample("depthwise_stride_3", (2, 3, 8, 9), (3, 1, 3, 3), group=3, strides=[3, 3], pads=[1, 0, 0, 1])
    yield sample("depthwise_large_kernel", (2, 3, 7, 7), (3, 1, 5, 5), group=3, pads=[2, 2, 2, 2], strides=[2, 2])
    yield sample("depthwise_dilated", (2, 3, 7, 7), (3, 1, 3, 3), group=3, dilations=[2, 2], pads=[2, 2, 2, 2])
    yield sample("depthwise_multiplier", (2, 3, 5, 5), (6, 1, 3, 3), group=3, pads=[1, 1, 1, 1])
    for auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        yield sample(auto_pad.lower(), (2, 2, 5, 6), (3, 2, 2, 3), auto_pad=auto_pad)
        yield sample(f"{auto_pad.lower()}_strided", (2, 2, 6, 7), (3, 2, 3, 4), auto_pad=auto_pad, strides=[2, 2])
        yield sample(f"{auto_pad.lower()}_stride_above_kernel", (2, 2, 6, 7), (3, 2, 1, 2), auto_pad=auto_pad, strides=[2, 3])
    yield sample("valid", (2, 2, 5, 6), (3, 2, 3, 3), auto_pad="VALID", strides=[1, 2])
    yield sample("one_dimension", (2, 2, 7), (3, 2, 3), bias=True, pads=[1, 1])
    yield sample("one_dimension_strided", (2, 2, 8), (4, 2, 3), strides=[2], dilations=[2], pads=[2, 1])
    yield sample("one_dimension_depthwise", (2, 3, 8), (3, 1, 4), group=3, strides=[2], pads=[1, 2])
    yield sample("three_dimensions", (2, 2, 3, 4, 3), (3, 2, 2, 3, 2), bias=True, pads=[0, 1, 1, 1, 1, 0])
    yield sample("three_dimensions_strided", (1, 2, 4, 5, 4), (2, 1, 2, 3, 3), group=2, strides=[2, 2, 1], pads=[0, 1, 1] * 2)
    yield sample("three_dimensions_dilated", (1, 2, 4, 5, 5), (2, 2, 2, 2, 2), dilations=[1, 2, 3], strides=[1, 1, 2])
    yield sample("one_image", (1, 2, 4, 4), (3, 2, 3, 3), pads=[1, 1, 1, 1])


def transposed_samples(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(name: str, x: Sequence[int], w: Sequence[int], bias: bool = False, **attributes: Any) -> Sample:
        outputs = w[1] * attributes.get("group", 1)
        inputs = [normal(rng, *x), normal(rng, *w)] + ([normal(rng, outputs)] if bias else [])
        return Sample(inputs, attributes, name=name, most_nodes=4)

    yield sample("plain", (2, 3, 4, 3), (3, 2, 3, 2))
    yield sample("bias", (2, 3, 3, 3), (3, 2, 3, 3), bias=True, pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    yield sample("strided", (2, 3, 3, 4), (3, 2, 3, 3), strides=[2, 3], pads=[1, 0, 1, 2])
    yield sample("output_padding", (2, 3, 3, 3), (3, 2, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])
    yield sample("dilated", (2, 2, 3, 3), (2, 3, 2, 3), dilations=[2, 2], strides=[2, 1])
    yield sample("depthwise", (2, 3, 3, 3), (3, 1, 3, 3), group=3, strides=[2, 2])
    yield sample("pointwise_strided", (2, 3, 3, 3), (3, 2, 1, 1), strides=[2, 2])
    yield sample("one_dimension", (2, 3, 4), (3, 2, 3), bias=True, strides=[2], output_padding=[1])
    yield sample("three_dimensions", (1, 2, 3, 2, 2), (2, 2, 2, 2, 3), strides=[1, 2, 2], pads=[0, 0, 1, 1, 0, 0])
    for auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        yield sample(auto_pad.lower(), (2, 2, 3, 4), (2, 3, 4, 3), strides=[3, 2], auto_pad=auto_pad)
    yield sample("valid", (2, 2, 3, 3), (2, 2, 3, 3), strides=[2, 2], auto_pad="VALID")


SPECS = [
    OperatorSpec(
        "Conv",
        convolution_samples,
        torch=torch_convolution,
        shapes=("static", "batch"),
        error_inputs=[
            ErrorInput(
                Sample(
                    [np.ones((1, 2, 5, 5)), np.ones((3, 2, 3, 3))],
                    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
                    name="auto_pad_of_symbolic_size",
                    constants=[1],
                ),
                match=r"Conv.*auto_pad=SAME_UPPER.*symbolic.*(fix|export)",
                error=UnsupportedOperatorError,
                shapes="symbolic",
            ),
            ErrorInput(
                Sample([np.ones((1, 2, 5, 5)), np.ones((3, 2, 3, 3))], name="weight_of_symbolic_shape"),
                match=r"Conv.*weight 'input1'.*declare the shape",
                error=UnsupportedOperatorError,
                shapes="symbolic",
            ),
        ],
    ),
    OperatorSpec(
        "ConvTranspose",
        transposed_samples,
        torch=torch_transposed_convolution,
        shapes=("static", "batch"),
        error_inputs=[
            ErrorInput(
                Sample(
                    [np.ones((1, 2, 3, 3)), np.ones((2, 2, 3, 3))],
                    {"output_shape": [6, 6], "strides": [2, 2]},
                    name="output_shape_of_symbolic_input",
                    constants=[1],
                ),
                match=r"ConvTranspose.*output_shape=\[6, 6\].*symbolic.*(fix|export)",
                error=UnsupportedOperatorError,
                shapes="symbolic",
            ),
        ],
    ),
]
