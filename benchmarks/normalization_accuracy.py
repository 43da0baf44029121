"""How many digits normalization layers keep: burnish's graphs on onnxruntime beside PyTorch and onnxruntime's own operators.

    python benchmarks/normalization_accuracy.py            print the table
    python benchmarks/normalization_accuracy.py --write    and put it into docs/normalization-accuracy.md

Every layer normalizes float32 values of mean mu and standard deviation 1 over groups of N elements; kappa is about mu. The
errors of the output y and of the input gradient dx are ‖error‖ / ‖exact‖, against the same layer in float64 on the same
float32 input, with signed random cotangents.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper
from torch.nn import functional

import burnish

DOCUMENT = Path(__file__).parent.parent / "docs" / "normalization-accuracy.md"
MEANS = (0.0, 1e1, 1e2, 1e3, 1e4, 1e5)
COUNTS = (2, 16, 1024, 65536, 1_000_000)
CHANNELS = 4
EPSILON = 1e-5


@dataclass(frozen=True)
class Layer:
    """A layer, with the shape that makes every group hold N elements.

    Attributes:
        shape: of the input, for N.
        node: the ONNX node over the inputs ``x``, ``scale``, ``bias`` (and running statistics for batch normalization).
        opset: of the model.
        parameters: the inputs beside x, in order: name and value for N.
        torch: the same in PyTorch, in the dtype of its argument.
    """

    name: str
    shape: Callable[[int], tuple[int, ...]]
    node: Callable[[int], onnx.NodeProto]
    parameters: Callable[[int], dict[str, np.ndarray]]
    torch: Callable[[torch.Tensor], torch.Tensor]
    opset: int = 21


def per_channel(_: int) -> dict[str, np.ndarray]:
    return {"scale": np.ones(CHANNELS, np.float32), "bias": np.zeros(CHANNELS, np.float32)}


def with_statistics(count: int) -> dict[str, np.ndarray]:
    return per_channel(count) | {"mean": np.zeros(CHANNELS, np.float32), "variance": np.ones(CHANNELS, np.float32)}


def batch_normalization(_: int) -> onnx.NodeProto:
    return helper.make_node(
        "BatchNormalization",
        ["x", "scale", "bias", "mean", "variance"],
        ["y", "running_mean", "running_variance"],
        training_mode=1,
        epsilon=EPSILON,
    )


def images(count: int) -> tuple[int, ...]:
    """[samples, channels, positions] with N = samples * positions."""
    samples = 16 if count >= 1024 else 2
    return (samples, CHANNELS, count // samples)


LAYERS = (
    Layer(
        "BatchNormalization [N, C, L]",
        images,
        batch_normalization,
        with_statistics,
        lambda x: functional.batch_norm(x, None, None, training=True, eps=EPSILON),
    ),
    Layer(
        "BatchNormalization [N, C]",
        lambda count: (count, CHANNELS),
        batch_normalization,
        with_statistics,
        lambda x: functional.batch_norm(x, None, None, training=True, eps=EPSILON),
    ),
    Layer(
        "LayerNormalization",
        lambda count: (CHANNELS, count),
        lambda _: helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["y"], epsilon=EPSILON),
        lambda count: {"scale": np.ones(count, np.float32), "bias": np.zeros(count, np.float32)},
        lambda x: functional.layer_norm(x, x.shape[1:], eps=EPSILON),
    ),
    Layer(
        "RMSNormalization",
        lambda count: (CHANNELS, count),
        lambda _: helper.make_node("RMSNormalization", ["x", "scale"], ["y"], epsilon=EPSILON),
        lambda count: {"scale": np.ones(count, np.float32)},
        lambda x: functional.rms_norm(x, x.shape[1:], eps=EPSILON),
        opset=23,
    ),
    Layer(
        "GroupNormalization",
        lambda count: (2, CHANNELS, count // 2),
        lambda _: helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["y"], num_groups=2, epsilon=EPSILON),
        per_channel,
        lambda x: functional.group_norm(x, 2, eps=EPSILON),
    ),
    Layer(
        "InstanceNormalization",
        lambda count: (2, CHANNELS, count),
        lambda _: helper.make_node("InstanceNormalization", ["x", "scale", "bias"], ["y"], epsilon=EPSILON),
        per_channel,
        lambda x: functional.instance_norm(x, eps=EPSILON),
    ),
)


@dataclass(frozen=True)
class Errors:
    """Relative errors of y and dx."""

    y: float
    dx: float


def model_of(layer: Layer, count: int) -> onnx.ModelProto:
    node = layer.node(count)
    parameters = layer.parameters(count)
    shape = ["batch", *layer.shape(count)[1:]]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)]
    # Running outputs that nothing reads are written over initializers, also over others of equal value.
    outputs += [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [CHANNELS]) for name in node.output[1:]]
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        outputs,
        [onnx.numpy_helper.from_array(array, name) for name, array in parameters.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", layer.opset)], ir_version=10)


def relative(actual: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - exact) / np.linalg.norm(exact))


def in_pytorch(
    layer: Layer, x: np.ndarray, cotangent: np.ndarray, dtype: torch.dtype, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    tensor = torch.from_numpy(x).to(device, dtype).requires_grad_()
    y = layer.torch(tensor)
    y.backward(torch.from_numpy(cotangent).to(device, dtype))
    assert tensor.grad is not None
    return y.detach().cpu().numpy(), tensor.grad.cpu().numpy()


def measure(layer: Layer, count: int, mean: float, seed: int = 0) -> tuple[Errors, Errors, float]:
    """Return the errors of burnish and of PyTorch, and the error of y of onnxruntime's own operator (NaN where it has none)."""
    random = np.random.default_rng(seed)
    shape = layer.shape(count)
    x = (random.standard_normal(shape) + mean).astype(np.float32)
    cotangent = random.standard_normal(shape).astype(np.float32)
    exact = in_pytorch(layer, x, cotangent, torch.float64)
    theirs = in_pytorch(layer, x, cotangent, torch.float32)
    import onnxruntime  # the campaign on a GPU reads the layers, and has none

    model = model_of(layer, count)
    gradient = burnish.grad(model, "x", of="y")
    outputs = burnish.engines.get("onnxruntime").run(gradient, {"x": x, "cotangent:y": cotangent})
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        own = relative(onnxruntime.InferenceSession(model.SerializeToString(), options).run(["y"], {"x": x})[0], exact[0])
    except Exception:  # an operator onnxruntime has no CPU kernel for; its errors share no base class
        own = float("nan")
    return (
        Errors(relative(outputs["y"], exact[0]), relative(outputs["grad:x"], exact[1])),
        Errors(relative(theirs[0], exact[0]), relative(theirs[1], exact[1])),
        own,
    )


def table() -> list[str]:
    rows = [
        "| layer | N | mean / std | y: burnish | PyTorch | onnxruntime | dx: burnish | PyTorch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layer in LAYERS:
        for count in COUNTS:
            for mean in MEANS:
                ours, theirs, own = measure(layer, count, mean)
                figures = " | ".join(f"{error:.1e}" for error in (ours.y, theirs.y, own, ours.dx, theirs.dx))
                rows.append(f"| {layer.name} | {count} | {mean:g} | {figures} |")
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/normalization-accuracy.md")
    arguments = parser.parse_args()
    rows = table()
    if arguments.write:
        import onnxruntime

        introduction = (
            "# Accuracy of normalization layers\n\n"
            "Relative errors, by norm, of a float32 layer against float64 on the same input: the output y, and the input\n"
            "gradient dx for a random signed cotangent. The values have the given mean and standard deviation 1; N elements are\n"
            "normalized together. Measured by `python benchmarks/normalization_accuracy.py --write`: burnish's graphs on\n"
            f"onnxruntime {onnxruntime.__version__}, PyTorch {torch.__version__.split('+')[0]}, and onnxruntime's own "
            "operators.\n\n"
            "Of two elements (N = 2) the exact dx is of the order of epsilon, what is left of terms 10^5 times as large: no\n"
            "float32 arithmetic keeps more digits of it than are shown.\n\n"
        )
        DOCUMENT.write_text(introduction + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
