"""An ONNX graph of image classification, run node by node with PyTorch's own functions, whose autograd gives the gradients.

It shares nothing with burnish: neither its reader, nor its rewrites, nor its rules. It has the operators of the files in the onnx
package's ``light`` folder, as opset 9 defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.nn import functional

Attributes = Mapping[str, Any]


@dataclass
class Run:
    """One run of a graph in training mode.

    Attributes:
        batch: samples in the batch.
        statistics: running means and variances by name, which the run moves on as the standard says.
    """

    batch: int
    statistics: dict[str, Tensor] = field(default_factory=dict)


def run(model: onnx.ModelProto, inputs: Mapping[str, Tensor], of: str, statistics: dict[str, Tensor], batch: int) -> Tensor:
    """Compute a value of a model in training mode.

    Args:
        model: of the operators below.
        inputs: its inputs and weights by name; what they do not have is read from the file.
        of: the value.
        statistics: running means and variances by name; replaced by those after the run.
        batch: samples in the batch; the file was written for one.
    """
    graph = model.graph
    state = Run(batch, statistics)
    values = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    values |= inputs
    values |= statistics
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.output[0] in values:
            continue
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "BatchNormalization":
            result = batch_normalization(state, [values[name] for name in node.input[:3]], attributes, node.input[3:])
        else:
            result = OPERATORS[node.op_type](state, [values[name] for name in node.input], attributes)
        values[node.output[0]] = result
        if node.output[0] == of:
            break
    return values[of]


def batch_normalization(state: Run, operands: list[Tensor], attributes: Attributes, running: list[str]) -> Tensor:
    """Normalize by the batch; the running statistics take the population variance, as ONNX has it."""
    x, scale, bias = operands
    axes = [0, *range(2, x.ndim)]
    retained = attributes.get("momentum", 0.9)
    of_batch = x.detach().mean(axes), x.detach().var(axes, unbiased=False)
    for name, statistic in zip(running, of_batch, strict=True):
        state.statistics[name] = retained * state.statistics[name] + (1 - retained) * statistic
    epsilon = attributes.get("epsilon", float(np.float32(1e-5)))  # attributes have the digits of float32
    return functional.batch_norm(x, None, None, scale, bias, training=True, eps=epsilon)


def convolution(state: Run, operands: list[Tensor], attributes: Attributes) -> Tensor:
    x, *weights = operands
    padded = functional.pad(x, sides(attributes))
    return functional.conv2d(padded, *weights, stride=attributes["strides"], groups=attributes.get("group", 1))


def sides(attributes: Attributes) -> tuple[int, int, int, int]:
    """Padding as PyTorch takes it: left, right, top, bottom."""
    top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
    return left, right, top, bottom


def max_pool(state: Run, operands: list[Tensor], attributes: Attributes) -> Tensor:
    padded = functional.pad(operands[0], sides(attributes), value=float("-inf"))
    return functional.max_pool2d(padded, attributes["kernel_shape"], attributes["strides"])


def average_pool(state: Run, operands: list[Tensor], attributes: Attributes) -> Tensor:
    """Mean of the elements inside the image; those of the padding do not count."""
    x = operands[0]
    inside = functional.pad(torch.ones_like(x[:1, :1]), sides(attributes))
    window = attributes["kernel_shape"], attributes["strides"]
    return functional.avg_pool2d(functional.pad(x, sides(attributes)), *window) / functional.avg_pool2d(inside, *window)


def local_response_normalization(state: Run, operands: list[Tensor], attributes: Attributes) -> Tensor:
    names = ("size", "alpha", "beta", "bias")
    size, alpha, beta, bias = (attributes.get(name, usual) for name, usual in zip(names, (None, 1e-4, 0.75, 1.0), strict=True))
    assert size % 2 == 1  # PyTorch's window of an even size lies on the other side
    return functional.local_response_norm(operands[0], size, alpha, beta, bias)


def general_product(state: Run, operands: list[Tensor], attributes: Attributes) -> Tensor:
    assert set(attributes) <= {"transB"}
    left, right, bias = operands
    return left @ (right.T if attributes.get("transB") else right) + bias


def reshape(state: Run, operands: list[Tensor], attributes: Attributes) -> Tensor:
    """To the shape that the file has, which is of one sample, or to that shape for the whole batch."""
    x, target = operands
    shape = target.tolist()
    extents = [x.shape[axis] if extent == 0 else extent for axis, extent in enumerate(shape)]
    if -1 not in extents and torch.Size(extents).numel() * state.batch == x.numel():
        extents[0] *= state.batch
    return x.reshape(extents)


def unsqueeze(state: Run, operands: list[Tensor], attributes: Attributes) -> Tensor:
    x = operands[0]
    for axis in attributes["axes"]:
        x = x.unsqueeze(axis)
    return x


def constant_of_shape(state: Run, operands: list[Tensor], attributes: Attributes) -> Tensor:
    return torch.from_numpy(onnx.numpy_helper.to_array(attributes["value"]).copy()).expand(operands[0].tolist())


def dropout(state: Run, operands: list[Tensor], attributes: Attributes) -> Tensor:
    """Nothing, as masks are drawn in different ways: a model that is compared has a ratio of 0."""
    assert attributes["ratio"] == 0
    return operands[0]


OPERATORS: dict[str, Callable[[Run, list[Tensor], Attributes], Tensor]] = {
    "Add": lambda state, operands, attributes: operands[0] + operands[1],
    "AveragePool": average_pool,
    "Concat": lambda state, operands, attributes: torch.cat(operands, attributes["axis"]),
    "ConstantOfShape": constant_of_shape,
    "Conv": convolution,
    "Dropout": dropout,
    "Gemm": general_product,
    "GlobalAveragePool": lambda state, operands, attributes: operands[0].mean((2, 3), keepdim=True),
    "LRN": local_response_normalization,
    "MaxPool": max_pool,
    "Mul": lambda state, operands, attributes: operands[0] * operands[1],
    "Relu": lambda state, operands, attributes: operands[0].relu(),
    "Reshape": reshape,
    "Sum": lambda state, operands, attributes: sum(operands[1:], operands[0]),
    "Transpose": lambda state, operands, attributes: operands[0].permute(attributes["perm"]),
    "Unsqueeze": unsqueeze,
}
