"""Quantized models as exporters and ONNX Runtime's quantizer write them: they train as PyTorch trains its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import nn
from torch.nn import functional

import burnish
from burnish.errors import UntrainedWeightsWarning

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")


class Quantized(nn.Module):
    """Weights by channel and as a whole, activations of seven and of eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(1, 4, 3), nn.Linear(16, 3)
        self.register_buffer("scales", torch.tensor([0.01, 0.012, 0.008, 0.009]))
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 64, 0, 127)
        weight = torch.fake_quantize_per_channel_affine(self.convolution.weight, self.scales, self.zeros, 0, -128, 127)
        hidden = torch.relu(functional.conv2d(x, weight, self.convolution.bias))
        hidden = torch.fake_quantize_per_tensor_affine(hidden, 0.02, 0, 0, 255).flatten(1)
        return functional.linear(
            hidden, torch.fake_quantize_per_tensor_affine(self.head.weight, 0.01, 0, -128, 127), self.head.bias
        )


@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["torchscript", "dynamo"])
def test_fake_quantization_that_pytorch_exported(dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, path, x = Quantized(), tmp_path / "quantized.onnx", torch.randn(2, 1, 4, 4)
    torch.onnx.export(module, (x,), str(path), dynamo=dynamo, opset_version=18, input_names=["x"], output_names=["y"])
    program = burnish.compile(path, optimizer=burnish.optim.sgd(lr=0.1))
    sessions = [burnish.Session(program, engine=engine) for engine in ("onnxruntime", "torch")]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    labels = torch.tensor([0, 2])
    for _ in range(3):
        x = torch.randn(2, 1, 4, 4)
        loss = functional.cross_entropy(module(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for session in sessions:
            assert session.step({"x": x.numpy(), "labels": labels.numpy()})["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for session in sessions:
        state = session.state()
        assert len([name for name in state if name.startswith("param/")]) == 4
        for name, parameter in module.named_parameters():
            np.testing.assert_allclose(state[f"param/{name}"], parameter.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_model_that_onnx_runtime_quantized_at_run_time(tmp_path: Path) -> None:
    """The integers of its matrices stay, and a warning names them; biases and normalization train, before and after them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    plain, path = tmp_path / "plain.onnx", tmp_path / "quantized.onnx"
    axes = {"x": {0: "batch"}}
    torch.onnx.export(
        module, (torch.randn(2, 4),), str(plain), dynamo=False, opset_version=18, input_names=["x"], dynamic_axes=axes
    )
    quantize_dynamic(plain, path, weight_type=QuantType.QInt8, reduce_range=True)  # 8 bits saturate without VNNI
    assert "MatMulInteger" in {node.op_type for node in onnx.load(path).graph.node}
    with pytest.warns(UntrainedWeightsWarning, match=r"^2 weights stay as they are: .*integers, as the model is quantized"):
        program = burnish.compile(path, optimizer=burnish.optim.sgd(lr=0.2))
    assert sorted(program.options["trainable"]) == ["0.bias", "1.bias", "1.weight", "3.bias"]
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    batch = {"x": x, "labels": np.argmax(x[:, :3], axis=1)}
    losses = {}
    for engine in ("onnxruntime", "torch"):
        session = burnish.Session(program, engine=engine)
        losses[engine] = [session.step(batch)["loss"] for _ in range(10)]
    assert losses["torch"] == pytest.approx(losses["onnxruntime"], rel=1e-4)
    assert losses["torch"][-1] < 0.9 * losses["torch"][0]
