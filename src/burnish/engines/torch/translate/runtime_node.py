"""Nodes whose translation depends on what is known only when the graph runs: a rank, axes, a shape of unknown length.

The node's own rule runs then, on tensors instead of proxies: every question it asks is answered. It costs a little Python in
every step, so it is the exception: shapes are usually known up to the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from burnish.engines.communicator import Communicator
from burnish.engines.torch.translate.dtypes import ONNX_DTYPES, array_of, torch_dtype
from burnish.engines.torch.translate.host_shapes import Host, Number
from burnish.engines.torch.translate.rules import Call, Rule, checked_results


class Late(torch.nn.Module):
    """Runs a node's rule on the tensors of each run.

    Args:
        node: the node.
        rule: its rule.
        operands: the values that ``forward`` gets, in its order.
        device: where the rule makes tensors.
        opset: of the model.
    """

    def __init__(self, node: ir.Node, rule: Rule, operands: Sequence[ir.Value], device: torch.device, opset: int):
        super().__init__()
        self._node, self._rule, self._operands = node, rule, tuple(operands)
        self._device, self._opset = device, opset

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        found = dict(zip(self._operands, tensors, strict=True))
        results = self._rule(Call(self._node, _Tensors(found, self._device, self._opset)))
        return tuple(self._tensor(result) for result in checked_results(self._node, results))

    def _tensor(self, result: Any) -> Any:
        if not isinstance(result, Host):
            return result
        elements = result.elements[0] if result.rank == 0 else list(result.elements)
        return torch.tensor(elements, dtype=torch_dtype(result.dtype), device=self._device)


class _Tensors:
    """The operands of one node in one run."""

    def __init__(self, tensors: dict[ir.Value, torch.Tensor], device: torch.device, opset: int):
        self._tensors = tensors
        self.device = device
        self.opset = opset
        self.communicator: Communicator | None = None  # an exchange never waits for what is known only then
        self.started: dict[ir.Value, torch.nn.Module] = {}

    def tensor(self, value: ir.Value) -> torch.Tensor:
        return self._tensors[value]

    def host(self, value: ir.Value) -> Host | None:
        array = self.constant(value)
        return None if array is None else Host.of_array(array, self.dtype(value), longest=array.size)

    def number(self, value: ir.Value) -> Number | None:
        tensor = self.tensor(value)
        return tensor.item() if tensor.ndim == 0 else None

    def constant(self, value: ir.Value) -> np.ndarray | None:
        return array_of(self.tensor(value), self.dtype(value))

    def dtype(self, value: ir.Value) -> ir.DataType:
        return ONNX_DTYPES[self.tensor(value).dtype]

    def extents(self, value: ir.Value) -> list[Any]:
        return list(self.tensor(value).shape)

    def module(self, module: torch.nn.Module, operands: Sequence[ir.Value]) -> Any:
        return module(*(self.tensor(value) for value in operands))
