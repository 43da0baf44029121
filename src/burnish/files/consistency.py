"""Check that the records of a saved program fit its graphs, and can come from a compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from burnish.compiler.draft import shape_of
from burnish.errors import ConfigurationError
from burnish.program.signature import GraphSignature, Signature
from burnish.targets import TARGETS, target_from_dict
from burnish.validation import is_number, is_whole


def inconsistency(signature: Signature, models: Mapping[str, ir.Model], options: Mapping[str, Any]) -> str | None:
    """Return a clause on how a saved program contradicts its graphs or itself; None if it does not.

    Args:
        signature: signature of the program.
        models: its graphs, by name.
        options: its compilation options.
    """
    states = {entry.name for entry in signature.state}
    for name, model in models.items():
        problem = _at_odds(signature[name], model.graph, states)
        if problem is not None:
            return f"the signature of the {name} graph {problem}"
    for name, fits in _OPTIONS.items():
        if name in options and not fits(options[name]):
            return f"its option '{name}' is {_shortened(options[name])}, which no compilation writes"
    return None


def _at_odds(signature: GraphSignature, graph: ir.Graph, states: set[str]) -> str | None:
    for side, entries, values in (("input", signature.inputs, graph.inputs), ("output", signature.outputs, graph.outputs)):
        if len(entries) != len(values):
            return f"has {len(entries)} {side}s, and the graph {len(values)}"
        for entry, value in zip(entries, values, strict=True):
            if entry.name != value.name:
                return f"calls an {side} {_shortened(entry.name)} that the graph calls '{value.name}'"
            if side == "input" and (entry.dtype != value.dtype or entry.shape != shape_of(value)):
                return f"gives the {side} '{entry.name}' another dtype or shape than the graph"
            if entry.updates is not None and entry.updates not in states:
                return f"says that '{entry.name}' updates {_shortened(entry.updates)}, which is no state"
    return None


def _is_list(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(fits(item) for item in value)


def _is_mapping(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(isinstance(key, str) and fits(item) for key, item in value.items())


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_named(value: Any) -> bool:
    """True for a name, or options with one."""
    return _is_text(value) or (isinstance(value, Mapping) and _is_text(value.get("name")))


def _is_prediction(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(_is_text(value.get(name)) for name in ("output", "reads"))
        and ("class_axis" not in value or is_whole(value["class_axis"]))
    )


def _is_target(value: Any) -> bool:
    """True for the name or description of a target."""
    if not isinstance(value, Mapping):
        return _is_text(value) and value in TARGETS
    try:
        target_from_dict(value)
    except ConfigurationError:
        return False
    return True


_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "loss": _is_named,
    "loss_terms": _is_mapping(is_number),
    "optimizer": _is_named,
    "metrics": _is_list(_is_text),
    "predictions": _is_list(_is_prediction),
    "trainable": _is_list(_is_text),
    "hold_rows": _is_mapping(_is_list(lambda row: is_whole(row) and row >= 0)),
    "norm_layers": _is_mapping(_is_text),
    "auto_frozen_layers": _is_list(_is_text),
    "preparing": _is_mapping(_is_text),
    "departures": _is_list(_is_text),
    "target": _is_target,
}
"""Checks of the values of options that are read without compiling again."""


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
