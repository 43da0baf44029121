"""Graphs for a GPU, followed without one: fake tensors know their device, and refuse to be mixed with those of another."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import burnish
from burnish import optim
from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.translate import translation
from burnish.engines.torch.translate.dtypes import torch_dtype
from burnish.engines.torch.translate.translation import translate
from burnish.models import residual_network
from oracles.open_program import open_program
from oracles.small_networks import perceptron, transformer

CUDA = torch.device("cuda")
PROGRAMS = {
    "residual": lambda: burnish.compile(residual_network(width=4, blocks=(1,)), optimizer=optim.sgd(lr=0.1, momentum=0.9)),
    "residual-bfloat16": lambda: burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="adam", precision="bfloat16"),
    "residual-float16": lambda: burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="sgd", precision="float16"),
    "dropout": lambda: burnish.compile(perceptron(dropout=True), optimizer=optim.adamw(lr=optim.schedules.cosine(0.1, steps=9))),
    "transformer": lambda: burnish.compile(transformer(), optimizer="lion"),
}


class Constant:
    """A constant that goes to a GPU which is not there: ``Tensor.to`` would look for it."""

    def __init__(self, array, dtype):
        self.shape, self.dtype = array.shape, torch_dtype(dtype)

    def to(self, device):
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@pytest.mark.parametrize("graph", ["step", "evaluate", "predict"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_is_computed_on_the_gpu(name, graph, monkeypatch):
    program = PROGRAMS[name]()
    model = open_program(TorchEngine(compile="none"), program, program.initial_state(0))._prepared(graph, fused=False)
    signature = program.signature[graph]
    monkeypatch.setattr(translation, "tensor_of", Constant)
    with FakeTensorMode(), torch.no_grad():
        module = translate(model, CUDA)
        inputs = [
            torch.empty(
                [extent if isinstance(extent, int) else 4 for extent in entry.extents],
                dtype=torch_dtype(entry.dtype),
                device=CUDA,
            )
            for entry in signature.inputs
        ]
        results = module(*inputs)
    for entry, tensor in zip(signature.outputs, results, strict=True):
        assert tensor.device.type == "cuda", entry.name
        assert tensor.dtype == torch_dtype(entry.dtype), entry.name
