"""Windows and filter banks on the PyTorch engine, beside ONNX Runtime's and PyTorch's own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from burnish.engines import get
from burnish.engines.torch import TorchEngine

WINDOWS = {
    "HannWindow": torch.hann_window,
    "HammingWindow": lambda size, **options: torch.hamming_window(size, alpha=25 / 46, beta=21 / 46, **options),
    "BlackmanWindow": torch.blackman_window,
}


def weighted(nodes: list, shape: list, sizes: dict[str, np.ndarray], dtype: int = TensorProto.FLOAT) -> ir.Model:
    """A model that multiplies its input by what nodes make of constants."""
    tensors = {name: numpy_helper.from_array(array, name) for name, array in sizes.items()}
    constants = [helper.make_node("Constant", [], [name], value=tensor) for name, tensor in tensors.items()]
    graph = helper.make_graph(
        [*constants, *nodes, helper.make_node("Mul", ["x", "made"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", dtype, shape)],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))


@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("size", [2, 7, 400])
@pytest.mark.parametrize("kind", WINDOWS)
def test_windows(kind, size, periodic):
    node = helper.make_node(kind, ["size"], ["made"], periodic=periodic)
    model = weighted([node], [size], {"size": np.array(size)})
    x = {"x": np.full(size, 3.0, np.float32)}
    wanted = 3.0 * WINDOWS[kind](size, periodic=bool(periodic), dtype=torch.float64).numpy()
    for engine in (TorchEngine(), get("onnxruntime"), get("reference")):
        np.testing.assert_allclose(engine.run(model, x)["y"], wanted, rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize(("bins", "length", "rate", "low", "high"), [(8, 64, 8192, 0.0, 4096.0), (40, 512, 16000, 20.0, 7600.0)])
def test_mel_weights(bins, length, rate, low, high):
    sizes = {"bins": np.array(bins), "length": np.array(length), "rate": np.array(rate)}
    edges = {"low": np.array(low, np.float32), "high": np.array(high, np.float32)}
    node = helper.make_node("MelWeightMatrix", [*sizes, *edges], ["made"])
    model = weighted([node], [length // 2 + 1, bins], sizes | edges)
    x = {"x": np.ones((length // 2 + 1, bins), np.float32)}
    made = TorchEngine().run(model, x)["y"]
    assert made.max() == 1.0
    for engine in ("onnxruntime", "reference"):
        np.testing.assert_allclose(made, get(engine).run(model, x)["y"], rtol=1e-6, atol=1e-7)


def test_a_window_in_float64():
    node = helper.make_node("HannWindow", ["size"], ["made"], output_datatype=TensorProto.DOUBLE)
    model = weighted([node], [9], {"size": np.array(9)}, TensorProto.DOUBLE)
    y = TorchEngine().run(model, {"x": np.ones(9)})["y"]
    np.testing.assert_allclose(y, torch.hann_window(9, dtype=torch.float64).numpy(), rtol=1e-15, atol=1e-16)
