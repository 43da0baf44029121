"""``torch.compile(backend=...)``, partial wrapping, and the report of what runs where, beside PyTorch alone."""

from __future__ import annotations

import copy
import importlib.metadata

import pytest
import torch
from torch import nn

import burnish.torch
from burnish.torch.backend import compile_graph, reported
from oracles.pytorch_modules import MODULES, tensors_of

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")


class Doubled(torch.autograd.Function):
    """Twice its input, with a gradient of its own: three times what comes in."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class Branching(nn.Module):
    """A function with a backward of its own in the middle, and a branch that depends on data after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = Doubled.apply(h)
        h = torch.sigmoid(self.second(h))
        if h.sum() > 0:
            h = h * 2
        return self.third(torch.tanh(h))


def compared(model, compiled, calls) -> None:
    """Run both on the same calls, and compare outputs, gradients and buffers."""
    for args, kwargs in calls:
        for module in (model, compiled):
            module.zero_grad()
        found, wanted = (tensors_of(module(*args, **kwargs)) for module in (compiled, model))
        for module_outputs in (found, wanted):
            sum(y.square().sum() for y in module_outputs).backward()
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
        for ours, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-9)
    for ours, theirs in zip(compiled.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


QUICK = ("perceptron", "residual", "language_model", "structured")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODULES])
def test_a_compiled_module_is_the_module_and_burnish_computes_it(name):
    torch._dynamo.reset()
    case = MODULES[name]
    torch.manual_seed(0)
    model = case.build().double()
    compiled = torch.compile(copy.deepcopy(model), backend=compile_graph)
    calls = []
    for seed, batch in enumerate((3, 2, 5)):
        inputs = case.inputs(batch, torch.Generator().manual_seed(seed))
        calls.append(((), inputs) if case.by_name else (tuple(inputs.values()), {}))
    with torch._dynamo.config.patch(allow_rnn=True), reported() as graphs:
        compared(model, compiled, calls)
        assert 0 < len(graphs) <= 2  # the second batch opens it, and the third is taken as it is
        compared(model.eval(), compiled.eval(), calls[:1])
    left = [part for parts in graphs for part in parts if part.runs_in == "PyTorch" and set(part.operators) != {"add_"}]
    assert left == []


@pytest.mark.slow
def test_what_burnish_does_not_compute_stays_in_pytorch_and_the_report_names_it():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Branching().double()
    x = torch.randn(4, 4, dtype=torch.float64)
    wrapped = burnish.torch.wrap(copy.deepcopy(model), x, partial=True)
    compared(model, wrapped, [((x,), {}), ((-x[:2],), {}), ((x[:3],), {})])
    explanation = burnish.torch.explain(model, x)
    assert {operator for part in explanation.parts if part.runs_in == "burnish" for operator in part.operators} >= {
        "linear",
        "tanh",
        "sigmoid",
    }
    (function,) = (part for part in explanation.parts if part.runs_in == "PyTorch")
    assert function.reason == "a custom torch.autograd.Function"
    assert "test_backend.py" in function.line
    (branch,) = explanation.breaks
    assert branch.reason.startswith("a branch that depends on data")
    assert "test_backend.py" in branch.line
    assert "a custom torch.autograd.Function" in str(explanation)
    assert branch.line in str(explanation)


class Halting(nn.Module):
    """Stops in a loop over its layers where their output says so, as models that exit early do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.abs().sum() > 100:
                break
        return x


def test_a_function_that_nothing_is_captured_of_is_reported_with_the_line_that_is_why():
    torch._dynamo.reset()
    explanation = burnish.torch.explain(Halting(), torch.randn(3, 4))
    (halt,) = explanation.breaks
    assert halt.function == "forward"
    assert halt.reason.startswith("a branch that depends on data (Data-dependent branching: Detected")
    assert "Hint" not in halt.reason
    assert "test_backend.py" in halt.line
    assert f"Python: all of forward, but for the functions that it calls: {halt.reason}\n    {halt.line}" in str(explanation)


@pytest.mark.slow
def test_recurrence_is_captured_where_a_module_is_wrapped_in_part():
    torch._dynamo.reset()

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.gru(x)[0][:, -1])

    model = Last().double()
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    with reported() as graphs:
        compared(model, burnish.torch.wrap(copy.deepcopy(model), x, partial=True), [((x,), {}), ((x[:2],), {})])
    assert [part.runs_in for parts in graphs for part in parts] == ["burnish", "burnish"]
    assert [part.runs_in for part in burnish.torch.explain(model, x).parts] == ["burnish"]
    assert not torch._dynamo.config.allow_rnn


def test_the_backend_is_known_by_its_name():
    torch._dynamo.reset()
    entries = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "burnish" not in {entry.name for entry in entries}:
        pytest.skip("burnish was installed before it had a backend: install it again")
    compiled = torch.compile(nn.Linear(2, 2), backend="burnish")
    assert compiled(torch.ones(3, 2)).shape == (3, 2)


def test_explaining_leaves_the_model_as_it_is():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    explanation = burnish.torch.explain(model, [torch.randn(4, 3)])
    assert not model[1].num_batches_tracked
    assert [part.runs_in for part in explanation.parts] == ["burnish", "PyTorch"]
    assert explanation.parts[1].operators == ("add_",)


@pytest.mark.slow
def test_a_tensor_that_is_written_over_in_place_is_seen_by_what_comes_after():
    torch._dynamo.reset()

    class Accumulating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3, dtype=torch.float64))
            self.linear = nn.Linear(3, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.linear(x))
            self.total += h.detach().sum(0)
            return h * self.total

    model = Accumulating()
    compiled = torch.compile(copy.deepcopy(model), backend=compile_graph)
    x = torch.randn(4, 3, dtype=torch.float64)
    compared(model, compiled, [((x,), {}), ((x,), {})])
