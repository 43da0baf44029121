"""Find the problems that ``ObjectiveWarning`` reports at compilation, as sentences with a remedy.

The loss may not fit its input; the selected weights may not be the intended ones; or the program may not compute the same as its
file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from burnish import losses
from burnish.compiler.predictions import Prediction, sorting_node
from burnish.compiler.probabilities import bounded_logits_node, bounding_node, moved_from, node_of_last_axis, open_node
from burnish.errors import ConfigurationError
from burnish.graph import constant_array, describe_node
from burnish.graph.annotations import DEPARTURES, OF_MODULE
from burnish.importer import (
    computed_ahead,
    folded_layers,
    lost_parameters,
    of_unknown_origin,
    perhaps_copied,
    perhaps_learned_scalars,
    perhaps_merged,
    perhaps_shared,
    shared_statistics,
)
from burnish.losses import Reading
from burnish.norms import Frozen, NormPolicy, layer_name, never_updated, normalizes_by_batch, uses_the_batch
from burnish.sample_axes import mixing_nodes

SHOWN = 3
"""The number of weights or layers that a sentence names."""
STATISTICS = frozenset("Cast Div Identity Mul Pow ReduceMean ReduceSum Reshape Squeeze Sub Unsqueeze".split())
"""Operators that compute a mean and a variance."""
CLASSES_LAST = "say so with loss='cross_entropy:class_axis=-1'"


def check_classes(predictions: Iterable[Prediction], loss: losses.Loss) -> None:
    """Check that a loss over classes reads an axis that can hold classes.

    Raises:
        ConfigurationError: there is one class, whose probability is always 1; or the model sorts the classes, so that the first
            is a different class for each sample.
    """
    for prediction, reading in zip(predictions, loss.readings, strict=False):
        axis, shape = reading.classes_along, prediction.value.shape
        if axis is None or shape is None or axis >= len(shape):
            continue
        if shape.dims[axis] == 1:
            raise ConfigurationError(
                f"{loss.name}: the output '{prediction.name}' of shape {shape} has one class along axis {axis}, and nothing "
                "would train: choose a loss of yes or no, such as 'bce_with_logits', or of values, such as 'mse', or let the "
                "loss read another output (outputs=...)"
            )
        node = sorting_node(prediction.value, axis)
        if node is not None:
            before = _before(node)
            raise ConfigurationError(
                f"{loss.name}: {describe_node(node)} sorts the output '{prediction.name}' along axis {axis}, where the loss "
                f"reads classes, so that each place is another class for each sample: let it read what comes before "
                f"(outputs='{before}')"
            )


def objective_doubts(predictions: Iterable[Prediction], loss: losses.Loss) -> Iterator[str]:
    """Yield a sentence for each prediction that the loss may misinterpret.

    The loss applies an activation to probabilities, takes arbitrary numbers for probabilities or their logarithms, or reads
    classes along another axis than the model's.
    """
    for prediction, reading in zip(predictions, loss.readings, strict=False):
        last = _classes_last(prediction, reading, loss.name)
        if last is not None:
            yield last
        elif reading.takes is not None:
            yield from _of_another_scale(prediction.value, prediction.name, reading.takes, loss.name)
        elif prediction.bounded_by is not None:
            yield prediction.warning(loss.name)
        elif reading.activation is not None:
            yield from _of_held_logits(prediction.value, prediction.name, loss.name)


def _classes_last(prediction: Prediction, reading: Reading, loss: str) -> str | None:
    shape = prediction.value.shape
    if reading.classes_along != losses.CLASS_AXIS or shape is None or len(shape) < 3:
        return None
    said = f"the loss {loss} reads classes along axis 1 of '{prediction.name}' of shape {shape}"
    node = node_of_last_axis(prediction.value)
    if node is not None:
        return f"{said}, and {describe_node(node)} computes them along the last axis: where these are the classes, {CLASSES_LAST}"
    if prediction.has_classes_last():
        return f"{said}, which is open: where the classes lie along the last axis, {CLASSES_LAST}"
    return None


def _of_another_scale(value: ir.Value, name: str, takes: losses.Scale, loss: str) -> Iterator[str]:
    bounded, linear = bounding_node(value), open_node(value)
    bounds = "" if bounded is None else f"'{name}', which {describe_node(bounded)} bounds to [0, 1]"
    computed = "" if linear is None else f"'{name}' as {describe_node(linear)} computes it, which is any number"
    if takes == "log_probabilities" and (bounded is not None or linear is not None):
        yield (
            f"the loss {loss} takes logarithms of probabilities, and reads {bounds or computed}: choose cross_entropy, which "
            "computes them itself (with probabilities=True where the targets are such), or let it read the output of a LogSoftmax"
        )
    elif takes == "probabilities" and (softmax := _softmax_of_several(value)) is not None:
        yield (
            f"the loss {loss} takes each element for a yes or no of its own, and reads '{name}', of which "
            f"{describe_node(softmax)} makes classes share one probability: choose cross_entropy where one class is right, and "
            f"where several may be right at once bce_with_logits, which reads what comes before (outputs='{_before(softmax)}')"
        )
    elif takes == "probabilities" and linear is not None:
        yield (
            f"the loss {loss} takes probabilities, and reads {computed}; outside of [0, 1] the loss is NaN: choose "
            "bce_with_logits, which takes it so"
        )
    elif takes == "scores" and bounded is not None:
        before = _before(bounded)
        yield (
            f"the loss {loss} takes scores of any size and either sign, and reads {bounds}, so that no answer reaches the "
            f"margin: let it read what comes before (outputs='{before}'), or choose a loss that takes probabilities"
        )


def _of_held_logits(value: ir.Value, name: str, loss: str) -> Iterator[str]:
    node = bounded_logits_node(value)
    if node is not None:
        yield (
            f"the loss {loss} applies an activation to logits, which are any numbers, and reads '{name}', which "
            f"{describe_node(node)} holds within bounds, so that no answer becomes certain: let it read what comes before "
            f"(outputs='{_before(node)}'), or where these are values and not logits, choose a loss of values, such as 'mse'"
        )


def _softmax_of_several(value: ir.Value) -> ir.Node | None:
    """Return the Softmax over three or more elements whose (moved) output is the value; else None."""
    node = moved_from(value)
    if node is None or node.op_type != "Softmax" or node.inputs[0] is None or node.inputs[0].shape is None:
        return None
    extent = node.inputs[0].shape[node.attributes["axis"].as_int() if "axis" in node.attributes else -1]
    return node if isinstance(extent, int) and extent > 2 else None


def _before(node: ir.Node) -> str:
    return next((operand.name for operand in node.inputs if operand is not None and operand.name), "...")


def find_doubts(model: ir.Model, trainable: Collection[str], is_frozen: bool, takes_all: bool) -> Iterator[str]:
    """Yield a sentence for each doubt about the weights that train.

    Weights that train as one may have been several, or the other way round; batch normalization was folded into layers that
    train; scalars that may have been parameters do not train; values computed from parameters or other data train in place of
    them; layers share running statistics; parameters are missing from the model.

    Args:
        model: a canonical model.
        trainable: the weights that train.
        is_frozen: True if the user asked for normalization by fixed statistics, which is the result of folding.
        takes_all: True if the user did not select the weights that train.
    """
    if several := [f"'{name}' ({count} layers)" for name, count in perhaps_merged(model).items() if name in trainable]:
        yield (
            f"weights of one value that several layers read train as one: {_first(several)}. Where these were parameters of "
            "their own, export the model again without an optimizer of graphs that merges equal tensors, for example with "
            "torch.onnx.export(..., dynamo=True, optimize=False)"
        )
    if pairs := [f"'{name}' of '{table}'" for name, table in perhaps_copied(model).items() if {name, table} & {*trainable}]:
        yield (
            f"a weight holds the same numbers as a table that rows are taken of, and trains apart from it: {_first(pairs)}. "
            "Where the two were one parameter, export the model again so that it stays one, for example with "
            "torch.onnx.export(..., dynamo=True), or with do_constant_folding=False"
        )
    if pairs := [f"'{name}' and '{first}'" for name, first in perhaps_shared(model).items() if {name, first} & {*trainable}]:
        yield (
            f"weights of two layers hold the same numbers, and train apart: {_first(pairs)}. Where the layers share a parameter, "
            "export the model again with do_constant_folding=False, so that it stays one"
        )
    folded = [f"'{weight}'" for weight, bias in folded_layers(model).items() if {weight, bias} & {*trainable}]
    if folded and not is_frozen:
        layers = "a layer that trains" if len(folded) == 1 else f"{len(folded)} layers that train"
        yield (
            f"batch normalization was folded into {layers} when the model was exported, and is not trained: "
            f"{_first(folded)}. Export the model again with it kept (torch.onnx.export(..., dynamo=True, optimize=False); "
            "burnish export ... --no-fold), or put new layers in (burnish.surgery.insert). Where it is meant to stay fixed, say "
            "so with norm='frozen'"
        )
    if not is_frozen and (several := [f"'{name}' ({count} layers)" for name, count in shared_statistics(model).items()]):
        yield (
            "layers of batch normalization with scales or biases of their own read the same running statistics, and each updates "
            f"them in its turn: {_first(several)}. Give each layer statistics of its own, or keep them fixed with norm='frozen'"
        )
    yield from _of_notes(model, trainable, takes_all)
    if takes_all and (unknown := [repr(name) for name in of_unknown_origin(model)]):
        yield (
            "weights train of which the file does not say what they were: the exporter computed them from parameters or buffers, "
            f"or they were numbers: {_first(unknown)}. Export the model again with do_constant_folding=False, or with "
            "torch.onnx.export(..., dynamo=True, optimize=False); or say what trains (trainable=[...])"
        )
    if takes_all and (scalars := perhaps_learned_scalars(model)):
        named = _first([f"'{name}'" for name in scalars])
        yield (
            f"scalars count as constants, and these stay as they are: {named}. Where they were parameters, train them by name: "
            f"trainable=['*', '{scalars[0]}']"
        )


def mixing_doubts(predictions: Collection[ir.Value]) -> Iterator[str]:
    """Yield a sentence if predictions of one sample depend on the others of its batch.

    Args:
        predictions: the values of a canonical model that the loss reads.
    """
    graph = next((value.graph for value in predictions), None)
    mixing = [] if graph is None else mixing_nodes(graph, predictions)
    mixing = [each for each in mixing if not _is_of_normalization(each.node)]
    if mixing:
        nodes, name, axis = _first([describe_node(each.node) for each in mixing]), mixing[0].input, mixing[0].axis
        which = "the first axis" if axis == 0 else f"axis {axis}"
        yield (
            f"what the model computes of a sample depends on the others of its batch, for {which} of the input '{name}' is that "
            f"of the samples, and these nodes work along it: {nodes}. Where that is not meant, say which axis is "
            "(sample_axis=..., --sample-axis), or say it in the model (dim=..., batch_first=True, a transposition in place of a "
            "reshape), and export it again"
        )


def _is_of_normalization(node: ir.Node) -> bool:
    """True if a node only computes statistics for batch normalization, which works over all samples by design."""
    pending = list(node.outputs)
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return False
        for reader, index in value.uses():
            if reader.op_type == "BatchNormalization" and uses_the_batch(reader):
                if index not in (3, 4):
                    return False
            elif reader.domain == "" and reader.op_type in STATISTICS:
                pending.extend(reader.outputs)
            else:
                return False
    return True


def _of_notes(model: ir.Model, trainable: Collection[str], takes_all: bool) -> Iterator[str]:
    again = "export the model again with torch.onnx.export(..., dynamo=True, optimize=False)"
    computed = [
        f"'{name}' of {_first([repr(parameter) for parameter in parameters])}"
        for name, parameters in computed_ahead(model).items()
        if name in trainable
    ]
    if computed:
        yield (
            "the exporter computed weights from parameters of the module, and they train in the place of these: "
            f"{_first(computed)}. To train the parameters themselves, {again}"
        )
    if takes_all and (lost := [f"'{name}'" for name in lost_parameters(model.graph)]):
        yield (
            f"the exporter merged parameters of the module with others, or left them out, and they do not train: {_first(lost)}. "
            f"To train them, {again}"
        )


def _first(texts: Sequence[str]) -> str:
    return ", ".join(texts[:SHOWN]) + (f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else "")


def find_departures(model: ir.Model) -> Iterator[str]:
    """Yield a sentence for each reason why inference in the initial state differs from the file.

    Args:
        model: a canonical model whose weights are still initializers. A module has no file: inference is its ``eval()``.
    """
    if OF_MODULE.is_on(model.graph):
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
    yield from DEPARTURES.get(model.graph) or ()


def frozen_without_statistics(policies: Mapping[ir.Node, NormPolicy]) -> Iterator[str]:
    """Yield a sentence if layers without running statistics of their own are frozen, so that a step differs from the file."""
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
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    is_training = None if mode is None else constant_array(mode)
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    share = None if ratio is None else constant_array(ratio)
    return is_training is not None and bool(is_training.all()) and (share is None or bool(share.any()))


def _asked_mode(node: ir.Node) -> ir.Value | None:
    """Return the input that sets the mode of a dropout at run time; None if the mode is known, or nothing is dropped."""
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
