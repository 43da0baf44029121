"""Two networks with an optimizer each, as adversarial networks train, in every way beside the same in PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import burnish
import burnish.torch
from burnish.torch.backend import compile_graph

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

STEPS, SAMPLES = 3, 6
LEARNING_RATE, BETAS, EPSILON = 2.0**-7, (0.5, 1 - 2.0**-10), 2.0**-27
"""A program holds them in float32, which has these."""


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


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The images and the noise of a step."""
    source = torch.Generator().manual_seed(step)
    real = torch.randn(SAMPLES, 1, 8, 8, dtype=torch.float64, generator=source)
    return real, torch.randn(SAMPLES, 4, dtype=torch.float64, generator=source)


def judged(answers: torch.Tensor, is_real: bool) -> torch.Tensor:
    targets = torch.ones_like(answers) if is_real else torch.zeros_like(answers)
    return nn.functional.binary_cross_entropy_with_logits(answers, targets)


def train(generator: nn.Module, discriminator: nn.Module) -> list[float]:
    """Return the losses of both at each step."""
    optimizers = [
        torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)
        for network in (generator, discriminator)
    ]
    losses = []
    for step in range(STEPS):
        real, noise = batch(step)
        optimizers[1].zero_grad()
        made = generator(noise)
        loss = judged(discriminator(real), True) + judged(discriminator(made.detach()), False)
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        deceived = judged(discriminator(made), True)
        deceived.backward()
        optimizers[0].step()
        losses += [loss.item(), deceived.item()]
    return losses


class Judging(nn.Module):
    """The loss of a discriminator."""

    def __init__(self, discriminator: nn.Module) -> None:
        super().__init__()
        self.discriminator = discriminator

    def forward(self, real: torch.Tensor, made: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": judged(self.discriminator(real), True) + judged(self.discriminator(made), False)}


class Deceiving(nn.Module):
    """The loss of a generator, through a discriminator that does not train."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, copy.deepcopy(discriminator).requires_grad_(False)

    def forward(self, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.generator(noise)
        return {"loss": judged(self.discriminator(made), True), "made": made}


def program_of(module: nn.Module, *examples: torch.Tensor) -> burnish.Program:
    optimizer = burnish.optim.adam(lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)
    return burnish.compile(module, example_inputs=examples, output="loss", optimizer=optimizer, metrics=())


def train_as_programs(generator: nn.Module, discriminator: nn.Module) -> list[float]:
    """The same by a program for each of the two losses; the networks are written back."""
    judging, deceiving = Judging(discriminator), Deceiving(generator, discriminator)
    real, noise = batch(0)
    losses = []
    with (
        burnish.Session(program_of(judging, real, real), engine="torch") as judge,
        burnish.Session(program_of(deceiving, noise), engine="torch") as deceiver,
    ):
        for step in range(STEPS):
            real, noise = batch(step)
            burnish.torch.load_into(deceiving, deceiver)
            with torch.no_grad():
                made = generator(noise)
            losses.append(judge.step({"real": real.numpy(), "made": made.numpy()})["loss"])
            # What does not train is part of the state, too.
            trained = {name: array for name, array in judge.state().items() if name.startswith("param/")}
            deceiver.load_state(deceiver.state() | trained)
            losses.append(deceiver.step({"noise": noise.numpy()})["loss"])
        burnish.torch.load_into(judging, judge)
        burnish.torch.load_into(deceiving, deceiver)
    return losses


@pytest.mark.parametrize(
    "way", ["wrapped", pytest.param("compiled", marks=pytest.mark.campaign), pytest.param("whole", marks=pytest.mark.slow)]
)
def test_networks_take_the_steps_of_pytorch(way: str) -> None:
    plain = networks()
    ours = [copy.deepcopy(network) for network in plain]
    examples = (torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 1, 8, 8, dtype=torch.float64))
    if way == "whole":
        losses = train_as_programs(*ours)
    elif way == "wrapped":
        losses = train(*(burnish.torch.wrap(network, example) for network, example in zip(ours, examples, strict=True)))
    else:
        torch._dynamo.reset()
        losses = train(*(torch.compile(network, backend=compile_graph) for network in ours))
    assert losses == pytest.approx(train(*plain), rel=1e-10)
    for network, other in zip(ours, plain, strict=True):
        for name, expected in other.state_dict().items():
            torch.testing.assert_close(network.state_dict()[name], expected, rtol=1e-8, atol=1e-9, msg=name)
