"""Two wrapped modules with an optimizer each, as adversarial networks train, beside the same in PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import burnish.torch

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

STEPS = 3


def networks() -> tuple[nn.Module, nn.Module]:
    """A generator with batch normalization and a discriminator of images 8 × 8, in float64; epsilon is one that ONNX holds."""
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(4, 32), nn.Unflatten(1, (8, 2, 2)), nn.BatchNorm2d(8, eps=2.0**-17), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.BatchNorm2d(4, eps=2.0**-17), nn.ReLU(),
        nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.25), nn.Conv2d(4, 8, 4, 2, 1), nn.LeakyReLU(0.25), nn.Flatten(), nn.Linear(32, 1)
    )
    return generator.double(), discriminator.double()


def train(generator: nn.Module, discriminator: nn.Module) -> list[float]:
    """Return the losses of both at each step; the noise and the images are a function of the step."""
    optimizers = [torch.optim.Adam(network.parameters(), lr=0.01, betas=(0.5, 0.999)) for network in (generator, discriminator)]
    right, wrong = torch.ones(6, 1, dtype=torch.float64), torch.zeros(6, 1, dtype=torch.float64)
    losses = []
    for step in range(STEPS):
        source = torch.Generator().manual_seed(step)
        real = torch.randn(6, 1, 8, 8, dtype=torch.float64, generator=source)
        noise = torch.randn(6, 4, dtype=torch.float64, generator=source)
        optimizers[1].zero_grad()
        made = generator(noise)
        judged = nn.functional.binary_cross_entropy_with_logits
        loss = judged(discriminator(real), right) + judged(discriminator(made.detach()), wrong)
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        deceived = judged(discriminator(made), right)
        deceived.backward()
        optimizers[0].step()
        losses += [loss.item(), deceived.item()]
    return losses


def test_wrapped_networks_take_the_steps_of_pytorch() -> None:
    plain = networks()
    wrapped = [copy.deepcopy(network) for network in plain]
    examples = (torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 1, 8, 8, dtype=torch.float64))
    wrapped = [burnish.torch.wrap(network, example) for network, example in zip(wrapped, examples, strict=True)]
    assert train(*wrapped) == pytest.approx(train(*plain), rel=1e-10)
    for network, other in zip(wrapped, plain, strict=True):
        for name, expected in other.state_dict().items():
            torch.testing.assert_close(network.state_dict()[name], expected, rtol=1e-8, atol=1e-9, msg=name)
