"""Weight normalization: separate training of a weight's direction and length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.analysis.layer_selection import Patterns, listed_layers, select_layers, warn_of_bodies
from burnish.engines import Engine
from burnish.errors import ConfigurationError, InputError
from burnish.graph import (
    FLOATING,
    Builder,
    Names,
    add_initializer,
    constant_array,
    describe_node,
    insert_behind,
    static_shape,
)
from burnish.graph.constants import set_initializer
from burnish.importer import Source, load
from burnish.norms.policies import layer_name
from burnish.value_statistics import Batch, check_data, measure_values


def weight_normalize(
    source: Source, layers: Patterns = "*", data: Iterable[Batch] | None = None, *, engine: str | Engine | None = None
) -> ir.Model:
    """Write weights as w = g v / ‖v‖, with a length g per output channel (Salimans and Kingma 2016, section 2).

    The initializer ``<w>`` becomes ``<w>_g`` and ``<w>_v`` (as in PyTorch's ``weight_norm``). The norm is over all axes but that
    of the output channels: axis 0 for Conv and Gemm with transB, else the last. v starts as w; g has extent 1 on the other axes
    and starts as the norms, so outputs are unchanged up to rounding. Both are trained and subject to weight decay.
    ``Session.export`` restores w.

    With ``data``, layers are initialized from it (section 3): in graph order, each output before any nonlinearity gets mean 0 and
    variance 1 per channel, which changes the model's outputs. A layer without bias gets ``<layer>.bias``.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        layers: names or shell-style patterns of Conv, Gemm and MatMul layers, by weight (``conv1`` for ``conv1.weight``) or node.
        data: batches, dicts of arrays by input name, kept in memory; others, such as labels, are ignored.
        engine: engine, or its name, to run the model on ``data``; ONNX Runtime by default.

    Returns:
        A canonical model.

    Raises:
        ConfigurationError: nothing matches, a weight is a model output or has an all-zero channel; with data, layers share a
            weight or a bias is not one constant per channel.
        InputError: a batch does not fit, there is none, or a channel is constant over the data.
        EngineError: the model cannot be run.
        ModelError: invalid ONNX model.
    """
    model = load(source)
    weighted = [layer for node in model.graph.all_nodes() if (layer := _layer(node)) is not None]
    if not weighted:
        raise ConfigurationError(
            "weight_normalize: the model has no Conv, Gemm or MatMul whose weight is a floating-point initializer; give a model "
            "that holds its weights as such, neither left out nor quantized"
        )
    selected = select_layers([layer.node for layer in weighted], layers, "layers", "Conv, Gemm or MatMul")
    chosen = [layer for layer in weighted if layer.node in selected]
    batches = None
    if data is not None:
        batches = list(check_data(data))
        chosen = _outside_bodies(model.graph, chosen)
        _check_unshared(chosen)
    lengths: dict[ir.Value, ir.Value] = {}
    names = Names.of(model.graph)
    for layer in chosen:
        if layer.weight not in lengths:
            lengths[layer.weight] = _reparametrize(model.graph, names, layer)
    for layer in chosen if batches is not None else ():
        _initialize(model, names, layer, lengths[layer.weight], batches or [], engine)
    return model


@dataclass(frozen=True)
class _Layer:
    """A linear layer: node, weight initializer, and the weight's axis of output channels."""

    node: ir.Node
    weight: ir.Value
    axis: int


def _layer(node: ir.Node) -> _Layer | None:
    if node.domain != "" or node.op_type not in ("Conv", "Gemm", "MatMul"):
        return None
    weight = node.inputs[1]
    shape = None if weight is None else static_shape(weight)
    if weight is None or shape is None or constant_array(weight) is None or not weight.is_initializer():
        return None
    if weight.dtype not in FLOATING or len(shape) < 2 or (node.op_type != "Conv" and len(shape) != 2) or 0 in shape:
        return None
    transposed = "transB" in node.attributes and node.attributes["transB"].as_int() != 0
    return _Layer(node, weight, 0 if node.op_type == "Conv" or transposed else 1)


def _outside_bodies(graph: ir.Graph, layers: list[_Layer]) -> list[_Layer]:
    """Return the layers of the main graph, whose outputs can be measured; warn of those in bodies."""
    outside, inside = ([layer for layer in layers if (layer.node.graph is graph) is here] for here in (True, False))
    nodes = [layer.node for layer in inside]
    why = "what they give is not measured: without data they are normalized too"
    if not outside:
        raise ConfigurationError(
            f"weight_normalize: all layers stand in branches or loop bodies ({listed_layers(nodes)}), and {why}: leave data out"
        )
    warn_of_bodies("weight_normalize", nodes, why)
    return outside


def _check_unshared(layers: list[_Layer]) -> None:
    readers = Counter(layer.weight for layer in layers)
    for weight, number in readers.items():
        if number > 1:
            sharing = ", ".join(describe_node(layer.node) for layer in layers if layer.weight is weight)
            raise ConfigurationError(
                f"weight_normalize: the weight '{weight.name}' is shared by {sharing}, and one length cannot fit the data of "
                "each; leave them out with layers=..., or leave data out"
            )


def _reparametrize(graph: ir.Graph, names: Names, layer: _Layer) -> ir.Value:
    """Replace the weight by ``g v / ‖v‖``; return g."""
    weight, name = layer.weight, layer.weight.name or ""
    array = constant_array(weight)
    assert array is not None
    if weight.is_graph_output():
        raise ConfigurationError(
            f"weight_normalize: the weight '{name}' is an output of the model; remove that output, or leave its layer out with "
            "layers=..."
        )
    axes = [axis for axis in range(array.ndim) if axis != layer.axis]
    lengths = np.sqrt(np.sum(array.astype(np.float64) ** 2, axis=tuple(axes), keepdims=True)).astype(array.dtype)
    if not lengths.all() or not np.isfinite(lengths.astype(np.float64)).all():
        channel = int(np.argmax((lengths == 0) | ~np.isfinite(lengths.astype(np.float64))))
        raise ConfigurationError(
            f"weight_normalize: channel {channel} of the weight '{name}' has length {float(lengths.flat[channel])}, and so no "
            "direction; give it other numbers, or leave its layer out with layers=..."
        )
    graph.initializers.pop(name)
    weight.name = None
    g = add_initializer(graph, names.take(f"{name}_g"), lengths)
    v = add_initializer(graph, names.take(f"{name}_v"), array)
    builder = Builder(graph, before=graph[0])
    direction = builder.tensor(v)
    norm = builder.op("ReduceL2", direction, builder.integers(axes), keepdims=1)
    computed = direction * (builder.tensor(g) / norm)
    weight.replace_all_uses_with(computed.value)
    computed.value.name = name
    return g


def _initialize(
    model: ir.Model, names: Names, layer: _Layer, length: ir.Value, data: list[Batch], engine: str | Engine | None
) -> None:
    """Scale and shift a layer so that its output has mean 0 and variance 1 per channel over the data."""
    bias, output = _own_bias(model.graph, names, layer)
    title = layer_name(layer.node)
    last = layer.node.op_type == "MatMul"
    moments = measure_values(model, {output.name or "": title}, data, engine, channels_last=last)[output.name or ""]
    constant = moments.variance <= 0
    if constant.any():
        raise InputError(
            f"Channel {int(np.argmax(constant))} of the layer '{title}' is constant over the data ({int(constant.sum())} of "
            f"{constant.size} channels are), and cannot be given variance 1: give batches in which it varies, or leave the "
            "layer out with layers=..."
        )
    deviation = np.sqrt(moments.variance)
    g, b = constant_array(length), constant_array(bias)
    assert g is not None
    assert b is not None
    set_initializer(length, g.astype(np.float64) / deviation.reshape(g.shape))
    set_initializer(bias, (b.astype(np.float64) - moments.mean) / deviation)


def _own_bias(graph: ir.Graph, names: Names, layer: _Layer) -> tuple[ir.Value, ir.Value]:
    """Return the bias of a layer, an initializer [C] without other readers, and the layer's output after the bias."""
    node = layer.node
    if node.op_type == "MatMul":
        return _added_bias(graph, names, layer)
    present = node.inputs[2] if len(node.inputs) > 2 else None
    factor = node.attributes["beta"].as_float() if "beta" in node.attributes else 1.0
    node.attributes.pop("beta", None)
    bias = _as_own(graph, names, layer, present, factor)
    if present is not bias:
        node.resize_inputs(3)
        node.replace_input_with(2, bias)
    return bias, node.outputs[0]


def _added_bias(graph: ir.Graph, names: Names, layer: _Layer) -> tuple[ir.Value, ir.Value]:
    """Return the same for a MatMul, whose bias is added by a later node; the node is created if there is none."""
    product = layer.node.outputs[0]
    uses = list(product.uses())
    if len(uses) == 1 and not product.is_graph_output() and uses[0].node.op_type == "Add" and uses[0].node.domain == "":
        adding, position = uses[0].node, 1 - uses[0].idx
        present = adding.inputs[position]
        array = constant_array(present)
        if array is not None and array.ndim <= 2 and _fits_channels(array, _channels(layer)):
            bias = _as_own(graph, names, layer, present, 1.0)
            if bias is not present:
                adding.replace_input_with(position, bias)
            return bias, adding.outputs[0]
    bias = _as_own(graph, names, layer, None, 1.0)
    adding = ir.node("Add", [product, bias])
    insert_behind(layer.node, adding, names)
    return bias, adding.outputs[0]


def _as_own(graph: ir.Graph, names: Names, layer: _Layer, present: ir.Value | None, factor: float) -> ir.Value:
    """Return ``factor`` times a bias as an initializer [C] without other readers; zeros if there is none."""
    channels = _channels(layer)
    assert layer.weight.dtype is not None
    dtype = layer.weight.dtype.numpy()
    name = f"{layer_name(layer.node)}.bias"
    if present is None:
        return add_initializer(graph, names.take(name), np.zeros(channels, dtype))
    array = constant_array(present)
    if array is None or not _fits_channels(array, channels):
        raise ConfigurationError(
            f"weight_normalize: the bias '{present.name}' of {describe_node(layer.node)} is not one constant per channel, and "
            "cannot be set from data; leave the layer out with layers=..., or leave data out"
        )
    vector = np.broadcast_to(array.reshape(-1) * np.asarray(factor, dtype), (channels,)).copy()
    if len(present.uses()) > 1 or present.is_graph_output() or not present.is_initializer():
        return add_initializer(graph, names.take(name), vector)
    set_initializer(present, vector)
    return present


def _channels(layer: _Layer) -> int:
    weight = layer.node.inputs[1]
    shape = None if weight is None else static_shape(weight)
    assert shape is not None
    return shape[layer.axis]


def _fits_channels(array: np.ndarray, channels: int) -> bool:
    return array.size in (1, channels) and (array.ndim == 0 or array.shape[-1] == array.size)
