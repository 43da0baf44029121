"""The sample axis of each input and output of a model, from the user, from names, or from the nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import attribute_value, describe_node
from burnish.graph.annotations import UNNAMED_AXES, has_sample_axis_mark, mark_sample_axis, marked_sample_axis
from burnish.operators.extents import Kind, has
from burnish.sample_axes.mixing import OF_SAMPLES, RECURRENT, mixing_in
from burnish.sample_axes.propagation import Analysis, Extents, extents_of, sample_inputs
from burnish.settings import suggestion
from burnish.validation import is_whole

AskedAxes = int | Mapping[str, int | None] | None
"""An axis for all inputs, or an axis by input name (None: no samples). If None, the model decides."""

_BATCH = re.compile(r"^\w*batch\w*$|^bs$", re.IGNORECASE)
_TIME = re.compile(r"seq|time|len|step|^t$|^l$", re.IGNORECASE)
_LETTER = re.compile(r"^[bn]$", re.IGNORECASE)
_OF_SEQUENCES = (*RECURRENT, "Scan", "Softmax", "Attention")
_STATES = (5, 6)
"""The operands of a recurrent layer with its initial states."""


def ask_sample_axes(graph: ir.Graph, asked: AskedAxes) -> bool:
    """Mark the sample axes that the user gave on the inputs of a graph, in place; return True if any were given.

    Raises:
        ConfigurationError: no such input, or no such axis.
    """
    if asked is None:
        return False
    values = {value.name or "": value for value in graph.inputs if value.shape is not None}
    if not isinstance(asked, Mapping):
        asked = dict.fromkeys((name for name, value in values.items() if len(value.shape or ())), asked)
    for name, axis in asked.items():
        if name not in values:
            listed = ", ".join(f"'{each}'" for each in values)
            raise ConfigurationError(
                f"sample_axis: the model has no input {name!r}{suggestion(str(name), values)}; its inputs are {listed}"
            )
        shape = values[name].shape
        rank = 0 if shape is None else len(shape)
        if axis is not None and (not is_whole(axis) or not 0 <= axis < rank):
            raise ConfigurationError(
                f"sample_axis={axis!r}: the input '{name}' of shape {shape} has "
                + (f"the axes 0 to {rank - 1}" if rank else "no axes")
                + f": give one of them, or None where it has no samples, for each input by its name, such as {{'{name}': "
                f"{'0' if rank else 'None'}}} (--sample-axis {name}={'0' if rank else 'none'})"
            )
        mark_sample_axis(values[name], None if axis is None else int(axis))
    if all(has_sample_axis_mark(value) and marked_sample_axis(value) is None for value in values.values()):
        raise ConfigurationError(
            f"sample_axis={dict(asked)!r}: no input would have samples: give the axis of one at least, such as "
            f"{{'{next(iter(values), 'x')}': 0}}"
        )
    return True


def find_sample_axes(graph: ir.Graph) -> None:
    """Mark, in place, the inputs of a model that have no samples or have them along another axis than the first.

    Existing marks stay. Otherwise an axis holds samples because of its name (``batch``) or because it shares its symbol with one
    that does. If no name decides, it is the first axis, unless nodes work along it (a recurrent layer, attention, a sum): then it
    is the axis that no node mixes and every output has.

    Args:
        graph: the graph of a canonical model.

    Raises:
        ConfigurationError: nodes work along the first axis, and several others may hold the samples.
    """
    values = {value.name or "": value for value in graph.inputs if value.shape is not None and len(value.shape)}
    shapes = {name: extents_of(value) for name, value in values.items()}
    known = {name: marked_sample_axis(value) for name, value in values.items() if has_sample_axis_mark(value)}
    symbols = {shapes[name][axis] for name, axis in known.items() if axis is not None}
    for name, value in values.items():
        is_told = name in known or not symbols.isdisjoint(extent for extent in shapes[name] if isinstance(extent, str))
        axis = None if is_told else _named(_names_in_file(value))
        if axis is not None:
            known[name] = axis
    first = next((name for name, axis in known.items() if axis is not None), None)
    if first is not None:
        found = _beside(values, known, first)
    else:
        base = sample_inputs({name: extents for name, extents in shapes.items() if name not in known})
        found = _beside(values, {**known, **dict.fromkeys(base, 0)}, base[0]) if base else known
        if base:
            found = _by_structure(graph, values, found, base[0])
    for name, axis in found.items():
        if axis != 0 and not has_sample_axis_mark(values[name]):
            mark_sample_axis(values[name], axis)


def result_axes(graph: ir.Graph, results: Iterable[ir.Value]) -> dict[str, int | None]:
    """Return the sample axis of each result of a model; None if it has no samples.

    If the nodes do not decide, it is an axis with the symbol of the samples, otherwise the first.

    Args:
        graph: the graph of a canonical model with marked inputs.
        results: values of the graph.
    """
    analysis = Analysis(graph, [value.name or "" for value in graph.inputs])
    inputs = {value.name or "": value for value in graph.inputs}
    extents = {extents_of(inputs[name])[axis] for name, axis in analysis.axes.items() if axis is not None}
    symbols = {extent for extent in extents if isinstance(extent, str)}
    return {value.name or "": _axis_of(value, analysis, symbols) for value in results}


def _axis_of(value: ir.Value, analysis: Analysis, symbols: Collection[str]) -> int | None:
    if value.shape is not None and not len(value.shape):
        return None
    axes = analysis.layout(value).axes
    if axes is not None:
        held = [at for at, axis in enumerate(axes) if has(axis, Kind.SAMPLES)]
        if len(held) == 1:
            return held[0]
        if not held and not any(has(axis, Kind.LOST) for axis in axes):
            return None
    named = [] if value.shape is None else [at for at, extent in enumerate(extents_of(value)) if extent in symbols]
    return named[0] if len(named) == 1 else 0


def _names_in_file(value: ir.Value) -> Extents:
    """Return the extents of an input as in the file, without names added since."""
    unnamed = UNNAMED_AXES.get(value) or ()
    return [None if axis in unnamed else extent for axis, extent in enumerate(extents_of(value))]


def _named(extents: Extents) -> int | None:
    first = extents[0]
    if isinstance(first, str) and OF_SAMPLES.search(first):
        return 0
    named = [axis for axis, extent in enumerate(extents) if isinstance(extent, str) and _BATCH.search(extent)]
    if len(named) == 1:
        return named[0]
    second = extents[1] if len(extents) > 1 else None
    is_letter = isinstance(second, str) and _LETTER.search(second) is not None
    return 1 if is_letter and not named and isinstance(first, str) and _TIME.search(first) else None


def _beside(values: Mapping[str, ir.Value], known: Mapping[str, int | None], first: str) -> dict[str, int | None]:
    """Return the axes of all inputs, given the known axes of some, including ``first``."""
    shapes = {name: extents_of(value) for name, value in values.items()}
    symbols = {shapes[name][axis] for name, axis in known.items() if axis is not None}
    others = {
        extent
        for name, extents in shapes.items()
        if name in known or not isinstance(extents[0], int)
        for axis, extent in enumerate(extents)
        if axis != known.get(name, 0) and isinstance(extent, str)
    }
    found = {}
    for name, extents in shapes.items():
        named = [at for at, extent in enumerate(extents) if isinstance(extent, str) and extent in symbols]
        if name in known:
            found[name] = known[name]
        elif named:
            found[name] = named[0]
        else:
            found[name] = _like(values[name], shapes[first], known[first] or 0, others)
    return found


def _like(value: ir.Value, first: Extents, axis: int, others: Collection[str]) -> int | None:
    """Return the sample axis of an input without the symbol of the samples, by comparison with another input.

    Args:
        value: the input.
        first: the extents of the other input.
        axis: the sample axis of the other input.
        others: symbols that are not for samples.
    """
    extents, extent = extents_of(value), first[axis]
    if len(extents) > 1 and extents[1] == extent and _is_recurrent_state(value):
        return 1
    if (
        axis
        and len(extents) == len(first)
        and (extents[axis] == extent or (isinstance(extent, str) and not isinstance(extents[axis], int)))
    ):
        return axis
    if isinstance(extents[0], int):
        return 0 if extents[0] == extent else None
    return None if extents[0] in others else 0


def _is_recurrent_state(value: ir.Value) -> bool:
    """True if an input is the initial state of a recurrent layer, ``[directions, batch, hidden]``."""
    return any(
        node.domain == "" and node.op_type in RECURRENT and index in _STATES and not attribute_value(node, "layout", 0)
        for node, index in value.uses()
    )


def _by_structure(
    graph: ir.Graph, values: Mapping[str, ir.Value], found: dict[str, int | None], first: str
) -> dict[str, int | None]:
    """Return the axes of the inputs by the work of the nodes, if no name decides and ``found`` assumes the first axis."""
    extents = extents_of(values[first])
    is_open = [not isinstance(extent, int) for extent in extents]
    # A fixed extent means features, or in second place a fixed number of samples per batch.
    has_second = len(extents) > 2 and extents[0] != 1
    if not has_second and not any(is_open[1:]):
        return found
    reason, is_sequence = _works_along(graph, found)
    candidates = [axis for axis in range(1, len(extents)) if is_open[axis] or (axis == 1 and has_second and is_sequence)]
    if not reason:
        is_time = isinstance(extents[0], str) and _TIME.search(extents[0]) is not None
        candidates = [1] if is_time and len(extents) > 1 and is_open[1] else []
    known = {name: None for name, value in values.items() if has_sample_axis_mark(value)}
    trials = {axis: _beside(values, {**known, first: axis}, first) for axis in candidates}
    apart = {axis: trial for axis, trial in trials.items() if _keeps_apart(graph, trial)}
    chosen = [axis for axis in apart if is_open[axis]] or [*apart]
    if len(chosen) > 1:
        listed = " or ".join(f"axis {axis}" + (f" ('{extents[axis]}')" if extents[axis] else "") for axis in chosen)
        raise ConfigurationError(
            f"sample_axis: the file leaves open which axis of the input '{first}' of shape {values[first].shape} holds the "
            f"samples of a batch: {reason}, so that it is not axis 0, and it may be {listed}. Say which, "
            f"sample_axis={{'{first}': {chosen[0]}}} (--sample-axis {first}={chosen[0]}); {{'{first}': 0}} takes the first all "
            "the same"
        )
    return apart[chosen[0]] if chosen else found


def _works_along(graph: ir.Graph, axes: Mapping[str, int | None]) -> tuple[str, bool]:
    """Return why these axes cannot hold samples, empty if they can; and True if they hold a sequence."""
    analysis, outputs = Analysis(graph, [*axes], axes), list(graph.outputs)
    is_sequence = any(each.node.op_type in _OF_SEQUENCES for each in mixing_in(analysis, graph, None, [*axes]))
    mixing = mixing_in(analysis, graph, outputs, [*axes])
    if mixing:
        return f"{describe_node(mixing[0].node)} works along the first", is_sequence
    layouts = [analysis.layout(value).axes for value in outputs]
    reached = any(axes is None or any(has(axis, Kind.SAMPLES) or has(axis, Kind.LOST) for axis in axes) for axes in layouts)
    return "" if reached else "no output has the first", is_sequence


def _keeps_apart(graph: ir.Graph, axes: Mapping[str, int | None]) -> bool:
    """True if every output that depends on the inputs has one sample axis, and no node works along it."""
    analysis, outputs = Analysis(graph, [*axes], axes), list(graph.outputs)
    for value in outputs:
        layout = analysis.layout(value)
        held = [has(axis, Kind.SAMPLES) for axis in layout.axes or ()]
        if not layout.is_constant and (sum(held) != 1 or any(has(axis, Kind.LOST) for axis in layout.axes or ())):
            return False
    return not mixing_in(analysis, graph, outputs, [*axes])
