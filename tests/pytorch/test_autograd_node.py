"""What autograd sees of a wrapped module: a node in C++, and a function in Python where that is not built. Both do the same."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import forward_ad

import burnish.torch
from burnish.engines.torch import native as kernels
from burnish.engines.torch.runtime.autograd_node import NAME, graph_calls
from burnish.engines.torch.translate import splitting
from burnish.errors import EngineError, GradientError
from burnish.torch import differentiable
from burnish.torch.wrapped import HELD

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

NODES = ["node", "function"]


class Gated(nn.Module):
    """Two outputs, one of which the backward pass reads; running statistics, an extent, and an integer that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate = torch.sigmoid(self.norm(x + self.table(rows)))
        return gate, (gate * x).mean(0) / x.shape[0], gate.argmax(1)


@pytest.fixture(params=NODES)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen: str = request.param
    if chosen == "function":
        monkeypatch.setattr(differentiable, "graph_calls", lambda: None)
    elif not (kernels.is_obtainable(NAME) and kernels.available(NAME)):
        pytest.skip("there is no compiler")
    return chosen


def made() -> nn.Module:
    torch.manual_seed(0)
    return burnish.torch.wrap(Gated().double(), inputs())


made_for = functools.cache(lambda kind: made())


def wrapped(kind: str) -> nn.Module:
    """A module of its own, by graphs that those of the kind share."""
    return copy.deepcopy(made_for(kind))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randint(5, (3,))


def gradients(module: nn.Module, x: torch.Tensor, loss: Callable[..., torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    outputs = module(x, rows)
    return [*outputs, *torch.autograd.grad(loss(*outputs), [x, *module.parameters()])]


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "both": lambda gate, mean, _: gate.square().sum() + mean.pow(3).sum(),
    "the first alone": lambda gate, _, __: gate.square().sum(),
    "the second alone": lambda _, mean, __: mean.pow(3).sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_outputs_and_gradients_are_those_of_pytorch(kind: str, loss: str) -> None:
    module, (x, rows) = wrapped(kind), inputs()
    reference = burnish.torch.unwrap(module)
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    found = gradients(module, x, LOSSES[loss], rows)
    moved = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    reference.load_state_dict(before)
    for ours, theirs in zip(found, gradients(reference, x, LOSSES[loss], rows), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for name, theirs in reference.state_dict().items():
        torch.testing.assert_close(moved[name], theirs, rtol=1e-10, atol=1e-12)
    gate, _, position = module(x, rows)
    assert not position.requires_grad
    assert (gate.grad_fn.name() == "BurnishGraph") == (kind == "node")


@pytest.mark.slow
def test_both_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kind, chosen in zip(NODES, (graph_calls, lambda: None), strict=True):
        monkeypatch.setattr(differentiable, "graph_calls", chosen)
        x, rows = inputs()
        found.append(gradients(wrapped(kind), x, LOSSES["both"], rows))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_saved_may_not_change_and_is_there_for_one_backward_pass(kind: str) -> None:
    module, (x, rows) = wrapped(kind), inputs()
    loss = LOSSES["both"](*module(x, rows))
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x)
    gate, _, _ = module(x, rows)
    loss = gate.sum()
    with torch.no_grad():
        gate.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = module(x, rows)[1].sum()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_backward_pass_alone_holds_what_it_reads(kind: str, retain_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []

    def copies(saved: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        references = [weakref.ref(tensor) for tensor in saved if tensor.grad_fn is None and not tensor.requires_grad]
        copied = tuple([tensor.clone() for tensor in saved])
        saved.clear()
        held.extend(reference() is not None for reference in references)
        return copied

    monkeypatch.setattr(splitting, "_taken", copies)
    module = burnish.torch.wrap(
        nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2), nn.Sigmoid()), torch.ones(2, 3), verify=False
    )
    module(torch.ones(2, 3)).sum().backward(retain_graph=retain_graph)
    assert (True in held) == retain_graph
    assert len(held) >= 2


def test_hooks_on_saved_tensors_are_called_and_what_they_give_is_read(kind: str) -> None:
    module, (x, rows) = wrapped(kind), inputs()
    wanted = gradients(module, x, LOSSES["both"], rows)
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor.clone(), lambda tensor: tensor):
        outputs = module(x, rows)
    assert any(tensor is x for tensor in packed)
    found = torch.autograd.grad(LOSSES["both"](*outputs), [x, *module.parameters()])
    for ours, theirs in zip(found, wanted[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_gradients_are_differentiated_again_and_penalties_are_those_of_pytorch(kind: str) -> None:
    module, (x, rows) = wrapped(kind).eval(), inputs()
    found = []
    for part in (module, burnish.torch.unwrap(module)):
        gradient = torch.autograd.grad(LOSSES["both"](*part(x, rows)), x, create_graph=True)[0]
        found.append(torch.autograd.grad(gradient.square().sum(), [x, *part.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_forward_mode_is_refused(kind: str) -> None:
    module, (x, rows) = wrapped(kind), inputs()
    with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError), match=r"forward mode|jvp|forward AD"):
        module(forward_ad.make_dual(x, torch.ones_like(x)), rows)


def test_transforms_of_functions_are_refused(kind: str) -> None:
    module, (x, rows) = wrapped(kind).eval(), inputs()
    with pytest.raises(GradientError, match=r"torch.func do not go through the graph 'Gated'.*burnish.torch.unwrap"):
        torch.func.grad(lambda leaf: module(leaf, rows)[0].sum())(x.detach())


def test_statistics_move_once_where_a_module_is_computed_again(kind: str) -> None:
    """PyTorch's own move with each pass: a call that is computed again ends for us when all is there that the gradients need."""
    module, (x, rows) = wrapped(kind), inputs()
    alone = copy.deepcopy(module)
    gate, mean, _ = torch.utils.checkpoint.checkpoint(module, x, rows, use_reentrant=False)
    found = torch.autograd.grad(LOSSES["both"](gate, mean, None), [x, *module.parameters()])
    for ours, theirs in zip(found, gradients(alone, x, LOSSES["both"], rows)[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert int(module.norm.num_batches_tracked) == 1
    assert torch.equal(module.norm.running_mean, alone.norm.running_mean)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_pass_that_fails_is_named(kind: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (x, rows) = wrapped(kind), inputs()
    module(x, rows)
    (prepared,) = getattr(module, HELD)._prepared.values()
    (passes,) = prepared.graph._graph._passes.values()

    def fail(*_: torch.Tensor) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(getattr(passes, stage), "forward", fail)
    monkeypatch.setattr(passes, "recorded", None)
    with pytest.raises(EngineError, match=f"failed in the {stage} 'Gated' graph: no such kernel. No state has changed"):
        module(x, rows)[0].sum().backward()


@pytest.mark.slow
def test_what_was_wrapped_is_forgotten_with_the_last_call_of_it(kind: str) -> None:
    module, (x, rows) = made(), inputs()
    loss = LOSSES["both"](*module(x, rows))
    (prepared,) = getattr(module, HELD)._prepared.values()
    graph = weakref.ref(prepared.graph._graph)
    del module, prepared
    gc.collect()
    loss.backward()
    assert graph() is not None
    del loss
    gc.collect()
    assert graph() is None
