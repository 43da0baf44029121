"""Updates of the rows of a table alone that have a gradient: what they come to under an optimizer, and how they are emitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from burnish.graph import Builder, Tensor
from burnish.optim.base import Optimizer, RatedOptimizer, RowForm, Tensors
from burnish.optim.groups import Groups
from burnish.optim.held_rows import RowHolder
from burnish.optim.loss_scale import LossScaled
from burnish.optim.slots import parameter_of
from burnish.optim.transforms.chain import Chain

Update = Callable[..., tuple[Tensors, Tensors]]


def row_form_of(optimizer: Any, name: str) -> tuple[RowForm | None, str]:
    """Return what it comes to under an optimizer to update the rows of a parameter alone that have a gradient.

    Args:
        optimizer: bound or not.
        name: of the parameter.

    Returns:
        ``exact`` or ``lazy``, and what of the optimizer decides; or None, and what needs the whole parameter.
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


def updating_rows(optimizer: Optimizer, indices: Mapping[str, Tensor], finite: Tensor | None = None) -> Update:
    """Return an update, called as ``Optimizer.update``, of the rows of some parameters alone.

    Args:
        optimizer: updates; its formulas see the rows as if they were the parameter.
        indices: parameter -> its rows that have a gradient, int64 [n], each once. Their gradients are [n, ...].
        finite: whether all gradients are finite, for an optimizer that skips steps with others.
    """
    if isinstance(optimizer, RowHolder):
        optimizer = optimizer.without(indices)
    emit: Update = optimizer.update if finite is None else partial(optimizer.update_where, finite)  # type: ignore[attr-defined]
    return partial(_update_rows, emit, indices) if indices else emit


def _update_rows(
    update: Update,
    indices: Mapping[str, Tensor],
    builder: Builder,
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    step: Tensor,
    hyperparameters: Mapping[str, Tensor],
) -> tuple[Tensors, Tensors]:
    selected = {
        name: indices[owner]
        for name, tensor in state.items()
        if (owner := parameter_of(name) or "") in indices and has_rows_of(tensor.shape, params[owner].shape)
    }
    rows = {name: _gathered(tensor, indices.get(name)) for name, tensor in params.items()}
    slots = {name: _gathered(tensor, selected.get(name)) for name, tensor in state.items()}
    next_rows, next_slots = update(builder, rows, gradients, slots, step, hyperparameters)
    return (
        {name: _written(params[name], indices.get(name), new) for name, new in next_rows.items()},
        {name: _written(state[name], selected.get(name), new) for name, new in next_slots.items()},
    )


def has_rows_of(slot: Iterable[Any] | None, parameter: Iterable[Any] | None) -> bool:
    """Whether a slot of one shape has a row for each row of a parameter of another; one of its columns alone has not."""
    return slot is not None and parameter is not None and next(iter(slot), None) == next(iter(parameter), None)


def looks_across_rows(optimizer: Any, name: str) -> bool:
    """Whether an optimizer looks, to update a row of a parameter, at the other rows that a batch reads."""
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
