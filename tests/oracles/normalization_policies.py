"""A network with two batch normalizations, as an ONNX model and in PyTorch under every policy, in float64.

PyTorch's own batch normalization is the reference wherever it has one; renormalization is written out with ``detach``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import torch
import torch.nn.functional as functional
from onnx import TensorProto, helper, numpy_helper

CHANNELS = 3
# Exact in float32, in which the model holds them.
EPSILON = {"bn1": 2.0**-10, "bn2": 2.0**-17}
MOMENTUM = {"bn1": 0.75, "bn2": 0.875}
SIDE = 3

# (layer's input, scale, bias, running mean, running variance, epsilon, step) -> y, mean and variance that enter the running ones
Layer = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def network(rank: int, batch: int | str = "batch", dtype: type = np.float32, seed: int = 0) -> onnx.ModelProto:
    """A product and a bias, ``bn1``, Tanh, a product and a bias, ``bn2``: x and y [batch, 3, 3, ...], of a rank of 2 or more."""
    generator = np.random.default_rng(seed)
    spatial = [SIDE] * (rank - 2)
    weights: dict[str, np.ndarray] = {}
    nodes = []
    value = "x"
    for linear, norm in (("first", "bn1"), ("second", "bn2")):
        weights[f"{linear}.weight"] = generator.normal(0, 1, (SIDE, SIDE))
        weights[f"{linear}.bias"] = generator.normal(0, 1, (CHANNELS, *[1] * (rank - 2)))
        weights[f"{norm}.weight"] = generator.normal(1, 0.5, CHANNELS)
        weights[f"{norm}.bias"] = generator.normal(0, 0.5, CHANNELS)
        weights[f"{norm}.running_mean"] = generator.normal(0, 0.5, CHANNELS)
        weights[f"{norm}.running_var"] = generator.uniform(0.5, 2, CHANNELS)
        operands = [f"{norm}.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
        result = "y" if norm == "bn2" else norm
        nodes += [
            helper.make_node("MatMul", [value, f"{linear}.weight"], [f"{linear}_product"], name=f"/{linear}/MatMul"),
            helper.make_node("Add", [f"{linear}_product", f"{linear}.bias"], [linear], name=f"/{linear}/Add"),
            helper.make_node(
                "BatchNormalization",
                [linear, *operands],
                [result],
                name=f"/{norm}",
                epsilon=EPSILON[norm],
                momentum=MOMENTUM[norm],
            ),
        ]
        if norm == "bn1":
            nodes.append(helper.make_node("Tanh", ["bn1"], ["hidden"]))
            value = "hidden"
    element = TensorProto.DOUBLE if dtype is np.float64 else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", element, [batch, CHANNELS, *spatial])],
        [helper.make_tensor_value_info("y", element, [batch, CHANNELS, *spatial])],
        [numpy_helper.from_array(array.astype(dtype), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def batches(rank: int, number: int, samples: int, dtype: type = np.float32, seed: int = 1) -> list[dict[str, np.ndarray]]:
    """Batches whose mean drifts, so that the statistics of a batch and the running ones differ."""
    generator = np.random.default_rng(seed)
    spatial = [SIDE] * (rank - 2)
    return [
        {
            "x": generator.normal(0.4 * index, 1 + 0.5 * index, (samples, CHANNELS, *spatial)).astype(dtype),
            "targets": generator.normal(0, 1, (samples, CHANNELS, *spatial)).astype(dtype),
        }
        for index in range(number)
    ]


def statistics(x: torch.Tensor, ddof: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance per channel of [N, C, ...]."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    return x.mean(axes), x.var(axes, correction=ddof)


def train(ddof: int) -> Layer:
    def layer(x, scale, bias, mean, variance, epsilon, step):
        y = functional.batch_norm(x, None, None, scale, bias, training=True, eps=epsilon)
        return y, *statistics(x, ddof)

    return layer


def frozen(x, scale, bias, mean, variance, epsilon, step):
    return functional.batch_norm(x, mean, variance, scale, bias, training=False, eps=epsilon), mean, variance


def ghost(size: int, ddof: int) -> Layer:
    def layer(x, scale, bias, mean, variance, epsilon, step):
        groups = x.split(size)
        y = torch.cat([functional.batch_norm(group, None, None, scale, bias, training=True, eps=epsilon) for group in groups])
        means, variances = zip(*(statistics(group, ddof) for group in groups), strict=True)
        return y, torch.stack(means).mean(0), torch.stack(variances).mean(0)

    return layer


def renorm(r_max: float, d_max: float, start: int, r_max_step: int, d_max_step: int, ddof: int) -> Layer:
    def ramp(step: int, end: int, first: float, last: float) -> float:
        return float(np.interp(step, [start, end], [first, last])) if end > start else last

    def layer(x, scale, bias, mean, variance, epsilon, step):
        axes = [axis for axis in range(x.dim()) if axis != 1]
        along = [1, -1, *[1] * (x.dim() - 2)]
        batch_mean = x.mean(axes)
        deviation = x - batch_mean.reshape(along)
        batch_std = ((deviation * deviation).mean(axes) + epsilon).sqrt()
        std = (variance + epsilon).sqrt()
        bound = ramp(step, r_max_step, 1.0, r_max)
        r = (batch_std / std).clamp(1 / bound, bound).detach()
        bound = ramp(step, d_max_step, 0.0, d_max)
        d = ((batch_mean - mean) / std).clamp(-bound, bound).detach()
        normalized = deviation / batch_std.reshape(along) * r.reshape(along) + d.reshape(along)
        return normalized * scale.reshape(along) + bias.reshape(along), *statistics(x, ddof)

    return layer


def reference(
    state: Mapping[str, np.ndarray],
    batch: Mapping[str, np.ndarray],
    layers: Mapping[str, Layer],
    momentum: Mapping[str, float] | None = None,
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return loss (mean squared error), gradients by initializer, and next running statistics, of one step.

    Args:
        state: of a session, by state name.
        batch: ``x`` and ``targets``.
        layers: for ``bn1`` and ``bn2``, what they do.
        momentum: what they retain of the running statistics; by default what the model says.
    """
    retained = MOMENTUM if momentum is None else momentum
    tensors = {name: torch.tensor(array, dtype=torch.float64) for name, array in state.items() if "/" in name and name[0] in "ps"}
    weights = {name.removeprefix("param/"): t.requires_grad_() for name, t in tensors.items() if name.startswith("param/")}
    running = {name.removeprefix("stat/"): tensor for name, tensor in tensors.items() if name.startswith("stat/")}
    value = torch.tensor(batch["x"], dtype=torch.float64)
    following = {}
    for linear, norm in (("first", "bn1"), ("second", "bn2")):
        value = value @ weights[f"{linear}.weight"] + weights[f"{linear}.bias"]
        mean, variance = running[f"{norm}.running_mean"], running[f"{norm}.running_var"]
        value, *entering = layers[norm](
            value, weights[f"{norm}.weight"], weights[f"{norm}.bias"], mean, variance, EPSILON[norm], int(state["step"])
        )
        for name, old, new in zip(("running_mean", "running_var"), (mean, variance), entering, strict=True):
            following[f"{norm}.{name}"] = (old * retained[norm] + new * (1 - retained[norm])).detach().numpy()
        if norm == "bn1":
            value = value.tanh()
    loss = functional.mse_loss(value, torch.tensor(batch["targets"], dtype=torch.float64))
    loss.backward()
    return loss.item(), {name: weight.grad.numpy() for name, weight in weights.items()}, following
