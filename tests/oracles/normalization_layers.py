"""Random normalization layers: a drawn configuration, its ONNX model, and the same layer in PyTorch.

``check`` trains nothing: it compares output, running statistics, evaluation and every gradient of one step with PyTorch in
float64, and allows twice PyTorch's own float32 error, or a few roundings of the size of the terms that make the result up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import torch
from onnx import helper
from torch.nn import functional

import burnish

Kind = Literal["batch", "layer", "rms", "group", "instance"]
ROUNDINGS = {"float32": 1e-6, "float64": 1e-12}


@dataclass(frozen=True)
class Configuration:
    """One layer and its input.

    Attributes:
        shape: of the input, [N, C, ...]; the batch is the first extent.
        axis: first normalized axis, for layer and RMS normalization.
        groups: for group normalization.
        trained: which of ``scale`` and ``bias`` are trained; the other stays as it is.
        policy: ``train`` or ``frozen``, for batch normalization.
        rule: of the running variance.
        mean, spread: of the input.
    """

    kind: Kind
    shape: tuple[int, ...]
    axis: int = 1
    groups: int = 1
    trained: tuple[str, ...] = ("scale", "bias")
    policy: str = "train"
    rule: str = "pytorch"
    epsilon: float = 1e-5
    mean: float = 0.0
    spread: float = 1.0
    dtype: str = "float32"
    seed: int = 0

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        return self.shape[self.axis :]

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        return self.normalized_shape if self.kind in ("layer", "rms") else self.shape[1:2]


def draw_arrays(configuration: Configuration) -> dict[str, np.ndarray]:
    """Draw input, targets, parameters and running statistics."""
    random = np.random.default_rng(configuration.seed)
    dtype = configuration.dtype
    parameters = configuration.parameter_shape
    channels = configuration.shape[1:2]
    return {
        "x": (random.standard_normal(configuration.shape) * configuration.spread + configuration.mean).astype(dtype),
        "targets": random.standard_normal(configuration.shape).astype(dtype) * 2,
        "scale": random.uniform(-2, 2, parameters).astype(dtype),
        "bias": random.uniform(-1, 1, parameters).astype(dtype),
        "mean": (random.standard_normal(channels) + configuration.mean).astype(dtype),
        "variance": random.uniform(0.5, 2, channels).astype(dtype),
        "offset": np.zeros(configuration.shape, dtype),
    }


def build_model(configuration: Configuration, arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    """x plus a trained offset of zeros, whose gradient is that of x, through the layer."""
    inputs = ["shifted", "scale", "bias"]
    attributes: dict[str, Any] = {"epsilon": configuration.epsilon}
    operator = {
        "batch": "BatchNormalization",
        "layer": "LayerNormalization",
        "rms": "RMSNormalization",
        "group": "GroupNormalization",
        "instance": "InstanceNormalization",
    }[configuration.kind]
    if configuration.kind == "batch":
        inputs += ["mean", "variance"]
        attributes["momentum"] = 0.9
    if configuration.kind in ("layer", "rms"):
        attributes["axis"] = configuration.axis
    if configuration.kind == "rms":
        inputs.remove("bias")
    if configuration.kind == "group":
        attributes["num_groups"] = configuration.groups
    names = ["offset", *inputs[1:]]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(configuration.dtype))
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "offset"], ["shifted"]), helper.make_node(operator, inputs, ["y"], **attributes)],
        "layer",
        [helper.make_tensor_value_info("x", element, configuration.shape)],
        [helper.make_tensor_value_info("y", element, configuration.shape)],
        [onnx.numpy_helper.from_array(arrays[name], name) for name in names],
    )
    opset = 23 if configuration.kind == "rms" else 21
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def in_pytorch(configuration: Configuration, arrays: dict[str, np.ndarray], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Run the layer forward and backward in PyTorch, in training mode, and evaluate it with the statistics from before."""
    tensors = {name: torch.from_numpy(array).to(dtype) for name, array in arrays.items()}
    # Attributes of ONNX are float32.
    epsilon = float(np.float32(configuration.epsilon))
    momentum = 1 - float(np.float32(0.9))
    leaves = {name: tensors[name].clone().requires_grad_() for name in ("x", "scale", "bias")}
    x, scale, bias = leaves.values()
    mean, variance = tensors["mean"].clone(), tensors["variance"].clone()
    results: dict[str, torch.Tensor] = {}
    if configuration.kind == "batch":
        frozen = functional.batch_norm(x, mean, variance, scale, bias, training=False, eps=epsilon)
        results["evaluation"] = frozen
        if configuration.policy == "train":
            y = functional.batch_norm(x, mean, variance, scale, bias, training=True, momentum=momentum, eps=epsilon)
            if configuration.rule == "onnx":
                count = x.numel() // x.shape[1]
                old = tensors["variance"]
                unbiased = old + (variance - old) / momentum
                variance = old + momentum * (unbiased * (count - 1) / count - old)
        else:
            y = frozen
        results |= {"mean": mean, "variance": variance}
    else:
        if configuration.kind == "layer":
            y = functional.layer_norm(x, configuration.normalized_shape, scale, bias, epsilon)
        elif configuration.kind == "rms":
            y = functional.rms_norm(x, configuration.normalized_shape, scale, epsilon)
        elif configuration.kind == "group":
            y = functional.group_norm(x, configuration.groups, scale, bias, epsilon)
        else:
            y = functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)
        results["evaluation"] = y
    loss = ((y - tensors["targets"]) ** 2).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    results |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
    evaluation = ((results["evaluation"] - tensors["targets"]) ** 2).sum()
    results |= {"dy": 2 * (y - tensors["targets"]), "loss": loss, "evaluation": evaluation}
    return {name: value.detach().double().numpy() for name, value in results.items()}


def in_burnish(configuration: Configuration, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same by a program on onnxruntime (float32) or the reference engine (float64)."""
    trained = ["offset", *(name for name in configuration.trained if not (name == "bias" and configuration.kind == "rms"))]
    program = burnish.compile(
        build_model(configuration, arrays),
        loss=burnish.losses.mean_squared_error(reduction="sum"),
        trainable=trained,
        norm=configuration.policy if configuration.kind == "batch" else "train",
        running_variance=configuration.rule,
    )
    engine = burnish.engines.get("onnxruntime" if configuration.dtype == "float32" else "reference")
    given = program.initial_state() | {"x": arrays["x"], "targets": arrays["targets"]}
    outputs = engine.run(program.grad, {entry.name: given[entry.name] for entry in program.signature["grad"].inputs})
    evaluated = engine.run(program.evaluate, {entry.name: given[entry.name] for entry in program.signature["evaluate"].inputs})
    results = {"loss": outputs["loss"], "dx": outputs["grad:offset"]}
    if configuration.kind in ("batch", "group"):
        # In inference the other layers are the runtime's own operators, with their accuracy.
        results["evaluation"] = evaluated["loss"]
    results |= {f"d{name}": outputs[f"grad:{name}"] for name in trained[1:]}
    if configuration.kind == "batch":
        for name in ("mean", "variance"):
            results[name] = outputs.get(f"next:stat/{name}", arrays[name])
    return {name: np.asarray(value, np.float64) for name, value in results.items()}


def sizes_of_terms(configuration: Configuration, arrays: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> dict[str, float]:
    """The norms of the terms that each gradient is the sum of: where these cancel, rounding is relative to them."""
    cotangent = float(np.linalg.norm(exact["dy"]))
    amplification = np.abs(arrays["scale"]).max() / smallest_spread(configuration, arrays)
    sizes = {"dx": float(cotangent * amplification), "dscale": cotangent, "dbias": cotangent}
    if configuration.kind == "batch":
        # Inference is the standard operator, which computes x * a + b: terms of the size of the mean cancel.
        deviation = 2 * np.sqrt(exact["evaluation"])
        inference = np.abs(arrays["scale"]).max() / np.sqrt(arrays["variance"].min() + configuration.epsilon)
        sizes["evaluation"] = float(deviation * inference * np.linalg.norm(arrays["x"]))
    return sizes


def smallest_spread(configuration: Configuration, arrays: dict[str, np.ndarray]) -> float:
    """The smallest root of variance + epsilon (or of the mean square) that anything is divided by."""
    x = arrays["x"].astype(np.float64)
    kind, rank = configuration.kind, x.ndim
    if kind == "batch" and configuration.policy == "frozen":
        squares = arrays["variance"]
    elif kind == "batch":
        squares = x.var((0, *range(2, rank)))
    elif kind == "group":
        squares = x.reshape(x.shape[0], configuration.groups, -1).var(-1)
    elif kind == "instance":
        squares = x.var(tuple(range(2, rank)))
    else:
        axes = tuple(range(configuration.axis, rank))
        squares = x.var(axes) if kind == "layer" else (x**2).mean(axes)
    return float(np.sqrt(squares + configuration.epsilon).min())


def check(configuration: Configuration) -> None:
    """Raise AssertionError, naming the result, where burnish and PyTorch differ beyond rounding."""
    arrays = draw_arrays(configuration)
    exact = in_pytorch(configuration, arrays, torch.float64)
    theirs = in_pytorch(configuration, arrays, getattr(torch, configuration.dtype))
    ours = in_burnish(configuration, arrays)
    sizes = sizes_of_terms(configuration, arrays, exact)
    roundings = ROUNDINGS[configuration.dtype]
    for name, value in ours.items():
        assert np.isfinite(value).all() or not np.isfinite(exact[name]).all(), f"{name} is not finite: {configuration}"
        error = np.linalg.norm(value - exact[name])
        own = np.linalg.norm(theirs[name] - exact[name])
        floor = roundings * max(float(np.linalg.norm(exact[name])), sizes.get(name, 0.0))
        assert error <= max(2 * own, floor), f"{name} differs by {error} (PyTorch by {own}, floor {floor}): {configuration}"


def check_that_evaluation_leaves_the_state(configuration: Configuration) -> None:
    """Raise AssertionError when evaluating or predicting changes anything of a session's state."""
    arrays = draw_arrays(configuration)
    program = burnish.compile(build_model(configuration, arrays), loss="mse")
    session = burnish.Session(program)
    before = session.state()
    session.evaluate({"x": arrays["x"], "targets": arrays["targets"]})
    session.predict({"x": arrays["x"]})
    for name, array in session.state().items():
        assert np.array_equal(array, before[name]), f"evaluation changed {name}: {configuration}"
