"""The shipped residual network: valid ONNX, seeded, runs on stock ONNX Runtime, equal to the same network in PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from burnish.errors import ConfigurationError
from burnish.models import residual_network


class Block(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels_out)
        self.second = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def reference(channels: int, width: int, blocks: tuple[int, ...], classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    current = width
    for stage, depth in enumerate(blocks):
        for block in range(depth):
            layers.append(Block(current, width << stage, 2 if stage > 0 and block == 0 else 1))
            current = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(current, classes)).eval()


@pytest.mark.parametrize(
    ("input_shape", "width", "blocks", "classes"), [((1, 8, 8), 16, (1, 1, 1), 10), ((3, 9, 7), 4, (2, 1), 3)]
)
def test_computes_what_the_same_pytorch_network_computes(input_shape, width, blocks, classes):
    model = residual_network(input_shape, classes, width, blocks, seed=3)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    network = reference(input_shape[0], width, blocks, classes)
    initializers = {value.name: value.const_value.numpy() for value in model.graph.initializers.values()}
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert [tensor.shape for tensor in state.values()] == [array.shape for array in initializers.values()]
    network.load_state_dict(
        {name: torch.from_numpy(array.copy()) for name, array in zip(state, initializers.values(), strict=True)}, strict=False
    )
    x = np.random.default_rng(0).normal(size=(5, *input_shape)).astype(np.float32)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"x": x})
    np.testing.assert_allclose(logits, network(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_the_batch_is_symbolic():
    model = residual_network()
    assert model.graph.inputs[0].shape.dims[0] == ir.SymbolicDim("batch")
    assert model.graph.outputs[0].shape == ir.Shape(["batch", 10])


def test_weights_follow_the_seed():
    def weights(seed: int) -> list[bytes]:
        return [value.const_value.tobytes() for value in residual_network(width=4, seed=seed).graph.initializers.values()]

    assert weights(1) == weights(1)
    assert weights(1) != weights(2)


def test_convolutions_have_the_variance_of_he_et_al():
    model = residual_network(width=32, blocks=(1,))
    weight = model.graph.initializers["stage1.block1.first.convolution.weight"].const_value.numpy()
    assert weight.std() == pytest.approx(np.sqrt(2 / (32 * 9)), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (8, 8)}, r"input_shape=\(8, 8\) has 2 dimensions; give \(channels, height, width\)"),
        ({"classes": 0}, "classes=0.*every number has to be 1 or more"),
        ({"blocks": ()}, r"blocks=\(\).*every number has to be 1 or more"),
    ],
)
def test_a_size_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        residual_network(**arguments)
