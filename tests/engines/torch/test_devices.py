"""Graphs for a GPU, followed without one: fake tensors know their device, and refuse to be mixed with those of another."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import burnish
from burnish import optim
from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.translate import translation
from burnish.engines.torch.translate.dtypes import torch_dtype
from burnish.engines.torch.translate.translation import translate
from burnish.models import residual_network
from oracles.combinations import diagonal
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


class ConvolutionDtypes(TorchDispatchMode):
    """The dtypes that convolutions and their gradients compute in."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "convolution" in operator.__name__:
            self.dtypes |= {operand.dtype for operand in args[:3] if isinstance(operand, torch.Tensor)}
        return operator(*args, **(kwargs or {}))


class Reductions(TorchDispatchMode):
    """The reductions over all samples and pixels of images: their names."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        x, axes = (*args, None, None)[:2]
        if isinstance(x, torch.Tensor) and x.dim() == 4 and x.shape[0] > 1 and axes == [0, 2, 3]:
            self.names.append(operator.__name__.partition(".")[0])
        return operator(*args, **(kwargs or {}))


@pytest.mark.slow
@diagonal(("name", PROGRAMS), ("graph", ["step", "evaluate", "predict"]))
def test_everything_is_computed_on_the_gpu(name, graph, monkeypatch):
    program = PROGRAMS[name]()
    runner = open_program(TorchEngine(compile="none"), program, program.initial_state(0))
    monkeypatch.setattr(runner, "_device", CUDA)  # what is slow in sixteen bits on this CPU is not on a GPU
    model = runner._prepared(graph, fused=False)
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
        with ConvolutionDtypes() as convolutions:
            results = module(*inputs)
    if name.startswith("residual"):
        mixed = name.removeprefix("residual").removeprefix("-")
        precision = mixed if mixed and graph != "predict" else "float32"  # predictions are those of the float32 program
        assert convolutions.dtypes == {getattr(torch, precision)}
    for entry, tensor in zip(signature.outputs, results, strict=True):
        assert tensor.device.type == "cuda", entry.name
        assert tensor.dtype == torch_dtype(entry.dtype), entry.name


def test_the_statistics_of_batch_normalization_are_one_reduction(monkeypatch):
    """A GPU computes at the pace of its memory: the mean by itself would read the images once more."""
    program = PROGRAMS["residual"]()
    runner = open_program(TorchEngine(compile="none"), program, program.initial_state(0))
    monkeypatch.setattr(runner, "_device", CUDA)
    monkeypatch.setattr(translation, "tensor_of", Constant)
    with FakeTensorMode(), torch.no_grad():
        module = translate(runner._prepared("step", fused=False), CUDA)
        shapes = [
            [extent if isinstance(extent, int) else 4 for extent in entry.extents] for entry in program.signature["step"].inputs
        ]
        dtypes = [torch_dtype(entry.dtype) for entry in program.signature["step"].inputs]
        with Reductions() as reductions:
            module(*(torch.empty(shape, dtype=dtype, device=CUDA) for shape, dtype in zip(shapes, dtypes, strict=True)))
    assert reductions.names.count("var_mean") == 3
    assert "mean" not in reductions.names
    assert len(reductions.names) == 3 * 3  # and two sums for the gradients of each layer
