"""Modules as people write them who have other things in mind than exports, wrapped and compiled, beside PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import burnish
import burnish.torch
from burnish.torch.backend import compile_graph, reported

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

DTYPE = torch.float64


class Translator(nn.Module):
    """Masks what comes later by a mask of its own, which ``torch.nn.Transformer`` looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), dtype=target.dtype)
        return self.transformer(source, target, tgt_mask=mask)


class Checkpointed(nn.Module):
    """Computes its middle again in the backward pass, in the reentrant way, where gradients are off in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.middle = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=True)
        return self.head(checkpoint_sequential(self.middle, 2, x, use_reentrant=True))


class StandardizedConv(nn.Conv2d):
    """Standardizes its weight, of which it takes a view (Qiao et al. 2019)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        deviation = weight.view(weight.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 2.0**-10
        return self._conv_forward(x, weight / deviation, self.bias)


class Biased(nn.Module):
    """Reads a parameter of four axes, which is no kernel, as one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.plain = StandardizedConv(2, 3, 3), nn.Conv2d(3, 3, 1)
        self.bias = nn.Parameter(torch.randn(1, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.conv(x)) + self.bias.view(3, -1).mean(1).view(1, 3, 1, 1)


class Filtered(nn.Module):
    """A filter in the space of frequencies, whose response is a real parameter of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.response = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.response), n=x.shape[-1])


class Mixed(nn.Module):
    """Mixes channels in the space of frequencies by a complex parameter, after a layer of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(2, 3, 3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(torch.tanh(self.layer(x)))
        return torch.fft.irfft(torch.einsum("bif,iof->bof", frequencies, self.weight), n=4)


class Examined(nn.Module):
    """Computes a constant and looks at its values, before anything is read of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(3, 3, dtype=x.dtype).triu()
        if bool((mask == mask.triu()).all()):
            return torch.tanh(self.layer(x)) @ mask
        return x


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "translator": (Translator, ((4, 4), (3, 4))),
    "checkpointed": (Checkpointed, ((3,),)),
    "standardized": (Biased, ((2, 4, 4),)),
    "filtered": (Filtered, ((8,),)),
    "mixed": (Mixed, ((2, 4),)),
    "examined": (Examined, ((3,),)),
}


def agree(model: nn.Module, reference: nn.Module, shapes: tuple[tuple[int, ...], ...], batch: int) -> None:
    """Compare outputs and all gradients of a call, those of inputs too, with cotangents that are random and signed."""
    results = []
    for module in (model, reference):
        module.zero_grad()
        inputs = [normal(batch, *shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
        y = module(*inputs)
        (y * normal(*y.shape, seed=9)).sum().backward()
        results.append([y, *(x.grad for x in inputs), *(parameter.grad for parameter in module.parameters())])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def of(name: str) -> tuple[nn.Module, tuple[tuple[int, ...], ...]]:
    build, shapes = CASES[name]
    torch.manual_seed(0)
    module = build()
    for parameter in module.parameters():
        parameter.data = parameter.data if parameter.is_complex() else parameter.data.double()
    for part in module.modules():
        if isinstance(getattr(part, "eps", None), float):
            part.eps = 2.0**-17  # ONNX holds float32 alone
    return module, shapes


@pytest.mark.parametrize("name", ["checkpointed", "standardized", "filtered", pytest.param("translator", marks=pytest.mark.slow)])
@pytest.mark.quick_cases(1)
def test_a_wrapped_module_computes_what_it_does_in_pytorch(name: str) -> None:
    reference, shapes = of(name)
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), tuple(normal(2, *shape) for shape in shapes))
    for batch in (3, 2):
        agree(wrapped, reference, shapes, batch)
    agree(burnish.torch.unwrap(wrapped), reference, shapes, 2)  # PyTorch computes it with the memory that it has by now


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(first) - 2 * torch.tanh(self.layer(second)) * scale


@pytest.mark.slow
def test_one_example_for_several_inputs_leaves_them_apart() -> None:
    torch.manual_seed(0)
    reference = Difference().double()
    x = normal(4, 3)
    wrapped = burnish.torch.wrap(copy.deepcopy(reference), {"first": x, "second": x, "scale": x})
    agree(wrapped, reference, ((3,), (3,), (3,)), 2)
    model = burnish.load(reference, example_inputs=(x[:3], x[:3], reference.layer.weight))
    uses = {value.name: len(value.uses()) for value in model.graph.inputs}
    assert uses == {"first": 1, "second": 1, "scale": 1}


@pytest.mark.parametrize(("name", "operators"), [("mixed", {"linear", "tanh"}), ("examined", {"ones", "triu", "linear", "tanh"})])
@pytest.mark.quick_cases(1)
def test_what_is_complex_or_reads_nothing_is_captured_around(name: str, operators: set[str]) -> None:
    torch._dynamo.reset()
    reference, shapes = of(name)
    with reported() as graphs:
        agree(torch.compile(copy.deepcopy(reference), backend=compile_graph), reference, shapes, 3)
    ours = {operator for parts in graphs for part in parts if part.runs_in == "burnish" for operator in part.operators}
    left = [part for parts in graphs for part in parts if part.runs_in == "PyTorch"]
    assert ours >= operators
    assert all("is complex" in part.reason for part in left)
    assert bool(left) is (name == "mixed")
