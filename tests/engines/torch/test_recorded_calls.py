"""Functions that a graph calls as they are."""

from __future__ import annotations

import torch
from torch import fx

from burnish.engines.torch.translate.rules import records_one_call


@records_one_call
def halved(tensor: torch.Tensor, times: int = 1) -> tuple[torch.Tensor, int]:
    """A branch on sizes, which no proxy has."""
    return (tensor / 2**times, times) if tensor.numel() > 1 else (tensor, 0)


def test_a_graph_calls_the_function_itself_once() -> None:
    class Model(torch.nn.Module):
        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            return halved(tensor, times=2)[0] + 1

    module = fx.symbolic_trace(Model())
    (call,) = (node for node in module.graph.nodes if node.name == "halved")
    assert call.target is halved.__wrapped__  # type: ignore[attr-defined]
    for tensor in (torch.full((3,), 8.0), torch.full((1,), 8.0)):
        assert torch.equal(module(tensor), Model()(tensor))


def test_on_tensors_it_is_called() -> None:
    halves, times = halved(torch.tensor([4.0, 6.0]))
    assert halves.tolist() == [2.0, 3.0]
    assert times == 1
