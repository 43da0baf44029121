"""Complex numbers within a module, which graphs hold as pairs: PyTorch's values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import burnish.torch
from burnish.errors import UnsupportedOperatorError

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

FUNCTIONS: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
    "parts": {
        "unsqueeze": lambda z, w: z.unsqueeze(1) * w,
        "select": lambda z, w: z[:, 0],
        "index": lambda z, w: z[:, torch.tensor([0, 2, 2])],
        "gather": lambda z, w: z.gather(1, torch.zeros(4, 2, dtype=torch.long)),
        "pad": lambda z, w: F.pad(z, (1, 2)),
        "repeat": lambda z, w: z.repeat(1, 2),
        "chunk": lambda z, w: z.chunk(2, 1)[1] + z.unbind(1)[1][:, None],
        "zeros": lambda z, w: torch.cat([z, torch.zeros_like(z), torch.zeros(4, 2, dtype=z.dtype)], 1),
        "put": lambda z, w: torch.zeros(6, 4, dtype=z.dtype).index_put((torch.tensor([0, 2, 2, 5]),), z, accumulate=True),
        "where": lambda z, w: torch.where(z.real > 0, z, w),
        "cumsum": lambda z, w: z.cumsum(1),
        "expand": lambda z, w: z.sum(0).expand(3, 4),
    },
    "arithmetic": {
        "numbers": lambda z, w: (z + 2) * 2.5 - 1j * z.real + z / 2 - (1 - z),
        "quotient": lambda z, w: z / (w + 3) + 1 / (z + 3) + z / (z.real**2 + 1),
        "exp": lambda z, w: torch.exp(1j * z.real) + torch.exp(z),
        "log": lambda z, w: z.log() + z.sqrt() + z**2 + z**0.3,
        "abs": lambda z, w: z.abs() + z.angle() + (z * z.conj()).real + z.norm(dim=-1, keepdim=True),
        "sgn": lambda z, w: z.sgn(),
        "matmul": lambda z, w: z @ w + z.mm(w) + torch.bmm(z[None], w[None])[0] + F.linear(z, w, w[0]),
        "einsum": lambda z, w: torch.einsum("bi,io->bo", z, w) + torch.einsum("bi,bio->bo", z, w.expand(4, 4, 4)),
        "mean": lambda z, w: z.mean((0, 1)) + z.sum(-1),
        "fft": lambda z, w: torch.fft.ifft(torch.fft.fft(z) * w[0]) + torch.fft.irfft(torch.fft.rfft(z.real) * w[0, :3], n=4),
        "dtype": lambda z, w: z.real.to(z.dtype) * w,
    },
}


class Of(nn.Module):
    """Functions of a complex input and a complex parameter."""

    def __init__(self, functions: dict[str, Callable[[Any, Any], Any]], dtype: torch.dtype):
        super().__init__()
        self.functions = [functions]
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=dtype))

    def forward(self, z: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(z, self.weight) for name, function in self.functions[0].items()}


class Rotary(nn.Module):
    """Rotary positions as complex numbers of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        angles = torch.outer(torch.arange(7.0), 10.0 ** -torch.arange(2.0))
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.q(x).float().reshape(*x.shape[:2], 2, 2, 2))
        rotated = torch.view_as_real(z * self.rotations[: x.shape[1]].view(1, x.shape[1], 1, 2))
        return rotated.flatten(2).type_as(x)


class Spectral(nn.Module):
    """The layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 2, 3, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft2(x)
        mixed = torch.zeros(x.shape[0], 4, x.shape[2], x.shape[3] // 2 + 1, dtype=torch.cfloat)
        mixed[:, :, :2, :3] = torch.einsum("bixy,ioxy->boxy", frequencies[:, :, :2, :3], self.weight)
        return torch.fft.irfft2(mixed, s=x.shape[-2:])


def results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    given = module(leaf)
    outputs = list(given.values()) if isinstance(given, dict) else [given]
    generator = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [leaf, *module.parameters()], cotangents)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_operators_over_complex_numbers_are_those_of_pytorch(kind: str) -> None:
    module, z = Of(FUNCTIONS[kind], torch.complex128), torch.randn(4, 4, dtype=torch.complex128)
    wrapped = burnish.torch.wrap(copy.deepcopy(module), z, dynamic_shapes={"z": {}})
    names = [*FUNCTIONS[kind], "gradient of the input", "gradient of the parameter"]
    z = torch.randn(4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    for name, found, wanted in zip(names, results(wrapped, z), results(module, z), strict=True):
        torch.testing.assert_close(found, wanted, msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.slow
def test_rotary_positions_and_fourier_layers_are_computed() -> None:
    for module, shape in ((Rotary(), (7, 8)), (Spectral(), (3, 8, 8))):
        wrapped = burnish.torch.wrap(copy.deepcopy(module), torch.randn(2, *shape))
        x = torch.randn(5, *shape)
        torch.testing.assert_close(results(wrapped, x), results(module, x))


@pytest.mark.slow
def test_a_complex_buffer_is_a_constant_of_a_program_and_a_complex_parameter_is_refused() -> None:
    rotary, x = Rotary(), torch.randn(2, 7, 8)
    program = burnish.compile(rotary, example_inputs=x, loss="mse", optimizer="sgd:lr=0.1")
    found = burnish.Session(program, threads=1).predict({"x": x.numpy()})["output"]
    np.testing.assert_allclose(found, rotary(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedOperatorError, match=r"'weight' is complex, and .* read it by torch\.view_as_complex"):
        burnish.load(Spectral(), example_inputs=torch.randn(2, 3, 8, 8))
