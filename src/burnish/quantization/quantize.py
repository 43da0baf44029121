"""``quantize``: quantization-aware training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import onnx_ir as ir

from burnish.analysis.layer_selection import Patterns, listed_layers, nodes_around, select_layers, warn_of_bodies
from burnish.engines import Engine
from burnish.errors import ConfigurationError
from burnish.graph import (
    FLOATING,
    Builder,
    Names,
    attribute_value,
    constant_array,
    describe_node,
    remove_node,
    replace_node,
    static_shape,
)
from burnish.graph.annotations import masked_weights
from burnish.graph.shapes import has_sixteen_bit_values
from burnish.graph.uses import is_read_once
from burnish.importer import Source, load
from burnish.quantization.calibration import Method, Range, check_method, ranges
from burnish.quantization.formats import ActivationFormat, WeightFormat, activation_format, weight_format
from burnish.quantization.graph import QUANTIZATION, QuantizationMark, Scales
from burnish.quantization.pairs import Training, put_pair, quantize_activation, quantize_weight
from burnish.quantization.placement import Layer, Place, layers_of, nodes_apart, places, put_dropout_last
from burnish.rewriting.change_dtypes import compute_in_float32
from burnish.rewriting.fold_batch_normalization import fold_batch_normalization
from burnish.settings import is_natural_text, read_number
from burnish.validation import is_number, is_whole
from burnish.value_statistics import Batch

Ends = Literal["int8", "float32"]
IN_BODIES = "such layers are quantized with activations=None alone, in a format that fits them"


def quantize(
    source: Source,
    weights: str = "int8 per channel",
    activations: str | None = "uint8",
    *,
    calibration: Iterable[Batch] | None = None,
    method: Method = "minmax",
    percentile: float | None = None,
    symmetric: bool = False,
    scales: Scales = "learned",
    momentum: float | None = None,
    freeze_observers_after: int | str | None = None,
    batch_norm: Literal["train", "fold"] | None = None,
    skip: Patterns = (),
    first_and_last: Ends | None = None,
    reduce_range: bool = True,
    quantize_outputs: bool = True,
    engine: str | Engine | None = None,
) -> ir.Model:
    """Return a model whose layers simulate integer arithmetic, for quantization-aware training (Jacob et al. 2018).

    QuantizeLinear and DequantizeLinear are inserted where ONNX Runtime can fuse nodes into integer operators. Gradients pass
    straight through the rounding. The state holds float32 weights; ``Session.export`` writes integers in the QDQ format. float16
    and bfloat16 computations become float32, which ONNX Runtime's integer operators require; inputs keep their dtypes, outputs
    become float32.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        weights: ``int8``, ``int8 per channel``, ``int4``, ``int4 per channel`` or ``int4 blocks of 32`` (along the inputs of
            MatMul and Gemm; convolutions get a scale per output channel). Symmetric about zero.
        activations: ``uint8``, ``int8`` or None for float32. Layers in branches and loop bodies are quantized only with None; a
            warning names the others.
        calibration: batches, dicts of arrays by input name, to measure activation ranges.
        method: choice of activation ranges: ``minmax``, ``percentile`` or ``entropy``.
        percentile: of absolute values, for ``method="percentile"``; 99.99 by default.
        symmetric: True if zero is the middle integer of activations.
        scales: ``learned``: trained as learned step sizes (Esser et al. 2020), with gradients divided by sqrt(N * levels) for N
            numbers per scale. ``observed``: from the range of each weight and a moving average of each activation's range.
            ``fixed``: from calibration.
        momentum: share of an activation's range kept by a step, for ``scales="observed"``; 0.99 by default.
        freeze_observers_after: step that freezes observed ranges; ``2 epochs`` (``compile`` needs the steps per epoch); or
            ``settled``: an activation's range freezes when neither end moved by more than 1 % of its width (``settled:0.005``:
            0.5 %) in the last ``1 / (1 - momentum)`` steps. None for never.
        batch_norm: ``train`` keeps batch normalization and folds it exactly at export, which requires a scale per output channel.
            ``fold`` folds it now. By default ``train`` if possible.
        skip: names or shell-style patterns of layers to leave in float32, by weight or node.
        first_and_last: ``int8`` (if 4 bits are too few) or ``float32`` for the first and last layer; by default like the others.
        reduce_range: True for 7-bit weights. x86 kernels without VNNI add two 8-bit products in 16 bits, which may saturate; 7
            bits are exact. Products of two activations then stay in float32 for ``int8``, and are exact for ``uint8``. False for
            other targets (VNNI, Arm, accelerators).
        quantize_outputs: True to round model outputs, too, so the last layer can return integers.
        engine: engine, or its name, to run the model on the calibration data.

    Returns:
        A canonical model.

    Raises:
        ConfigurationError: an option does not fit or has no effect, there is no layer to quantize, or calibration is missing.
        InputError: a batch does not fit, there is none, or values are not finite.
        EngineError: the model cannot be run.
        ModelError: invalid ONNX model.
    """
    weight_kind, activation_kind = weight_format(weights, reduce_range), activation_format(activations, symmetric)
    _check_useful("percentile", percentile, "method", method, "percentile")
    _check_useful("momentum", momentum, "scales", scales, "observed")
    if activations is None:
        _check_of_weights(
            method=(method, "minmax"),
            symmetric=(symmetric, False),
            quantize_outputs=(quantize_outputs, True),
        )
        if calibration is not None:
            raise ConfigurationError("quantize: calibration is for activations, and activations=None: leave it out")
    percentile = 99.99 if percentile is None else percentile
    check_method(method, percentile)
    training = _training(scales, 0.99 if momentum is None else momentum, freeze_observers_after)
    model = load(source)
    graph = model.graph
    check_unquantized(graph)
    if has_sixteen_bit_values(model):
        compute_in_float32(model)
    if batch_norm not in (None, "train", "fold"):
        raise ConfigurationError(f"quantize: batch_norm={batch_norm!r}: give 'train' or 'fold', or leave it out")
    if batch_norm == "fold" or (batch_norm is None and not weight_kind.keeps_sign):
        fold_batch_normalization(model)
    put_integer_forms(graph)
    kinds = weight_kind, weight_format("int8", reduce_range)
    chosen = _formats_of(graph, *kinds, skip, first_and_last, within_bodies=activation_kind is None)
    _check_foldable(graph, chosen)
    found: list[Place] = []
    apart: set[ir.Node] = set()
    limits: dict[str, Range] = {}
    if activation_kind is not None:
        if calibration is None:
            raise ConfigurationError(
                "quantize: the ranges of activations are measured on data: give batches with calibration=[...], or quantize "
                "weights alone with activations=None"
            )
        put_dropout_last(graph)
        quantized = [layer.node for layer, _ in chosen]
        apart = nodes_apart(graph, quantized, products=activations == "uint8" or not reduce_range)
        found = places(graph, quantized, apart, quantize_outputs)
        own = [place.value.name or "" for place in found if place.grid is place.value]
        limits = ranges(model, own, calibration, method, percentile, activation_kind, engine)
    names, around = Names.of(graph), nodes_around(graph)
    for layer, kind in chosen:
        quantize_weight(Builder(graph, before=around[layer.node]), names, layer, kind, training)
    if activation_kind is not None:
        _quantize_activations(graph, names, found, apart, limits, activation_kind, training)
    return model


def _quantize_activations(
    graph: ir.Graph,
    names: Names,
    found: Sequence[Place],
    apart: set[ir.Node],
    limits: Mapping[str, Range],
    activations: ActivationFormat,
    training: Training,
) -> None:
    grids = {}
    mark = training.mark(is_weight=False, levels=activations.levels)
    for place in found:
        builder = _builder_after(graph, place.value)
        if place.grid is place.value:
            grids[place.grid] = quantize_activation(builder, names, place, limits[place.value.name or ""], activations, training)
        scale, zero_point = grids[place.grid]
        own = mark if place.grid is place.value else _copied(mark)
        put_pair(place, builder, (builder.tensor(scale.value), builder.tensor(zero_point.value)), own, names, apart)


def _copied(mark: QuantizationMark) -> QuantizationMark:
    return replace(mark, scales="fixed") if mark.scales == "observed" else mark


def _builder_after(graph: ir.Graph, value: ir.Value) -> Builder:
    producer = value.producer()
    nodes = list(graph)
    following = nodes[0] if producer is None else nodes[index] if (index := nodes.index(producer) + 1) < len(nodes) else None
    return Builder(graph, before=following)


def _formats_of(
    graph: ir.Graph,
    weights: WeightFormat,
    eight: WeightFormat,
    skip: Patterns,
    first_and_last: Ends | None,
    within_bodies: bool,
) -> list[tuple[Layer, WeightFormat]]:
    found = layers_of(graph.all_nodes())
    left = [layer.node for layer in found if layer.node.graph is not graph and not (within_bodies and _fits(layer, weights))]
    layers = [layer for layer in found if layer.node not in left]
    if left and not layers:
        raise ConfigurationError(f"quantize: all layers stand in branches or loop bodies ({listed_layers(left)}): {IN_BODIES}")
    if not layers:
        raise ConfigurationError(
            "quantize: the model has no Conv, ConvTranspose, Gemm or MatMul whose weight is a float32 initializer: give the "
            "model before anything else quantized it, with its weights as initializers"
        )
    if first_and_last not in (None, "int8", "float32"):
        raise ConfigurationError(f"quantize: first_and_last={first_and_last!r}: give 'int8' or 'float32', or leave it out")
    skipped = set(select_layers([layer.node for layer in found], skip, "skip", "Conv, Gemm or MatMul")) if skip else set()
    ends = {layers[0].node, layers[-1].node} if first_and_last else set()
    formats = []
    for layer in layers:
        if layer.node not in skipped and not (layer.node in ends and first_and_last == "float32"):
            at_end = layer.node in ends and weights.bits == 4
            kind = replace(eight, per_channel=weights.keeps_sign) if at_end else weights
            if kind.block and layer.input_axis is None:
                kind = replace(kind, block=0, per_channel=True)
            formats.append((layer, kind))
    if not formats:
        raise ConfigurationError("quantize: skip and first_and_last leave no layer to quantize: let them select fewer")
    warn_of_bodies(
        "quantize", [node for node in left if node not in skipped], f"{IN_BODIES}. Name them in skip=[...] where that is meant"
    )
    return formats


def _fits(layer: Layer, weights: WeightFormat) -> bool:
    """True if a layer's inputs divide into blocks and batch normalization after it can be folded."""
    shape = static_shape(layer.weight)
    in_blocks = not weights.block or layer.input_axis is None or shape is None or shape[layer.input_axis] % weights.block == 0
    return in_blocks and _is_foldable(layer, weights)


def _check_useful(option: str, value: object, other: str, chosen: object, needed: str) -> None:
    if value is not None and chosen != needed:
        raise ConfigurationError(f"quantize: {option}={value!r} changes nothing with {other}={chosen!r}: give {other}={needed!r}")


def _check_of_weights(**options: tuple[object, object]) -> None:
    for name, (value, default) in options.items():
        if value != default:
            raise ConfigurationError(
                f"quantize: {name}={value!r} is for activations, and activations=None leaves them in float32: leave it out, or "
                "give activations='uint8' with calibration=[...]"
            )


def _training(scales: Scales, momentum: float, freeze_after: int | str | None) -> Training:
    if scales not in ("learned", "observed", "fixed"):
        raise ConfigurationError(f"quantize: scales={scales!r}: give 'learned', 'observed' or 'fixed'")
    if not is_number(momentum) or not 0 <= momentum < 1:
        raise ConfigurationError(f"quantize: momentum={momentum!r}: give a number from 0 to below 1, such as 0.99")
    freeze = read_freezing(freeze_after)
    if freeze and scales != "observed":
        raise ConfigurationError(
            f"quantize: freeze_observers_after={freeze_after!r}: only observed ranges freeze: give it together with "
            "scales='observed'"
        )
    return Training(scales, float(momentum), **freeze)


def check_unquantized(graph: ir.Graph) -> None:
    """Raise ConfigurationError for a graph that is already quantized or has masked weights."""
    if (masked := next(masked_weights(graph), None)) is not None:
        raise ConfigurationError(
            f"quantize: {describe_node(masked[0])} masks weights: quantize the model first, and prune the result"
        )
    for node in graph.all_nodes():
        if node.op_type in ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"):
            raise ConfigurationError(
                f"quantize: the model holds {describe_node(node)}: it is quantized already. Give the model in float32 that it "
                "was made from"
            )


def _is_foldable(layer: Layer, kind: WeightFormat) -> bool:
    """True if no batch normalization follows a layer, or its factors fit into the layer's scales."""
    follows = any(reader.op_type == "BatchNormalization" for reader, _ in layer.node.outputs[0].uses())
    return not follows or (kind.keeps_sign and layer.axis is not None)


def _check_foldable(graph: ir.Graph, chosen: Sequence[tuple[Layer, WeightFormat]]) -> None:
    for layer, kind in chosen:
        if not _is_foldable(layer, kind):
            raise ConfigurationError(
                f"quantize: batch normalization stands after {describe_node(layer.node)}, and its factor for each channel fits "
                "in no single scale: fold it first (batch_norm='fold'), or quantize weights per channel"
            )


SETTLED = 0.01
"""Default relative movement of a settled range."""
_EPOCHS = re.compile(r"([0-9]{1,18}) epochs?")
_SETTLED = re.compile(r"settled(?::([0-9.eE+-]+))?")


def read_freezing(asked: int | str | None) -> dict[str, Any]:
    """Parse ``freeze_observers_after`` into arguments of ``Training``; empty for None.

    Args:
        asked: steps, as a number or its digits; ``2 epochs``; ``settled`` or ``settled:0.005``.

    Raises:
        ConfigurationError: another form.
    """
    if asked is None:
        return {}
    if isinstance(asked, str) and is_natural_text(asked.strip()):
        asked = int(asked)
    if is_whole(asked) and asked >= 0:
        return {"freeze_after": int(asked)}
    text = asked.strip() if isinstance(asked, str) else ""
    if (epochs := _EPOCHS.fullmatch(text)) and int(epochs[1]) > 0:
        return {"freeze_epochs": int(epochs[1])}
    if settled := _SETTLED.fullmatch(text):
        try:
            part = SETTLED if settled[1] is None else read_number(settled[1])
        except ValueError:
            part = 0.0
        if 0 < part < 1:
            return {"settled": part}
    raise ConfigurationError(
        f"quantize: freeze_observers_after={asked!r}: give a whole number of steps, '2 epochs', or 'settled', with the part of "
        "its width that a range may still move by, 'settled:0.01'"
    )


def put_integer_forms(graph: ir.Graph) -> None:
    """Rewrite products with a bias as Gemm, and means over all pixels as GlobalAveragePool, in place."""
    _join_biases(graph)
    for node in list(graph):
        if node.op_type == "ReduceMean" and node.domain == "":
            _pool(graph, node)


def _join_biases(graph: ir.Graph) -> None:
    """Fuse each MatMul of two matrices and the Add of its bias into a Gemm, whose integer operator adds the bias as integers."""
    for layer in layers_of(graph):
        node, weight = layer.node, constant_array(layer.weight)
        x, product = node.inputs[0], node.outputs[0]
        if node.op_type != "MatMul" or weight is None or not is_read_once(product) or x is None or x.shape is None:
            continue
        addition = next(iter(product.uses()))[0]
        if len(x.shape) != 2 or addition.op_type != "Add" or addition.domain != "":
            continue
        bias = addition.inputs[1 if addition.inputs[0] is product else 0]
        array = None if bias is None else constant_array(bias)
        if bias is not None and array is not None and array.shape == weight.shape[1:]:
            builder = Builder(graph, before=addition)
            replace_node(addition, builder.op("Gemm", *(builder.tensor(value) for value in (x, layer.weight, bias))))
            remove_node(node)


def _pool(graph: ir.Graph, node: ir.Node) -> None:
    x = node.inputs[0]
    listed = attribute_value(node, "axes", None)
    array = constant_array(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else listed
    if x is None or x.shape is None or len(x.shape) < 3 or array is None:
        return
    rank = len(x.shape)
    if sorted(int(axis) % rank for axis in array) != list(range(2, rank)):
        return
    builder = Builder(graph, before=node)
    pooled = builder.op("GlobalAveragePool", builder.tensor(x))
    if not attribute_value(node, "keepdims", 1):
        pooled = builder.op("Flatten", pooled, axis=1)
    replace_node(node, pooled)


def remaining_line(model: ir.Model) -> str | None:
    """Return a line on the operators of a quantized model that read floating-point weights; None if there are none.

    Weights are initializers of two or more dimensions. Recurrent layers, embeddings and skipped layers read such weights.

    Args:
        model: a model from ``burnish.surgery.quantize``.
    """
    readers: Counter[str] = Counter()
    remaining = total = 0
    for value in model.graph.initializers.values():
        if value.dtype not in FLOATING or value.shape is None or len(value.shape) < 2:
            continue
        array = constant_array(value)
        if array is None or array.size < 2:
            continue
        total += array.size
        direct = {reader for reader, _ in value.uses() if not _leads_to_integers(reader)}
        if direct:
            remaining += array.size
            readers.update({reader.op_type for reader in direct})
    if not remaining:
        return None
    which = ", ".join(f"{count} initializers of {operator}" for operator, count in sorted(readers.items()))
    return f"{remaining / total:.0%} of the weights stay in floating-point numbers: {which}"


def _leads_to_integers(reader: ir.Node) -> bool:
    while not QUANTIZATION.is_on(reader):
        readers = [following for following, _ in reader.outputs[0].uses()]
        if reader.op_type not in ("Reshape", "Transpose") or len(readers) != 1:
            return False
        reader = readers[0]
    return True
