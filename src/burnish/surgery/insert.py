"""Batch normalization put into a model that has none, without changing what it computes."""

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
"""Layers that have their channels on axis 1 of the output."""
TINY = 1e-6
"""Weights of a channel that are shorter than this part of the layer's median count as none."""
LENGTH = 1 / np.sqrt(3)
"""Of the weights of each channel after ``rescale``: that which PyTorch's layers begin with, whatever their size."""


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
    """Put batch normalization after layers, and set it so that the model's inference outputs stay as they are, up to rounding.

    With mean m and variance v of a channel the new layer has scale sqrt(v + epsilon) and bias m: it undoes what it does. With
    ``data``, m and v are those that the layer's output has there, so that training starts from statistics that fit; without,
    m = 0 and v = 1. This is the way round for a model whose batch normalization was folded.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        after: ``Conv``, ``ConvTranspose`` or ``Gemm``; or names or shell-style patterns of such layers, called after their
            weight (``layer1.conv1`` for ``layer1.conv1.weight``) or as their node; or a list of these. A layer that batch
            normalization follows already is left out where it was not named by itself.
        data: batches, dicts of arrays by input name; other names, such as labels, are not read.
        epsilon: of the new layers.
        rescale: bring the weights of each channel to a length of 1/sqrt(3), and the new layer's statistics with them. Batch
            normalization makes a layer independent of that length, and its square divides the learning rate (van Laarhoven
            2017), so that with a scale folded into them layers would train at very different paces. Which length the weights
            had before is not in the file. PyTorch draws those of every layer at 1/sqrt(3); short is better than long, as such
            weights grow where the rate is too high, and never shrink (Arora, Li and Lyu 2018). Layers that share weight or bias
            with others keep theirs.
        momentum: of the new layers: the part of the running statistics that a training step retains.
        batch: ``open`` runs a model of one sample on ``data`` in batches of any size; what is returned takes one all the same.
        engine: what runs the model on ``data``, an engine of ``burnish.engines`` or its name; ONNX Runtime by default.

    Returns:
        A canonical model. The initializers of the layer after ``conv1`` are ``conv1.norm.weight``, ``conv1.norm.bias``,
        ``conv1.norm.running_mean`` and ``conv1.norm.running_var``, each [C] in the dtype of the layer.

    Raises:
        ConfigurationError: nothing matches, all of it is normalized already, a layer of unknown size, or an option out of range;
            or statistics that the model's half precision cannot hold.
        InputError: a batch that does not fit the model, none at all, or values that are not finite.
        EngineError: the model cannot be run.
        ModelError: the source is not a valid ONNX model.
        UnsupportedOperatorError: ``batch="open"``, and the batch cannot be opened, or samples do not stand first in a layer's
            output then.
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
    """Folding cannot be undone: it multiplies the scale into the weights and keeps no trace of either.

    Raises:
        ConfigurationError: always, with the way round.
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
    """The model for batches of any size, in which the outputs of these layers are [N, C, ...] under their names."""
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
    """Put the new layer in; weights and bias of the layer before it are multiplied by ``factors`` [C], or [1] for none."""
    output = node.outputs[0]
    channels = _channels(node)
    assert output.dtype is not None
    dtype = output.dtype.numpy()
    mean = np.zeros(channels) if moments is None else moments.mean
    variance = np.ones(channels) if moments is None else moments.variance
    with np.errstate(over="ignore"):
        scaled = {"running_mean": mean * factors, "running_var": variance * factors**2}
        arrays = {name: np.broadcast_to(array, channels).astype(dtype) for name, array in scaled.items()}
    # From the rounded variance and the epsilon as the model holds it: the factor scale / sqrt(variance + epsilon) is then 1.
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
    """What brings the weights of each channel to ``LENGTH`` [C]; [1] where they are not to be changed."""
    operands = [value for value in node.inputs[1:3] if value is not None]
    if not all(value.is_initializer() and len(value.uses()) == 1 for value in operands):
        return np.ones(1)
    weight = initial_array(operands[0]).astype(np.float64)
    lengths = np.sqrt((_grouped(node, weight) ** 2).sum(axis=(1, 3))).reshape(-1)
    usual = np.median(lengths)
    return np.where(lengths > TINY * usual, LENGTH / np.maximum(lengths, TINY * usual or 1), 1.0)


def _grouped(node: ir.Node, weight: np.ndarray) -> np.ndarray:
    """A layer's weight as [groups, inputs, outputs of a group, positions], one group but in a transposed convolution."""
    if node.op_type == "ConvTranspose":
        groups = node.attributes["group"].as_int() if "group" in node.attributes else 1
        return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    has_outputs_first = node.op_type == "Conv" or ("transB" in node.attributes and node.attributes["transB"].as_int())
    return weight.reshape(1, 1, len(weight), -1) if has_outputs_first else weight.reshape(1, *weight.shape, 1)


def _multiply(node: ir.Node, factors: np.ndarray) -> None:
    """Multiply weight and bias of a layer by a factor for each channel."""
    weight, *bias = node.inputs[1:3]
    assert weight is not None
    array = initial_array(weight)
    grouped = _grouped(node, array)
    set_initializer(weight, (grouped * factors.reshape(len(grouped), 1, -1, 1)).reshape(array.shape))
    for value in bias:  # of which the channels are the last axis, where it has more than one
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
