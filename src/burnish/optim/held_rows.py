"""Rows of parameters that no update changes, such as the row of an embedding that padding selects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from burnish.graph import Builder, Tensor
from burnish.optim.average import AVERAGE
from burnish.optim.base import Optimizer, Tensors
from burnish.optim.loss_scale import LossScaled
from burnish.optim.parameter_shapes import known_shape
from burnish.optim.wrapper import Wrapper

HeldRows = Mapping[str, Sequence[int]]
"""Initializer name -> rows of axis 0, counted from 0."""


@dataclass(frozen=True)
class RowHolder(Wrapper):
    """An optimizer that leaves some rows of its parameters as they are, bit for bit, and the averages of these rows too.

    The optimizer inside sees zeros there, of parameter and of gradient, so that these rows have no part in a norm or in decay.
    It is the outermost wrapper: what chooses between an update and none need not keep the sign of a zero (ONNX Runtime's Where
    does not).
    """

    rows: HeldRows = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.optimizer.name

    @property
    def is_scaled(self) -> bool:
        """Whether the optimizer inside skips steps whose gradients overflow."""
        return isinstance(self.optimizer, LossScaled)

    def without(self, names: Collection[str]) -> RowHolder:
        """Return one that leaves the rows of these parameters to whoever calls it."""
        return replace(self, rows={name: rows for name, rows in self.rows.items() if name not in names})

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return self.optimizer.init(builder, params)

    def update(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
        hyperparameters: Mapping[str, Tensor],
    ) -> tuple[Tensors, Tensors]:
        return self.update_where(None, builder, params, gradients, state, step, hyperparameters)

    def update_where(
        self,
        finite: Tensor | None,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
        hyperparameters: Mapping[str, Tensor],
    ) -> tuple[Tensors, Tensors]:
        """Emit one update, as ``update`` does, given whether all gradients are finite where that has been found."""
        held = {name: rows for name, rows in self.rows.items() if name in params}
        given = (builder, without_rows(params, held), gradients, state, step, hyperparameters)
        if finite is not None and isinstance(self.optimizer, LossScaled):
            following, slots = self.optimizer.update_where(finite, *given)
        else:
            following, slots = self.optimizer.update(*given)
        for name, rows in held.items():
            following[name] = _with_rows_of(following[name], params[name], rows)
            average = f"{AVERAGE}/{name}"
            if average in slots:
                slots[average] = _with_rows_of(slots[average], state[average], rows)
        return following, slots


def hold_rows(optimizer: Optimizer, rows: HeldRows) -> Optimizer:
    """Return an optimizer that leaves rows as they are; see ``RowHolder``. It expects gradients of zero there.

    Args:
        optimizer: with the loss scale around it, where there is one.
        rows: of parameters that it may or may not be given.
    """
    return RowHolder(optimizer, rows) if rows else optimizer


def held_rows_of(optimizer: Optimizer) -> HeldRows:
    """Return the rows that an optimizer leaves as they are."""
    return optimizer.rows if isinstance(optimizer, RowHolder) else {}


def without_rows(tensors: Mapping[str, Tensor], held: HeldRows) -> Tensors:
    """Emit parameters or gradients with zeros in the rows that are held, whatever was there."""
    seen = dict(tensors)
    for name, rows in held.items():
        if name in seen:
            zeros = np.zeros((len(rows), *known_shape(seen[name])[1:]), seen[name].dtype.numpy())
            seen[name] = _scattered(seen[name], rows, seen[name].builder.constant(zeros))
    return seen


def _with_rows_of(tensor: Tensor, source: Tensor, rows: Sequence[int]) -> Tensor:
    """Emit a tensor with some rows as ``source`` has them, to the bit."""
    builder = tensor.builder
    return _scattered(tensor, rows, builder.op("Gather", source, builder.integers(list(rows)), axis=0))


def _scattered(tensor: Tensor, rows: Sequence[int], updates: Tensor) -> Tensor:
    builder = tensor.builder
    indices = builder.constant(np.asarray(rows, np.int64).reshape(-1, 1))
    return builder.op("ScatterND", tensor, indices, updates, like=tensor)
