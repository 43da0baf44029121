"""Updates of some rows of a table: only the rows with a gradient, and all rows but fixed ones.

An example of a fixed row is the embedding of padding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from burnish.graph import Tensor
from burnish.optim.arithmetic import Tensors, known_shape
from burnish.optim.average import AVERAGE
from burnish.optim.base import Optimizer, RatedOptimizer, RowForm, Transform, UpdateInputs
from burnish.optim.chain import Chain
from burnish.optim.groups import Groups
from burnish.optim.loss_scale import LossScaled
from burnish.optim.slots import parameter_of

HeldRows = Mapping[str, Sequence[int]]
"""Initializer name -> rows of axis 0, counted from 0."""


@dataclass(frozen=True)
class RowHolder(Transform):
    """An optimizer that leaves some rows of its parameters, and of their averages, unchanged to the bit.

    The inner optimizer gets zeros for parameter and gradient there, so these rows do not affect norms or decay. The wrapper must
    be the outermost, because operators that choose between values need not keep the sign of a zero (ONNX Runtime's Where does
    not).
    """

    rows: HeldRows = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.optimizer.name

    def without(self, names: Collection[str]) -> RowHolder:
        """Return a holder that leaves the rows of these parameters to the caller."""
        return replace(self, rows={name: rows for name, rows in self.rows.items() if name not in names})

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        held = {name: rows for name, rows in self.rows.items() if name in inputs.params}
        following, slots = self.optimizer.apply(replace(inputs, params=without_rows(inputs.params, held)))
        for name, rows in held.items():
            following[name] = _with_rows_of(following[name], inputs.params[name], rows)
            average = f"{AVERAGE}/{name}"
            if average in slots:
                slots[average] = _with_rows_of(slots[average], inputs.state[average], rows)
        return following, slots


def hold_rows(optimizer: Optimizer, rows: HeldRows) -> Optimizer:
    """Return an optimizer that leaves rows unchanged; see ``RowHolder``. It expects gradients of zero there.

    Args:
        optimizer: the optimizer, including its loss scale.
        rows: rows of parameters that the optimizer may or may not get.
    """
    return RowHolder(optimizer, rows) if rows else optimizer


def held_rows_of(optimizer: Optimizer) -> HeldRows:
    """Return the rows that an optimizer leaves unchanged."""
    return optimizer.rows if isinstance(optimizer, RowHolder) else {}


def without_rows(tensors: Mapping[str, Tensor], held: HeldRows) -> Tensors:
    """Emit parameters or gradients with zeros in the held rows."""
    seen = dict(tensors)
    for name, rows in held.items():
        if name in seen:
            zeros = np.zeros((len(rows), *known_shape(seen[name])[1:]), seen[name].dtype.numpy())
            seen[name] = _scattered(seen[name], rows, seen[name].builder.constant(zeros))
    return seen


def _with_rows_of(tensor: Tensor, source: Tensor, rows: Sequence[int]) -> Tensor:
    """Emit a tensor with some rows of ``source``, exact to the bit."""
    builder = tensor.builder
    return _scattered(tensor, rows, builder.op("Gather", source, builder.integers(list(rows)), axis=0))


def _scattered(tensor: Tensor, rows: Sequence[int], updates: Tensor) -> Tensor:
    builder = tensor.builder
    indices = builder.constant(np.asarray(rows, np.int64).reshape(-1, 1))
    return builder.op("ScatterND", tensor, indices, updates, like=tensor)


def row_form_of(optimizer: Any, name: str) -> tuple[RowForm | None, str]:
    """Return the effect of updating only the rows of a parameter that have a gradient.

    Args:
        optimizer: an optimizer, bound or not.
        name: name of the parameter.

    Returns:
        ``exact`` or ``lazy``, and the part of the optimizer that decides; or None, and the part that needs the whole parameter.
    """
    if isinstance(optimizer, LossScaled | RowHolder):
        return row_form_of(optimizer.optimizer, name)
    if isinstance(optimizer, Chain):
        forms = [row_form_of(optimizer.optimizer, name)]
        forms += [(getattr(transform, "row_form", None), transform.name) for transform in optimizer.transforms]
        return next((form for wanted in (None, "lazy") for form in forms if form[0] == wanted), forms[0])
    if isinstance(optimizer, Groups):
        inside = optimizer.optimizer_of(name)
        return ("exact", "frozen") if inside is None else row_form_of(inside, name)
    return (optimizer.row_form if isinstance(optimizer, RatedOptimizer) else None), str(optimizer.name)


def skips_steps(optimizer: Optimizer) -> bool:
    """True if an optimizer skips steps with gradients that are not finite."""
    return isinstance(optimizer.optimizer if isinstance(optimizer, RowHolder) else optimizer, LossScaled)


def apply_to_rows(optimizer: Optimizer, inputs: UpdateInputs, indices: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """Emit an update, as in ``Optimizer.apply``, of only some rows of some parameters.

    Args:
        optimizer: the optimizer, whose formulas treat the rows as the whole parameter.
        inputs: its inputs; for these parameters, the gradients of their rows, [n, ...].
        indices: parameter -> its rows with a gradient, int64 [n], each once.
    """
    if isinstance(optimizer, RowHolder):
        optimizer = optimizer.without(indices)
    if not indices:
        return optimizer.apply(inputs)
    params, state = inputs.params, inputs.state
    selected = {
        name: indices[owner]
        for name, tensor in state.items()
        if (owner := parameter_of(name) or "") in indices and has_rows_of(tensor.shape, params[owner].shape)
    }
    rows = {name: _gathered(tensor, indices.get(name)) for name, tensor in params.items()}
    slots = {name: _gathered(tensor, selected.get(name)) for name, tensor in state.items()}
    next_rows, next_slots = optimizer.apply(replace(inputs, params=rows, state=slots))
    return (
        {name: _written(params[name], indices.get(name), new) for name, new in next_rows.items()},
        {name: _written(state[name], selected.get(name), new) for name, new in next_slots.items()},
    )


def has_rows_of(slot: Iterable[Any] | None, parameter: Iterable[Any] | None) -> bool:
    """True if a slot's shape has a row for each row of its parameter; False for a slot of columns only."""
    return slot is not None and parameter is not None and next(iter(slot), None) == next(iter(parameter), None)


def looks_across_rows(optimizer: Any, name: str) -> bool:
    """True if an update of one row of a parameter depends on the other rows that a batch reads."""
    if isinstance(optimizer, LossScaled | RowHolder | Chain):
        return looks_across_rows(optimizer.optimizer, name)
    inside = optimizer.optimizer_of(name) if isinstance(optimizer, Groups) else optimizer
    return bool(getattr(inside, "looks_across_rows", False))


def _gathered(tensor: Tensor, indices: Tensor | None) -> Tensor:
    return tensor if indices is None else tensor.builder.op("Gather", tensor, indices, axis=0)


def _written(tensor: Tensor, indices: Tensor | None, rows: Tensor) -> Tensor:
    if indices is None:
        return rows
    builder = tensor.builder
    key = ("places of rows", indices.value)
    places = builder.once(key, lambda: builder.op("Unsqueeze", indices, builder.integers([1])))
    return builder.op("ScatterND", tensor, places, rows, like=tensor)
