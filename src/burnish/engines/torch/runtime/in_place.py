"""A step that writes the next state over the present one, where its loss is finite."""

from __future__ import annotations

import torch

from burnish.program.signature import GraphSignature, Role


class InPlaceStep(torch.nn.Module):
    """A step graph whose results move the state on, for a compiler to fuse with what computes them.

    Whether the state moves is decided where it lies: the host need not know the loss before it does, and where nothing moves each
    entry is written over with its own bits.

    Args:
        module: the step graph: its inputs in the signature's order to its outputs.
        signature: of the step graph.
    """

    def __init__(self, module: torch.nn.Module, signature: GraphSignature):
        super().__init__()
        self._module = module
        names = [entry.name for entry in signature.inputs]
        outputs = list(enumerate(signature.outputs))
        self._moves = [(place, names.index(entry.updates)) for place, entry in outputs if entry.updates is not None]
        self._losses = [place for place, entry in outputs if entry.role == Role.LOSS]
        self._reported = [place for place, entry in outputs if entry.updates is None]

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run a step; returns what it reports, in the signature's order.

        Args:
            arguments: the graph's inputs, of which the state entries are written, and whether to write them, a bool of rank 0.
        """
        *inputs, moves = arguments
        results = self._module(*inputs)
        for place in self._losses:
            moves = moves & results[place].isfinite().all()
        # An entry may take over another, from before the step.
        following = [(target, torch.where(moves, results[place], inputs[target])) for place, target in self._moves]
        for target, tensor in following:
            inputs[target].copy_(tensor)
        return tuple(results[place] for place in self._reported)
