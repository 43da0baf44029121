"""Where a program does not compute what its file does: in ``predict``, ``evaluate`` and exports, or in a step as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from burnish.graph import constant_array
from burnish.importer import DEPARTURES, OF_MODULE
from burnish.norms import Frozen, NormPolicy, layer_name, never_updated, normalizes_by_batch

SHOWN = 3
"""How many of several layers a sentence names."""


def find_departures(model: ir.Model) -> Iterator[str]:
    """Give a sentence for each reason why inference in the initial state does not compute what the file computes.

    Args:
        model: a canonical model whose weights are still initializers. One of a module has no file: inference is its ``eval()``.
    """
    if OF_MODULE in model.graph.meta:
        return
    in_training = [node for node in _nodes(model, "BatchNormalization") if normalizes_by_batch(node)]
    fresh = [node for node in in_training if never_updated(node)]
    kept = [node for node in in_training if node not in fresh]
    if fresh:
        yield (
            f"the file normalizes by the batch (training_mode=1) in {_layers(fresh)}, and inference by running statistics, which "
            "were never updated: mean 0 and variance 1, that is not at all. Train first, or measure them "
            "(burnish.surgery.recalibrate)"
        )
    if kept:
        yield (
            f"the file normalizes by the batch (training_mode=1) in {_layers(kept)}, and inference by the running statistics, as "
            "in evaluation mode"
        )
    dropouts = _nodes(model, "Dropout")
    dropping = [node for node in dropouts if _drops(node)]
    if dropping:
        names = _named([node.name or "" for node in dropping])
        yield f"the file drops out at random (training_mode) in {names}, and inference does not"
    asking = {mode.name or "": node.name or "" for node in dropouts if (mode := _asked_mode(node)) is not None}
    if asking:
        modes, names = _named([*asking]), _named([*asking.values()])
        yield f"the file drops out at random in {names} if {modes} is true (training_mode), and inference never does"
    yield from model.graph.meta.get(DEPARTURES, ())


def frozen_without_statistics(policies: Mapping[ir.Node, NormPolicy]) -> Iterator[str]:
    """Give a sentence where layers without statistics of their own are frozen, so that a step departs from the file."""
    layers = [
        node
        for node, policy in policies.items()
        if isinstance(policy, Frozen) and normalizes_by_batch(node) and never_updated(node)
    ]
    if layers:
        yield (
            f"frozen batch normalization normalizes by running statistics, and those of {_layers(layers)} were never updated: "
            "mean 0 and variance 1, that is not at all, while the file normalizes by the batch (training_mode=1). Choose "
            f"norm={{'{layer_name(layers[0])}': 'train'}}, or export the model with statistics"
        )


def _nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.op_type == op_type and node.domain == ""]


def _drops(node: ir.Node) -> bool:
    """Whether a dropout certainly is in training mode, and drops anything."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    is_training = None if mode is None else constant_array(mode)
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    share = None if ratio is None else constant_array(ratio)
    return is_training is not None and bool(is_training.all()) and (share is None or bool(share.any()))


def _asked_mode(node: ir.Node) -> ir.Value | None:
    """What says at run time whether a dropout is in training mode; None where that is known, or nothing is dropped."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    share = None if ratio is None else constant_array(ratio)
    is_open = mode is not None and constant_array(mode) is None
    return mode if is_open and (share is None or share.any()) else None


def _layers(nodes: Sequence[ir.Node]) -> str:
    return _named([layer_name(node) for node in nodes])


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
