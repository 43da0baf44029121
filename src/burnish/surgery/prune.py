"""Pruning: weights that are set to zero and stay zero."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from burnish.analysis.layer_selection import Patterns, listed_layers, nodes_around, select_layers
from burnish.errors import ConfigurationError, UnprunedLayersWarning
from burnish.graph import FLOATING, Builder, Names, add_initializer, attribute_value, constant_array, describe_node
from burnish.graph.annotations import PruningMark, masked_weights
from burnish.graph.constants import set_initializer
from burnish.importer import Source, load
from burnish.quantization.graph import QuantizationMark
from burnish.validation import is_number, is_whole
from burnish.warn import warn

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
ALL = "*"
_PATTERN = re.compile(r"(\d+):(\d+)")


def prune(
    source: Source,
    sparsity: float | str,
    layers: Patterns = ALL,
    *,
    scope: Literal["tensor", "global"] = "tensor",
    begin: int = 0,
    end: int = 0,
    every: int = 1,
) -> ir.Model:
    """Return a model with sparse weights: those closest to zero are masked.

    Each weight is multiplied by its mask ``<weight>_mask``, part of the state (``stat/<weight>_mask``). Masked weights get no
    gradient, so they and their optimizer state stay zero. ``Session.export`` writes the products.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``, also from ``quantize``; not changed.
        sparsity: share of zeros, between 0 and 1; or a pattern such as ``2:4``: 2 of every 4 weights along a layer's inputs
            (input channels) are kept.
        layers: names or shell-style patterns of Conv, ConvTranspose, Gemm and MatMul layers, by weight or node. By default all;
            layers whose inputs are not whole groups of a pattern (such as a first convolution of 3 channels) are skipped with a
            warning.
        scope: ``tensor`` to reach ``sparsity`` in each weight, ``global`` over all together.
        begin, end: training steps between which the sparsity grows from 0 by a cubic (Zhu and Gupta 2017). Weights masked then
            keep their last value in the state, which nothing reads. Both 0 prunes at the start.
        every: steps between changes.

    Returns:
        A canonical model.

    Raises:
        ConfigurationError: an option does not fit, there is no such layer, or the inputs of a named layer (or of all) are not
            whole groups.
        ModelError: invalid ONNX model.
    """
    pattern = _pattern_of(sparsity)
    _check_schedule(begin, end, every, scope, pattern)
    model = load(source)
    if (masked := next(masked_weights(model.graph), None)) is not None:
        raise ConfigurationError(f"prune: {describe_node(masked[0])} masks weights already: give the model before it was pruned")
    found = {node: weight for node in model.graph.all_nodes() if (weight := _weight_of(node)) is not None}
    if not found:
        raise ConfigurationError("prune: the model has no Conv, ConvTranspose, Gemm or MatMul whose weight is an initializer")
    chosen = select_layers(list(found), layers, "layers", "Conv, Gemm or MatMul")
    if pattern and layers == ALL:
        chosen = _in_whole_groups(found, pattern[1])
    weights = {found[node]: node for node in chosen}
    arrays = [_array(weight) for weight in weights]
    part = 1 - pattern[0] / pattern[1] if pattern else float(sparsity)
    mark = PruningMark(part, scope, begin, end, every)
    if mark.changes:
        masks = [np.ones(array.shape, bool) for array in arrays]
    elif pattern:
        masks = [_groups_kept(weight, node, *pattern) for weight, node in weights.items()]
    elif scope == "global":
        masks = _largest(arrays, part)
    else:
        masks = [mask for array in arrays for mask in _largest([array], part)]
    names, around = Names.of(model.graph), nodes_around(model.graph)
    for weight, array, mask in zip(weights, arrays, masks, strict=True):
        _apply(model.graph, names, around, weight, array, mask, mark)
    return model


def _pattern_of(sparsity: float | str) -> tuple[int, int] | None:
    matched = _PATTERN.fullmatch(sparsity) if isinstance(sparsity, str) else None
    if matched and 0 < int(matched[1]) < int(matched[2]):
        return int(matched[1]), int(matched[2])
    if isinstance(sparsity, str) or not is_number(sparsity) or not 0 < sparsity < 1:
        raise ConfigurationError(f"prune: sparsity={sparsity!r}: give a number above 0 and below 1, or a pattern such as '2:4'")
    return None


def _check_schedule(begin: int, end: int, every: int, scope: str, pattern: tuple[int, int] | None) -> None:
    if scope not in ("tensor", "global"):
        raise ConfigurationError(f"prune: scope={scope!r}: give 'tensor' or 'global'")
    if not (is_whole(begin) and is_whole(end) and is_whole(every)) or not 0 <= begin <= end or (begin == end > 0) or every < 1:
        raise ConfigurationError(
            f"prune: begin={begin!r}, end={end!r}, every={every!r}: give whole numbers of steps, end after begin or both 0, and "
            "every of 1 or more"
        )
    if pattern and (end or scope == "global"):
        raise ConfigurationError(
            f"prune: '{pattern[0]}:{pattern[1]}' masks every group from the start: leave begin, end and scope out, or give "
            "sparsity as a number"
        )
    if every > 1 and not end:
        raise ConfigurationError(f"prune: every={every} is for masks that change: leave it out, or say with end=... until when")


def _weight_of(node: ir.Node) -> ir.Value | None:
    """Return the initializer of a layer's weight, also through quantization."""
    if node.domain != "" or node.op_type not in LAYERS:
        return None
    value = node.inputs[1]
    while value is not None and (producer := value.producer()) is not None:
        is_part = producer.op_type in ("Clip", "Reshape", "Transpose") or QuantizationMark.of(producer) is not None
        if not is_part:
            return None
        value = producer.inputs[0]
    if value is None or not value.is_initializer() or value.dtype not in FLOATING or constant_array(value) is None:
        return None
    return value if len(_array(value).shape) >= 2 else None


def _largest(arrays: Sequence[np.ndarray], sparsity: float) -> list[np.ndarray]:
    """Return masks that keep the weights farthest from zero over all tensors; the first ones win ties."""
    sizes = np.concatenate([np.abs(array).ravel() for array in arrays])
    kept = np.zeros(sizes.size, bool)
    count = max(1, round(sizes.size * (1 - sparsity)))
    kept[np.argsort(-sizes, kind="stable")[:count]] = True
    ends = np.cumsum([array.size for array in arrays])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(kept, ends), arrays, strict=True)]


def _in_whole_groups(weights: Mapping[ir.Node, ir.Value], group: int) -> list[ir.Node]:
    """Return the layers whose inputs are whole groups and warn of the others; return all if there are none."""
    whole = [node for node, weight in weights.items() if not _array(weight).shape[_input_axis(node, weight)] % group]
    left = [node for node in weights if node not in whole]
    if whole and left:
        warn(
            UnprunedLayersWarning(
                f"prune: {len(left)} of {len(weights)} layers keep all of their weights, as their inputs are no whole number of "
                f"groups of {group}: {listed_layers(left)}. Name the layers to prune (layers=[...]) where that is meant"
            )
        )
    return whole or list(weights)


def _input_axis(node: ir.Node, weight: ir.Value) -> int:
    """Return the axis of a weight over which a layer sums."""
    axes = {"Conv": 1, "ConvTranspose": 0, "MatMul": len(_array(weight).shape) - 2}
    return axes[node.op_type] if node.op_type in axes else int(attribute_value(node, "transB", 0))


def _groups_kept(weight: ir.Value, node: ir.Node, kept: int, group: int) -> np.ndarray:
    array, axis = _array(weight), _input_axis(node, weight)
    if array.shape[axis] % group:
        raise ConfigurationError(
            f"prune: {describe_node(node)} has {array.shape[axis]} inputs, which are no whole number of groups of {group}: leave "
            "the layer out with layers=[...]"
        )
    last = np.moveaxis(np.abs(array), axis, -1)
    groups = last.reshape(-1, group)
    mask = np.zeros(groups.shape, bool)
    np.put_along_axis(mask, np.argsort(-groups, axis=1, kind="stable")[:, :kept], True, axis=1)
    return np.moveaxis(mask.reshape(last.shape), -1, axis)


def _apply(
    graph: ir.Graph,
    names: Names,
    around: Mapping[ir.Node, ir.Node],
    weight: ir.Value,
    array: np.ndarray,
    mask: np.ndarray,
    mark: PruningMark,
) -> None:
    readers = tuple(weight.uses())
    set_initializer(weight, array * mask)
    nodes = {around[reader] for reader, _ in readers}
    first = next(node for node in graph if node in nodes)
    builder = Builder(graph, before=first)
    held = add_initializer(graph, names.take(f"{weight.name}_mask"), mask.astype(array.dtype))
    product = builder.tensor(weight) * builder.tensor(held)
    product.value.name = names.take(f"{weight.name}:masked")  # keeps the layer's name, which derives from its weight's
    producer = product.value.producer()
    assert producer is not None
    mark.put(producer)
    for reader, index in readers:
        reader.replace_input_with(index, product.value)


def _array(value: ir.Value) -> np.ndarray:
    array = constant_array(value)
    assert array is not None
    return array
