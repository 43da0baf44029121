"""Convolutions and pools in every combination of attributes: values and gradients of every engine against PyTorch.

A seeded draw of auto_pad, pads, strides, dilations, groups, even and odd kernels, output shapes and paddings, in one to three
dimensions, on sizes that are known and sizes that are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional

import burnish
from burnish.engines.reference import ReferenceEngine
from burnish.engines.torch.engine import TorchEngine
from burnish.errors import BurnishError
from oracles.onnxruntime_outputs import onnxruntime_outputs
from specs.pooling import torch_average_pool, torch_lp_pool, torch_max_pool

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}
POOLS = {"MaxPool": torch_max_pool, "AveragePool": torch_average_pool, "LpPool": torch_lp_pool}
SEEDS = range(40)
SHAPES = ("static", "batch", "symbolic")


@dataclass
class Configuration:
    """One draw: an operator, its attributes, its operands in float64 and what the model knows of the data's shape."""

    op_type: str
    seed: int
    operands: dict[str, np.ndarray] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    kernel: list[int] = field(default_factory=list)
    shapes: str = "static"

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, *self.op_type.encode()])
        rank = int(rng.integers(1, 4))
        self.kernel = rng.integers(1, (4 if rank < 3 else 3) + 1, rank).tolist()
        strides, dilations = rng.integers(1, 4, rank).tolist(), rng.integers(1, 3, rank).tolist()
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(self.kernel, dilations, strict=True)]
        sizes = [int(span + rng.integers(0, 5)) for span in spans]
        self.attributes = {"kernel_shape": self.kernel, "strides": strides, "dilations": dilations}
        mode = str(rng.choice(["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
        if mode != "NOTSET":
            self.attributes["auto_pad"] = mode
        elif rng.random() < 0.7:
            self.attributes["pads"] = [int(rng.integers(0, min(self.kernel[axis % rank], 3))) for axis in range(2 * rank)]
        group = 1 if self.op_type in POOLS else int(rng.choice([1, 2, 3]))
        channels, outputs = (group * int(rng.integers(1, 3)) for _ in range(2))
        self.shapes = str(rng.choice(SHAPES))
        count = 2 * channels * int(np.prod(sizes))
        # All different, for maxima, and none of them zero, for norms.
        self.operands = {"x": (rng.permutation(count) - count / 2 + 0.25).reshape(2, channels, *sizes) / 8}
        if self.op_type in POOLS:
            self._draw_pool(rng)
            return
        self.attributes["group"] = group
        if rng.random() < 0.3:
            del self.attributes["kernel_shape"]
        transposed = self.op_type == "ConvTranspose"
        first, second = (channels, outputs // group) if transposed else (outputs, channels // group)
        self.operands["w"] = rng.normal(size=(first, second, *self.kernel))
        if rng.random() < 0.5:
            self.operands["b"] = rng.normal(size=outputs)
        if transposed:
            self._draw_output(rng, [(size - 1) * stride + span for size, stride, span in zip(sizes, strides, spans, strict=True)])

    def _draw_pool(self, rng: np.random.Generator) -> None:
        self.attributes["ceil_mode"] = int(rng.integers(0, 2))
        if self.op_type == "AveragePool":
            self.attributes["count_include_pad"] = int(rng.integers(0, 2))
        if self.op_type == "LpPool":
            self.attributes["p"] = int(rng.integers(1, 4))

    def _draw_output(self, rng: np.random.Generator, reached: list[int]) -> None:
        largest = [max(pair) for pair in zip(self.attributes["strides"], self.attributes["dilations"], strict=True)]
        padding = [int(rng.integers(0, number)) for number in largest] if rng.random() < 0.4 else [0] * len(reached)
        if any(padding):
            self.attributes["output_padding"] = padding
        if rng.random() < 0.3:
            self.attributes.pop("pads", None)
            whole = [extent + more for extent, more in zip(reached, padding, strict=True)]
            self.attributes["output_shape"] = [max(1, extent - int(rng.integers(0, 3))) for extent in whole]

    @property
    def needs_sizes(self) -> bool:
        """Whether the padding changes with a size that is not known."""
        if self.shapes != "symbolic" or self.op_type == "ConvTranspose":
            return self.shapes == "symbolic" and "output_shape" in self.attributes
        return self.attributes.get("auto_pad", "").startswith("SAME") and max(self.attributes["strides"]) > 1

    def model(self, dtype: int) -> onnx.ModelProto:
        x = self.operands["x"]
        known = {
            "static": x.shape,
            "batch": ("n", *x.shape[1:]),
            "symbolic": ("n", x.shape[1], *(f"d{axis}" for axis in range(x.ndim - 2))),
        }
        shapes = {name: array.shape for name, array in self.operands.items()} | {"x": known[self.shapes]}
        inputs = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in shapes.items()]
        node = helper.make_node(self.op_type, list(self.operands), ["y"], name="node", **self.attributes)
        graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", dtype, None)])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)

    def in_torch(self, x: torch.Tensor, w: torch.Tensor | None = None, b: torch.Tensor | None = None) -> torch.Tensor:
        """By PyTorch's functions, with pads written out from the standard's text."""
        if w is None:
            return POOLS[self.op_type](x, **self.attributes)
        rank, group, mode = len(self.kernel), self.attributes["group"], self.attributes.get("auto_pad", "NOTSET")
        strides, dilations = self.attributes["strides"], self.attributes["dilations"]
        pads = self.attributes.get("pads", [0] * 2 * rank)
        amounts = [(pads[axis], pads[axis + rank]) for axis in range(rank)]
        if self.op_type == "Conv":
            if mode.startswith("SAME"):
                spans = [(size - 1) * dilation + 1 for size, dilation in zip(self.kernel, dilations, strict=True)]
                sizes = zip(x.shape[2:], strides, spans, strict=True)
                amounts = [halves(max((-(-size // step) - 1) * step + span - size, 0), mode) for size, step, span in sizes]
            return CONVOLUTIONS[rank](padded(x, amounts), w, b, strides, 0, dilations, group)
        whole = TRANSPOSED[rank](x, w, None, strides, 0, 0, group, dilations)
        whole = padded(whole, [(0, more) for more in self.attributes.get("output_padding", [0] * rank)])
        wanted = self.attributes.get("output_shape")
        if wanted is not None or mode.startswith("SAME"):
            wanted = wanted or [size * step for size, step in zip(x.shape[2:], strides, strict=True)]
            totals = [extent - target for extent, target in zip(whole.shape[2:], wanted, strict=True)]
            # What the windows do not reach is zero.
            amounts = [halves(total, mode) if total >= 0 else (0, total) for total in totals]
        whole = padded(whole, [(-begin, -end) for begin, end in amounts])
        return whole if b is None else whole + b.reshape(1, -1, *[1] * rank)


def halves(total: int, mode: str) -> tuple[int, int]:
    smaller, larger = total // 2, total - total // 2
    return (smaller, larger) if mode == "SAME_UPPER" else (larger, smaller)


def padded(x: torch.Tensor, amounts: list[tuple[int, int]]) -> torch.Tensor:
    return functional.pad(x, [amount for pair in reversed(amounts) for amount in pair])


def check(configuration: Configuration) -> bool:
    """Compare every engine with PyTorch; False where the output has no elements, or the padding would change with the input."""
    rng = np.random.default_rng(configuration.seed)
    operands = {name: torch.from_numpy(array).requires_grad_() for name, array in configuration.operands.items()}
    y = configuration.in_torch(*operands.values())
    if 0 in y.shape:
        return False
    cotangent = rng.normal(size=y.shape)
    gradients = torch.autograd.grad((y * torch.from_numpy(cotangent)).sum(), list(operands.values()))
    expected = {"y": y.detach().numpy()} | {f"grad:{name}": g.numpy() for name, g in zip(operands, gradients, strict=True)}
    if configuration.needs_sizes:
        with pytest.raises(BurnishError, match=r"'node' .*symbolic.*fix the spatial size"):
            burnish.grad(configuration.model(TensorProto.FLOAT), wrt=list(operands), of="y")
        return False
    graphs = {
        np.dtype(dtype): burnish.grad(configuration.model(element), wrt=list(operands), of="y")
        for dtype, element in ((np.float32, TensorProto.FLOAT), (np.float64, TensorProto.DOUBLE))
    }
    runs = [
        (np.dtype(np.float32), onnxruntime_outputs, 2e-5),
        (np.dtype(np.float64), ReferenceEngine().run, 1e-12),
        (np.dtype(np.float64), lambda model, feeds: TorchEngine().load(model)(feeds), 1e-12),
    ]
    for dtype, run, tolerance in runs:
        feeds = {name: array.astype(dtype) for name, array in (*configuration.operands.items(), ("cotangent:y", cotangent))}
        found = run(graphs[dtype], feeds)
        for name, array in expected.items():
            assert found[name].shape == array.shape, f"{configuration}: {name}"
            error = np.linalg.norm(found[name] - array)
            assert error <= tolerance * max(float(np.linalg.norm(array)), 1e-3), f"{configuration}: {name} of {run}"
    return True


@pytest.mark.slow
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose", *POOLS])
def test_configurations(op_type: str) -> None:
    assert sum(check(Configuration(op_type, seed)) for seed in SEEDS) >= len(SEEDS) / 2


def test_a_grouped_dilated_convolution_with_padding_before() -> None:
    configuration = Configuration("Conv", 0)
    configuration.kernel, configuration.shapes = [3], "static"
    configuration.attributes = {"dilations": [2], "strides": [2], "group": 3, "auto_pad": "SAME_LOWER"}
    rng = np.random.default_rng(0)
    configuration.operands = {"x": rng.normal(size=(2, 3, 12)), "w": rng.normal(size=(6, 1, 3))}
    assert check(configuration)
