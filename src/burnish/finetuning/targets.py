"""Standardized targets: their scale, and the two nodes that turn predictions back into their own units."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.data import Dataset, DataSpec
from burnish.errors import ConfigurationError, DataError
from burnish.graph import Builder, attribute_value, constant_array, remove_node
from burnish.graph.annotations import OUTPUT_SCALE
from burnish.graph.constants import initial_array, set_initializer
from burnish.surgery import Head, find_head
from burnish.untrusted_files import UNREADABLE

SAMPLES_AT_ONCE = 1024
FACTOR = 5.0
"""Factor of the spread within which values have a similar size."""
BOUNDING = frozenset({"Relu", "Clip", "HardSigmoid"})
"""Operators after a head that bound its values, so that these cannot be standardized."""


def target_scale(dataset: Dataset, spec: DataSpec, data: str) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the targets, float64 [values]; the deviation of constant values is 1.

    Raises:
        DataError: all samples have the same targets.
    """
    assert spec.label is not None
    name, count = spec.label.name, len(dataset)
    arrays = getattr(dataset, "arrays", {})
    if name in arrays:
        targets = np.asarray(arrays[name], np.float64)
    else:
        places = (np.arange(begin, min(begin + SAMPLES_AT_ONCE, count)) for begin in range(0, count, SAMPLES_AT_ONCE))
        targets = np.concatenate([np.asarray(dataset.batch(indices)[name], np.float64) for indices in places])
    targets = targets.reshape(len(targets), -1)
    mean = targets.mean(axis=0)
    std = np.sqrt(((targets - mean) ** 2).mean(axis=0))
    is_constant = std <= np.abs(mean) * 1e-7
    if is_constant.all():
        raise DataError(
            f"{data}: all samples have the target {mean[0]:g}, and nothing can be learned: give samples with others too"
        )
    return mean, np.where(is_constant, 1.0, std)


def add_output_scale(model: ir.Model, head: Head, mean: np.ndarray, std: np.ndarray, keeps: bool) -> bool:
    """Make a model output ``result * std + mean`` of its head, in place; return False if an operator bounds the head's values.

    Args:
        model: the model.
        head: the head, which gives standardized values afterwards.
        mean, std: those of the targets, one number for each value.
        keeps: True to keep the model's present outputs by rescaling weight and bias of the head.
    """
    graph = model.graph
    old = next(value for value in graph.outputs if value.name == head.output)
    if not old.dtype or any(node.op_type in BOUNDING for node in _behind(old, head)):
        return False
    if keeps:
        mean = mean if head.bias is not None else np.zeros_like(mean)
        _divide(head, mean, std)
    builder, dtype = Builder(graph), old.dtype.numpy()
    scale, shift = (np.asarray(each if old.shape is not None and len(old.shape) == 2 else each[0], dtype) for each in (std, mean))
    result = (builder.tensor(old) * builder.constant(scale) + builder.constant(shift)).value
    graph.outputs[[*graph.outputs].index(old)] = result
    result.name, old.name = old.name, f"{old.name}:standardized"
    result.shape, result.type = old.shape, old.type
    OUTPUT_SCALE.set(model, {"output": head.output, "mean": mean.tolist(), "std": std.tolist()})
    return True


Scale = tuple[np.ndarray, np.ndarray]
"""Mean and standard deviation of values, float64 [values] each."""


def is_near(known: Scale, scale: Scale) -> bool:
    """Return True if values have a scale like the file's training data: the same kind of values in the same unit."""
    (mean, std), (other_mean, other_std) = known, scale
    ratio, largest = std / other_std, np.maximum(std, other_std)
    return bool(((ratio < FACTOR) & (ratio > 1 / FACTOR) & (np.abs(mean - other_mean) < FACTOR * largest)).all())


def standardize_head(head: Head, scale: Scale) -> None:
    """Make a head give ``(result - mean) / std``."""
    _divide(head, *scale)


def fold_output_scale(model: ir.Model) -> Scale | None:
    """Fold the nodes of ``add_output_scale`` into the head of a canonical model, in place.

    Returns:
        The mean and standard deviation in these nodes; None if there are none.
    """
    try:
        said = OUTPUT_SCALE.get(model)
        output = None if said is None else next((value for value in model.graph.outputs if value.name == said["output"]), None)
    except UNREADABLE:
        output = None
    OUTPUT_SCALE.remove(model)
    add = None if output is None else output.producer()
    product = None if add is None or add.op_type != "Add" or add.inputs[0] is None else add.inputs[0].producer()
    if output is None or add is None or product is None or product.op_type != "Mul" or product.inputs[0] is None:
        return None
    shift, scale = (None if value is None else constant_array(value) for value in (add.inputs[1], product.inputs[1]))
    if shift is None or scale is None:
        return None
    inner, name = product.inputs[0], output.name
    model.graph.outputs[[*model.graph.outputs].index(output)] = inner
    output.name, inner.name = f"{name}:before", name
    for node in (add, product):
        remove_node(node)
    try:
        head = find_head(model, name)
    except ConfigurationError:
        return None  # the search for the head reports the error
    count = head.classes
    scale, shift = (np.broadcast_to(each.reshape(-1).astype(np.float64), count) for each in (scale, shift))
    _divide(head, -shift / scale, 1 / scale)
    return shift, scale


def _divide(head: Head, mean: np.ndarray, std: np.ndarray) -> None:
    """Make a head give ``(result - mean) / std``."""
    weight = initial_array(head.weight)
    extents = [-1 if axis == head.class_axis else 1 for axis in range(weight.ndim)]
    set_initializer(head.weight, weight.astype(np.float64) / std.reshape(extents))
    if head.bias is not None:
        beta = attribute_value(head.node, "beta", 1.0) if head.node.op_type == "Gemm" and head.bias in head.node.inputs else 1.0
        bias = initial_array(head.bias).astype(np.float64)
        own = [-1 if extent == len(std) else 1 for extent in bias.shape] if bias.ndim and bias.size == len(std) else None
        shaped = (mean / beta, std) if own is None else ((mean / beta).reshape(own), std.reshape(own))
        set_initializer(head.bias, (bias - shaped[0]) / shaped[1])


def _behind(output: ir.Value, head: Head) -> list[ir.Node]:
    nodes: list[ir.Node] = []
    value: ir.Value | None = output
    while value is not None and (node := value.producer()) is not None and node is not head.node:
        nodes.append(node)
        value = node.inputs[0]
    return nodes
