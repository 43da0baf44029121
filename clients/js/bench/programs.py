"""The networks that the benchmarks train: writes their programs, each with a batch, and times Python's session on them.

python clients/js/bench/programs.py write FOLDER [NETWORK ...]
python clients/js/bench/programs.py time FOLDER/NETWORK STEPS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from safetensors.numpy import load_file, save_file

import burnish
from burnish.models import bert, residual_network
from oracles.mobilenet import mobilenet_v2
from oracles.small_networks import Network

CLASSES = 10


def perceptron() -> ir.Model:
    """Three dense layers over images of 28 x 28 pixels."""
    network = Network("perceptron", [784])
    x = network.builder.op("Relu", network.dense("first", network.input, 784, 256))
    x = network.builder.op("Relu", network.dense("second", x, 256, 128))
    return network.model(network.dense("head", x, 128, CLASSES))


def convolutional() -> ir.Model:
    """Two convolutions with a pool between them, the mean over all pixels and a dense layer."""
    network = Network("convolutional", [1, 28, 28])
    builder = network.builder
    x = network.input
    for name, channels_in, channels in (("first", 1, 16), ("second", 16, 32)):
        if name == "second":
            x = builder.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
        kernels = network.drawn(f"{name}.weight", channels, channels_in, 3, 3, fan_in=9 * channels_in)
        bias = network.drawn(f"{name}.bias", channels, fan_in=9 * channels_in)
        x = builder.op("Relu", builder.op("Conv", x, kernels, bias, kernel_shape=[3, 3], pads=[1] * 4))
    mean = builder.op("ReduceMean", x, builder.integers([2, 3]), keepdims=0)
    return network.model(network.dense("head", mean, 32, CLASSES))


def text() -> ir.Model:
    return bert(vocabulary=8000, classes=2, width=128, layers=2, heads=4, positions=64)


NETWORKS = {
    "perceptron": (perceptron, None, 32),
    "convolutional": (convolutional, None, 32),
    "digits": (lambda: residual_network(width=16), None, 32),
    "mobilenet-frozen": (mobilenet_v2, ["head.*"], 8),
    "text": (text, None, 16),
}
"""What builds a network, which of its weights train, None for all, and the samples of a batch."""


def write(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        build, trainable, size = NETWORKS[name]
        model = build()
        optimizer = burnish.optim.sgd(lr=0.01, momentum=0.9)
        burnish.compile(model, optimizer=optimizer, metrics=(), trainable=trainable).save(folder / name / "program")
        generator = np.random.default_rng(0)
        batch = {"labels": generator.integers(0, 2 if name == "text" else CLASSES, size)}
        for value in model.graph.inputs:
            shape = [size, *(extent if isinstance(extent, int) else 64 for extent in value.shape.dims[1:])]
            is_index = value.dtype == ir.DataType.INT64
            batch[value.name] = np.ones(shape, np.int64) if is_index else generator.normal(size=shape).astype(np.float32)
        save_file(batch, folder / name / "batch.safetensors")


def time_steps(folder: Path, steps: int) -> dict[str, object]:
    """The first losses, and milliseconds of a step."""
    batch = load_file(folder / "batch.safetensors")
    with burnish.Session(burnish.Program.load(folder / "program"), engine="onnxruntime", threads=1) as session:
        losses = [session.step(batch)["loss"] for _ in range(5)]
        started = time.perf_counter()
        for _ in range(steps):
            session.step(batch)
        return {"losses": losses, "milliseconds": (time.perf_counter() - started) * 1e3 / steps}


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), sys.argv[3:] or [*NETWORKS])
    else:
        print(json.dumps(time_steps(Path(sys.argv[2]), int(sys.argv[3]))))
