"""New class layers for a detector: one per feature map, or one shared by all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import FLOATING, Builder, constant_array, describe_node, infer_outputs, output_axis
from burnish.graph.constants import initial_array, set_initializer
from burnish.surgery.linear_sources import linear_sources

RARE = 0.01
"""Initial probability of each class under independent yes/no scores (Lin et al. 2017)."""


@dataclass(frozen=True)
class ClassLayers:
    """The linear layers that compute a detector's scores.

    Attributes:
        nodes: ``Conv``, ``Gemm`` or ``MatMul``, in the order in which their results are joined.
        weights, biases: their initializers, without repetitions of shared ones.
        output: name of the value with the scores.
        scores: scores per box.
    """

    nodes: tuple[ir.Node, ...]
    weights: tuple[ir.Value, ...]
    biases: tuple[ir.Value, ...]
    output: str
    scores: int

    @property
    def names(self) -> dict[str, list[str]]:
        """Initializer names, by ``weight`` and ``bias``."""
        return {"weight": [value.name or "" for value in self.weights], "bias": [value.name or "" for value in self.biases]}

    @property
    def initializers(self) -> tuple[str, ...]:
        return tuple(value.name or "" for value in (*self.weights, *self.biases))


def class_layers(value: ir.Value, scores: int) -> ClassLayers:
    """Return the layers that compute a value with scores.

    Args:
        value: the scores, before any activation.
        scores: scores per box.

    Raises:
        ConfigurationError: the value does not come only from linear layers, or one of them also computes something else.
    """
    name = value.name or ""
    nodes = linear_sources(value)
    if nodes is None:
        raise ConfigurationError(
            f"class layers: the scores '{name}' are not all that Conv, Gemm or MatMul with weights of their own give: name the "
            "value that is (outputs=...), or train the file with its own classes (burnish train --loss ...)"
        )
    weights: dict[ir.Value, None] = {}
    biases: dict[ir.Value, None] = {}
    for node in nodes:
        weight = node.inputs[1]
        assert weight is not None
        for initializer in (weight, _bias(node)):
            if initializer is not None and (initializer.const_value is None or initializer.dtype not in FLOATING):
                raise ConfigurationError(
                    f"class layers: {describe_node(node)} reads '{initializer.name}', which holds no numbers"
                )
        if _outputs_of(node, weight) % scores:
            raise ConfigurationError(
                f"class layers: {describe_node(node)} gives {_outputs_of(node, weight)} numbers, which are no whole number of "
                f"{scores} scores: it gives something else too, and cannot be re-initialized for other classes"
            )
        weights[weight] = None
        if (bias := _bias(node)) is not None:
            biases[bias] = None
    return ClassLayers(tuple(nodes), tuple(weights), tuple(biases), name, scores)


def replace_class_layers(model: ir.Model, layers: ClassLayers, scores: int, seed: int = 0, rare: bool = False) -> None:
    """Re-initialize class layers for another number of scores, in place; other weights are unchanged.

    Weights and biases are uniform: weights in ``±1/√f`` for f inputs per score.

    Args:
        model: a canonical model.
        layers: its layers from ``class_layers``.
        scores: new number of scores per box.
        seed: seed of the weights.
        rare: True for independent yes/no scores; biases then give each a probability of 1 in 100.
    """
    generator = np.random.default_rng(seed)
    old = layers.scores
    axes = {node.inputs[1]: output_axis(node) for node in layers.nodes}
    for weight in layers.weights:
        shape, axis = list(initial_array(weight).shape), axes[weight]
        limit = 1 / math.sqrt(math.prod(shape) / shape[axis])
        shape[axis] = shape[axis] // old * scores
        set_initializer(weight, generator.uniform(-limit, limit, shape))
    for bias in layers.biases:
        shape = [extent // old * scores if extent > 1 else extent for extent in initial_array(bias).shape]
        drawn = np.full(shape, -math.log((1 - RARE) / RARE)) if rare else generator.uniform(-0.05, 0.05, shape)
        set_initializer(bias, drawn)
    _settle(model.graph, layers.nodes, old, scores)


def _settle(graph: ir.Graph, changed: Sequence[ir.Node], old: int, scores: int) -> None:
    """Update shapes, and the constants of Reshape, Split and Slice, after the changed layers."""
    opsets = dict(graph.opset_imports)
    behind: set[ir.Node] = set()
    before: dict[ir.Value, ir.Shape] = {}
    for node in list(graph):
        if node not in changed and not any(value is not None and value.producer() in behind for value in node.inputs):
            continue
        behind.add(node)
        source = node.inputs[0] if node.inputs else None
        if source is not None and source in before and source.shape is not None:
            changes = _changes(before[source], source.shape)
            if changes and node.op_type in ("Reshape", "Split", "Slice"):
                _replace_constant(graph, node, changes, old, scores)
        for value in node.outputs:
            if value.shape is not None:
                before[value] = value.shape
            value.shape = None
        infer_outputs(node, opsets)


def _changes(before: ir.Shape, after: ir.Shape) -> dict[int, tuple[int, int]]:
    pairs = enumerate(zip(before.dims, after.dims, strict=False))
    return {axis: (old, new) for axis, (old, new) in pairs if isinstance(old, int) and isinstance(new, int) and old != new}


def _replace_constant(graph: ir.Graph, node: ir.Node, changes: dict[int, tuple[int, int]], old: int, scores: int) -> None:
    place = 2 if node.op_type == "Slice" else 1
    value = node.inputs[place] if place < len(node.inputs) else None
    constant = None if value is None else constant_array(value)
    if constant is None:
        return
    settled = constant.copy()
    for axis, (extent, new) in changes.items():
        if node.op_type == "Reshape" and axis < len(constant) and constant[axis] == extent:
            settled[axis] = new
            continue
        # A Reshape or Split may separate the scores of several boxes per cell. Of a Slice only the end moves.
        wanted = ((extent, new),) if node.op_type == "Slice" else ((extent, new), (old, scores))
        for number, following in wanted:
            if (places := np.flatnonzero(constant == number)).size:
                settled[places[-1]] = following
                break
    if not np.array_equal(settled, constant):
        node.replace_input_with(place, Builder(graph, before=node).constant(settled).value)


def _outputs_of(node: ir.Node, weight: ir.Value) -> int:
    return int(initial_array(weight).shape[output_axis(node)])


def _bias(node: ir.Node) -> ir.Value | None:
    """Return the initializer that a layer adds; for a MatMul, that of its only reader, an Add."""
    if node.op_type != "MatMul":
        return node.inputs[2] if len(node.inputs) > 2 else None
    readers = [reader for reader, _ in node.outputs[0].uses()]
    if len(readers) != 1 or readers[0].op_type != "Add":
        return None
    return next((value for value in readers[0].inputs if value is not None and value.is_initializer()), None)
