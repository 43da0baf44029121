"""Insertion of batch normalization without changing a model's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np
import onnx_ir as ir

from burnish.analysis.layer_selection import Patterns, listed_layers, select_layers, warn_of_bodies
from burnish.engines import Engine
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.graph import Names, add_initializer, describe_node, insert_behind, static_shape
from burnish.graph.constants import initial_array, set_initializer
from burnish.importer import Source, load
from burnish.norms.policies import layer_name
from burnish.value_statistics import Batch, Moments, measure_values

OPERATORS = ("Conv", "ConvTranspose", "Gemm")
"""Layers with channels on axis 1 of their output."""
TINY = 1e-6
"""Channels with weights shorter than this fraction of the layer's median count as zero."""
LENGTH = 1 / np.sqrt(3)
"""Length of each channel's weights after ``rescale``: that of PyTorch's initialization at any size."""


def insert(
    source: Source,
    after: Patterns = "Conv",
    data: Iterable[Batch] | None = None,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    rescale: bool = False,
    batch: str | None = None,
    engine: str | Engine | None = None,
) -> ir.Model:
    """Insert batch normalization after layers, with parameters that keep inference outputs unchanged up to rounding.

    With mean m and variance v, a new layer has scale sqrt(v + epsilon) and bias m, so it is the identity. ``data`` gives m and v
    of the layer's output, a good start for training; else m = 0 and v = 1. Use this for models whose batch normalization was
    folded.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        after: ``Conv``, ``ConvTranspose`` or ``Gemm``, names or shell-style patterns of such layers (by weight, ``layer1.conv1``
            for ``layer1.conv1.weight``, or node), or a list of these. Layers already followed by batch normalization are skipped
            unless named exactly.
        data: batches, dicts of arrays by input name; others, such as labels, are ignored.
        epsilon: of the new layers.
        rescale: True to scale each channel's weights to length 1/sqrt(3), with matching statistics. Batch normalization makes a
            layer independent of this length, whose square divides the learning rate (van Laarhoven 2017), so layers with folded
            scales would train at very different rates. 1/sqrt(3) is PyTorch's initialization, and too short is better than too
            long, since such weights grow if the rate is too high and never shrink (Arora, Li and Lyu 2018). Layers that share
            weights or biases are not scaled.
        momentum: of the new layers: the share of running statistics kept by a training step.
        batch: ``open`` to run a model of one sample on ``data`` in batches of any size; the result still takes one.
        engine: engine, or its name, to run the model on ``data``; ONNX Runtime by default.

    Returns:
        A canonical model. After ``conv1`` it has the initializers ``conv1.norm.weight``, ``conv1.norm.bias``,
            ``conv1.norm.running_mean`` and ``conv1.norm.running_var``, each [C] in the layer's dtype.

    Raises:
        ConfigurationError: no layer matches, all are normalized, a size is unknown, an option is out of range, or half precision
            cannot hold the statistics.
        InputError: a batch does not fit the model, there is none, or values are not finite.
        EngineError: the model cannot be run.
        ModelError: invalid ONNX model.
        UnsupportedOperatorError: with ``batch="open"``, the batch cannot be opened, or a layer's output then lacks samples first.
    """
    are_numbers = all(isinstance(number, int | float | np.number) for number in (epsilon, momentum))
    if not (are_numbers and 0 < epsilon < np.inf and 0 <= momentum <= 1):
        raise ConfigurationError(
            f"insert: epsilon must be positive and finite, and momentum between 0 and 1, not {epsilon!r} and {momentum!r}"
        )
    model = load(source)
    places = _places(model.graph, after)
    moments: dict[str, Moments] = {}
    if data is not None:
        measured = model if batch is None else _opened(model, places, batch)
        moments = measure_values(measured, {_key(node): layer_name(node) for node in places}, data, engine)
    names = Names.of(model.graph)
    for node in places:
        factors = _factors(node) if rescale else np.ones(1)
        _insert(model.graph, names, node, moments.get(_key(node)), epsilon, momentum, factors)
    return model


def unfold(source: Source, *_: object, **__: object) -> NoReturn:
    """Raise an error: folding multiplies the scale into the weights and cannot be undone.

    Raises:
        ConfigurationError: always, with an alternative.
    """
    raise ConfigurationError(
        "unfold: batch normalization that was folded into the layer before it cannot be recovered: of scale, bias, mean and "
        "variance only the product with the weights is left. Export the model again in training mode, before folding; or put "
        "new layers in that change nothing at first: burnish.surgery.insert(model, after='Conv', data=batches)"
    )


def _places(graph: ir.Graph, after: Patterns) -> list[ir.Node]:
    every = [node for node in graph.all_nodes() if node.op_type in OPERATORS and node.domain == ""]
    layers = [node for node in every if node.graph is graph]
    asked_for = [after] if isinstance(after, str) else list(after) if isinstance(after, Sequence) else []
    operators = [item for item in asked_for if item in OPERATORS]
    patterns: list[str] = [item for item in asked_for if item not in OPERATORS]
    named = select_layers(layers, patterns, "after", " or ".join(OPERATORS)) if patterns or not operators else []
    by_operator = [node for node in layers if node.op_type in operators]
    if not named and not by_operator:
        raise ConfigurationError(
            f"after: the model has no {' or '.join(operators)} layer; its layers are: {listed_layers(layers)}. "
            f"Choose among {', '.join(map(repr, OPERATORS))}, or names and patterns of such layers"
        )
    places = [node for node in layers if node in named or node in by_operator]
    inside = [node for node in every if node.graph is not graph and node.op_type in operators and not _is_normalized(node)]
    warn_of_bodies("insert", inside, "name the layers to put it after (after=[...]) where that is meant")
    open_places = [node for node in places if not _is_normalized(node) or layer_name(node) in patterns]
    if not open_places:
        raise ConfigurationError(
            f"after: batch normalization follows all of the chosen layers already ({listed_layers(places)}); "
            "the model can be trained as it is"
        )
    return open_places


def _opened(model: ir.Model, places: Sequence[ir.Node], batch: str) -> ir.Model:
    """Return the model for batches of any size, with these layers' outputs as [N, C, ...] under their names."""
    opened = load(model, batch=batch)
    values = {value.name: value for node in opened.graph for value in node.outputs}
    for node in places:
        value = values.get(_key(node))
        expected, shape = node.outputs[0].shape, None if value is None else value.shape
        if expected is None or shape is None or list(shape.dims[1:]) != list(expected.dims[1:]) or expected[0] != 1:
            raise UnsupportedOperatorError(
                f"insert: with the batch open, {describe_node(node)} does not have the samples along the first axis of its "
                "output alone, so that they cannot be measured together: leave batch out, and give one sample at a time"
            )
    return opened


def _is_normalized(node: ir.Node) -> bool:
    output = node.outputs[0]
    readers = [use.node for use in output.uses()]
    return bool(readers) and not output.is_graph_output() and all(reader.op_type == "BatchNormalization" for reader in readers)


def _key(node: ir.Node) -> str:
    return node.outputs[0].name or ""


def _insert(
    graph: ir.Graph,
    names: Names,
    node: ir.Node,
    moments: Moments | None,
    epsilon: float,
    momentum: float,
    factors: np.ndarray,
) -> None:
    """Insert a new layer, and multiply weights and bias of the layer before it by ``factors``, [C] or [1]."""
    output = node.outputs[0]
    channels = _channels(node)
    assert output.dtype is not None
    dtype = output.dtype.numpy()
    mean = np.zeros(channels) if moments is None else moments.mean
    variance = np.ones(channels) if moments is None else moments.variance
    with np.errstate(over="ignore"):
        scaled = {"running_mean": mean * factors, "running_var": variance * factors**2}
        arrays = {name: np.broadcast_to(array, channels).astype(dtype) for name, array in scaled.items()}
    # With the rounded variance and the float32 epsilon of the model, scale / sqrt(variance + epsilon) is exactly 1.
    held = float(np.float32(epsilon))
    arrays["weight"] = (np.sqrt(arrays["running_var"].astype(np.float64) + held) / factors).astype(dtype)
    arrays["bias"] = mean.astype(dtype)
    if not all(np.isfinite(array.astype(np.float64)).all() for array in arrays.values()):
        raise ConfigurationError(
            f"insert: the statistics behind {describe_node(node)} are too large for {output.dtype}: choose other layers with "
            "after=..., or give the model in float32"
        )
    if factors.size > 1:
        _multiply(node, factors)
    stem = f"{layer_name(node) or _key(node)}.norm"
    operands = []
    for part in ("weight", "bias", "running_mean", "running_var"):
        operands.append(add_initializer(graph, names.take(f"{stem}.{part}"), arrays[part].copy()))
    normalization = ir.node("BatchNormalization", [output, *operands], {"epsilon": float(epsilon), "momentum": float(momentum)})
    insert_behind(node, normalization, names)


def _factors(node: ir.Node) -> np.ndarray:
    """Return the factors, [C], that scale each channel's weights to ``LENGTH``; [1] for shared weights."""
    operands = [value for value in node.inputs[1:3] if value is not None]
    if not all(value.is_initializer() and len(value.uses()) == 1 for value in operands):
        return np.ones(1)
    weight = initial_array(operands[0]).astype(np.float64)
    lengths = np.sqrt((_grouped(node, weight) ** 2).sum(axis=(1, 3))).reshape(-1)
    usual = np.median(lengths)
    return np.where(lengths > TINY * usual, LENGTH / np.maximum(lengths, TINY * usual or 1), 1.0)


def _grouped(node: ir.Node, weight: np.ndarray) -> np.ndarray:
    """Return a weight as [groups, inputs, outputs per group, positions]; only transposed convolutions have several groups."""
    if node.op_type == "ConvTranspose":
        groups = node.attributes["group"].as_int() if "group" in node.attributes else 1
        return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    has_outputs_first = node.op_type == "Conv" or ("transB" in node.attributes and node.attributes["transB"].as_int())
    return weight.reshape(1, 1, len(weight), -1) if has_outputs_first else weight.reshape(1, *weight.shape, 1)


def _multiply(node: ir.Node, factors: np.ndarray) -> None:
    weight, *bias = node.inputs[1:3]
    assert weight is not None
    array = initial_array(weight)
    grouped = _grouped(node, array)
    set_initializer(weight, (grouped * factors.reshape(len(grouped), 1, -1, 1)).reshape(array.shape))
    for value in bias:  # channels are on the last axis of a bias
        if value is not None:
            set_initializer(value, initial_array(value) * factors)


def _channels(node: ir.Node) -> int:
    weight = node.inputs[1]
    shape = None if weight is None else static_shape(weight)
    if shape is None:
        raise ConfigurationError(
            f"insert: the number of channels that {describe_node(node)} returns is not known, as its weight has no fixed shape; "
            "choose other layers with after=..."
        )
    if node.op_type == "Conv":
        return shape[0]
    if node.op_type == "ConvTranspose":
        return shape[1] * (node.attributes["group"].as_int() if "group" in node.attributes else 1)
    return shape[0] if "transB" in node.attributes and node.attributes["transB"].as_int() else shape[1]
