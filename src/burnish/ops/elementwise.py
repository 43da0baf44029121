"""Elementwise operators: arithmetic with broadcasting and activations."""

from __future__ import annotations

from burnish.graph import Tensor
from burnish.ops.registry import Operation, gradient


@gradient("Identity")
def identity(op: Operation, dy: Tensor) -> Tensor:
    return dy


@gradient("Add")
def add(op: Operation, dy: Tensor) -> tuple[Tensor, Tensor]:
    return dy, dy


@gradient("Mul")
def mul(op: Operation, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = op.required(0), op.required(1)
    return dy * b if op.wants(0) else None, dy * a if op.wants(1) else None


@gradient("Tanh")
def tanh(op: Operation, dy: Tensor) -> Tensor:
    y = op.output
    return dy * (1 - y * y)
