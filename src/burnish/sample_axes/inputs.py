"""Along which axis of each input of a graph its samples stand: as it is marked, else as its extents tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from burnish.graph.annotations import has_sample_axis_mark, marked_sample_axis

Extents = Sequence[int | str | None]


def sample_inputs(inputs: Mapping[str, Extents]) -> list[str]:
    """Return the names of the inputs whose first axis is that of samples; by the first of them a worker's samples are counted.

    A symbolic first axis is one of samples, unless other inputs that begin with a symbol have it further on: positions ``[time]``
    beside tokens ``[batch, time]``. Of a model without symbolic first axes the inputs with the first extent of the first input
    are those of samples.

    Args:
        inputs: the extents of the model's inputs, by name; a string is a symbol, None an extent without one.
    """
    ranked = {name: extents for name, extents in inputs.items() if len(extents)}
    symbolic = [name for name, extents in ranked.items() if not isinstance(extents[0], int)]
    if not symbolic:
        first = next(iter(ranked.values()), ())
        return [name for name, extents in ranked.items() if extents[0] == first[0]]
    others = {extent for name in symbolic for extent in ranked[name][1:] if isinstance(extent, str)}
    return [name for name in symbolic if ranked[name][0] not in others] or symbolic


def input_axes(inputs: Iterable[ir.Value]) -> dict[str, int | None]:
    """Return the axis of samples of each input whose rank is known; None for one without samples.

    Args:
        inputs: of a graph, that are a batch.
    """
    values = {value.name or "": value for value in inputs if value.shape is not None}
    marked = {name: marked_sample_axis(value) for name, value in values.items() if has_sample_axis_mark(value)}
    first = sample_inputs({name: extents_of(value) for name, value in values.items() if name not in marked})
    return {name: marked.get(name, 0 if name in first else None) for name in values}


def extents_of(value: ir.Value) -> list[int | str | None]:
    """Return the extents of a value whose rank is known: numbers, symbols, and None for one without a symbol."""
    assert value.shape is not None
    return [extent if isinstance(extent, int) else extent.value for extent in value.shape.dims]


def moved_inputs(graph: ir.Graph) -> dict[str, int]:
    """Return the inputs of a graph that have their samples along another axis than the first, each with that axis."""
    return {name: axis for name, axis in input_axes(graph.inputs).items() if axis}
