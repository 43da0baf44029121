"""How many bytes of tensors a graph holds at once while the PyTorch engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree


class _Measured(fx.Interpreter):
    """Runs a module call by call, and frees what is not read any more, as its compiled code does.

    Attributes:
        peak: the most bytes held behind a call, inputs left out.
    """

    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=True)
        self.peak = 0

    def run_node(self, n: fx.Node):
        result = super().run_node(n)
        given = {key for key, _ in _storages(value for node, value in self.env.items() if node.op == "placeholder")}
        held = dict(_storages([*self.env.values(), result]))
        if n.op not in ("placeholder", "output"):
            self.peak = max(self.peak, sum(size for key, size in held.items() if key not in given))
        return result


def _storages(values) -> Iterator[tuple[int, int]]:
    for tensor in pytree.tree_leaves(list(values)):
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the PyTorch engine run its graphs so; return the list that the peak of each run is added to, in bytes."""
    peaks: list[int] = []

    def executable(module: fx.GraphModule) -> Callable[..., tuple[torch.Tensor, ...]]:
        def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            interpreter = _Measured(module)
            with torch.inference_mode():
                results = interpreter.run(*inputs)
            peaks.append(interpreter.peak)
            return results

        return call

    monkeypatch.setattr("burnish.engines.torch.engine._without_autograd", executable)
    return peaks
