"""Calls of a module through ``torch.compile``: what burnish computes of it, and what PyTorch."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from burnish.engines.torch.engine import TorchEngine
from burnish.torch.backend import compile_graph


def captures_recurrence(module: torch.nn.Module) -> AbstractContextManager[object]:
    """The context in which Dynamo captures a module with its recurrent layers, which it leaves to PyTorch elsewhere.

    Dynamo makes no graph at all of a function that calls one of ``torch.nn.RNN``, ``LSTM`` and ``GRU``, unless it is told to.
    """
    is_recurrent = any(isinstance(part, torch.nn.RNNBase) for part in module.modules())
    return torch._dynamo.config.patch(allow_rnn=True) if is_recurrent else nullcontext()


class PartialCalls:
    """Calls of one module, of which burnish computes what it can.

    Args:
        module: the module.
        engine: what runs burnish's parts.
        examples: arguments of a call, by position and by name.
        verify: whether burnish's parts are compared with PyTorch's when they are made.
    """

    def __init__(self, module: torch.nn.Module, engine: TorchEngine, examples: tuple[Any, Any], verify: bool = True):
        self.module = module
        self._engine = engine
        self._examples = examples
        self._verify = verify
        backend = functools.partial(compile_graph, engine=engine, options={"verify": verify})
        self._compiled: Any = torch.compile(module.forward, backend=backend)

    def copied(self, module: torch.nn.Module) -> PartialCalls:
        """The same for a copy of the module."""
        return PartialCalls(module, self._engine, self._examples, self._verify)

    def made_again(self) -> tuple[Any, ...]:
        """What ``wrap`` takes beside the module."""
        return self._examples, None, self._engine, True, self._verify

    def prepare(self) -> None:
        """Nothing: a call compiles what it reaches."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``forward`` returns."""
        with captures_recurrence(self.module):
            return self._compiled(*args, **kwargs)
