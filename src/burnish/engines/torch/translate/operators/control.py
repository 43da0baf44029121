"""If, Loop and Scan: bodies are separate modules, and Python decides at run time which one runs, and how often.

A body's ``forward`` is called directly: a call of the module would print the place of an error, and hide it from the traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch.translate.dtypes import torch_dtype
from burnish.engines.torch.translate.rules import Call, translates
from burnish.engines.torch.translate.translation import Translator, captured_values


class Branches(torch.nn.Module):
    """One of two bodies, chosen by a condition."""

    def __init__(self, then: torch.nn.Module, otherwise: torch.nn.Module):
        super().__init__()
        self.then, self.otherwise = then, otherwise

    def forward(self, condition: torch.Tensor, *captured: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.then if condition.item() else self.otherwise).forward(*captured)


class Repetition(torch.nn.Module):
    """A body (iteration, condition, state) -> (condition, state, scanned), repeated while the condition holds.

    Args:
        body: the body.
        carried: number of values in the state.
        empty: shape (without the leading axis) and dtype of each scanned output if there are no iterations.
        limited: True if the first operand is the maximal number of iterations.
        conditional: True if the next operand is the initial condition.
        device: device of the iteration number that the body gets.
    """

    def __init__(
        self,
        body: torch.nn.Module,
        carried: int,
        empty: Sequence[tuple[list[int], torch.dtype]],
        limited: bool,
        conditional: bool,
        device: torch.device,
    ):
        super().__init__()
        self.body, self.carried, self.empty = body, carried, list(empty)
        self.limited, self.conditional, self.device = limited, conditional, device

    def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(operands)
        limit = given.pop(0).item() if self.limited else None
        condition = given.pop(0) if self.conditional else torch.tensor(True, device=self.device)
        state, captured = given[: self.carried], given[self.carried :]
        rows: list[list[torch.Tensor]] = [[] for _ in self.empty]
        iteration = 0
        while (limit is None or iteration < limit) and condition.item():
            condition, *results = self.body.forward(torch.tensor(iteration, device=self.device), condition, *state, *captured)
            state = results[: self.carried]
            for row, result in zip(rows, results[self.carried :], strict=True):
                row.append(result)
            iteration += 1
        scanned = [
            torch.stack(row) if row else torch.empty([0, *shape], dtype=dtype, device=self.device)
            for row, (shape, dtype) in zip(rows, self.empty, strict=True)
        ]
        return (*state, *scanned)


class Sweep(torch.nn.Module):
    """A body (state, a slice of each input) -> (state, a slice of each output), over all slices.

    Args:
        body: the body.
        carried: number of values in the state.
        inputs: for each scanned input, its axis, and True if it is read from its end.
        outputs: for each stacked output, its axis, and True if it is filled from its end.
        empty: for each stacked output, shape of a slice and dtype if there are no slices.
        device: device of such an output.
    """

    def __init__(
        self,
        body: torch.nn.Module,
        carried: int,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        empty: Sequence[tuple[list[int], torch.dtype]],
        device: torch.device,
    ):
        super().__init__()
        self.body, self.carried, self.inputs, self.outputs = body, carried, list(inputs), list(outputs)
        self.empty, self.device = list(empty), device

    def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = list(operands[: self.carried])
        swept = operands[self.carried : self.carried + len(self.inputs)]
        captured = operands[self.carried + len(self.inputs) :]
        slices = [
            tensor.flip(axis).unbind(axis) if backwards else tensor.unbind(axis)
            for tensor, (axis, backwards) in zip(swept, self.inputs, strict=True)
        ]
        rows: list[list[torch.Tensor]] = [[] for _ in self.outputs]
        for parts in zip(*slices, strict=True):
            results = self.body.forward(*state, *parts, *captured)
            state = list(results[: self.carried])
            for row, result in zip(rows, results[self.carried :], strict=True):
                row.append(result)
        scanned = [
            torch.stack(row[::-1] if backwards else row, axis)
            if row
            else torch.empty([0, *shape], dtype=dtype, device=self.device).movedim(0, axis)
            for row, (axis, backwards), (shape, dtype) in zip(rows, self.outputs, self.empty, strict=True)
        ]
        return (*state, *scanned)


def _body(op: Call, name: str, captured: Sequence[ir.Value]) -> torch.nn.Module:
    return Translator(op.attribute(name), op.opset, op.device, captured).translated()


def _results(op: Call, results: Any) -> tuple[Any, ...]:
    return tuple(results[index] for index in range(len(op.node.outputs)))


@translates("If")
def branch(op: Call) -> Any:
    captured = captured_values(op.attribute("then_branch"), op.attribute("else_branch"))
    bodies = [_body(op, name, captured) for name in ("then_branch", "else_branch")]
    return _results(op, op.module(Branches(*bodies), [op.value(0), *captured]))


@translates("Loop")
def loop(op: Call) -> Any:
    body: ir.Graph = op.attribute("body")
    captured = captured_values(body)
    carried = len(op) - 2
    empty = [_empty(value) for value in body.outputs[1 + carried :]]
    repetition = Repetition(_body(op, "body", captured), carried, empty, op.has(0), op.has(1), op.device)
    operands = [value for value in op.node.inputs if value is not None]
    return _results(op, op.module(repetition, [*operands, *captured]))


def _empty(value: ir.Value) -> tuple[list[int], torch.dtype]:
    dims = () if value.shape is None else value.shape.dims
    dtype = torch.float32 if value.dtype is None else torch_dtype(value.dtype)
    return [extent if isinstance(extent, int) else 0 for extent in dims], dtype


@translates("Scan", since=9)
def scan(op: Call) -> Any:
    body: ir.Graph = op.attribute("body")
    captured = captured_values(body)
    swept = op.attribute("num_scan_inputs")
    carried = len(op) - swept
    outputs = len(op.node.outputs) - carried
    directions = {
        kind: list(
            zip(
                op.attribute(f"scan_{kind}_axes", [0] * count),
                op.attribute(f"scan_{kind}_directions", [0] * count),
                strict=True,
            )
        )
        for kind, count in (("input", swept), ("output", outputs))
    }
    empty = [_empty(value) for value in body.outputs[carried:]]
    sweep = Sweep(_body(op, "body", captured), carried, directions["input"], directions["output"], empty, op.device)
    return _results(op, op.module(sweep, [*(op.value(index) for index in range(len(op))), *captured]))
