"""Whether what a loss reads of a model is what it is made for: what is perhaps not meant, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from burnish import losses
from burnish.compiler.predictions import Prediction, sorting_node
from burnish.compiler.probabilities import bounded_logits_node, bounding_node, moved_from, node_of_last_axis, open_node
from burnish.errors import ConfigurationError
from burnish.graph import describe_node
from burnish.losses import Reading

CLASSES_LAST = "say so with loss='cross_entropy:class_axis=-1'"


def check_classes(predictions: Iterable[Prediction], loss: losses.Loss) -> None:
    """Check that a loss over classes reads what can be classes.

    Raises:
        ConfigurationError: there is one class, whose probability is 1, whatever the model computes; or the model sorts them, so
            that the first is another class for each sample.
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
    """Give a sentence for each prediction of which the loss perhaps makes something else than was meant.

    It applies an activation to probabilities, takes numbers of any size for probabilities or their logarithms, or reads
    classes along another axis than that on which the model has them.
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
    """Say that classes lie along the last axis, where the loss reads them along axis 1 of three or more."""
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
    """Say that a value is on another scale than a loss that applies no activation takes it to be."""
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
    """Say that logits are held within bounds, so that no class or answer can become certain."""
    node = bounded_logits_node(value)
    if node is not None:
        yield (
            f"the loss {loss} applies an activation to logits, which are any numbers, and reads '{name}', which "
            f"{describe_node(node)} holds within bounds, so that no answer becomes certain: let it read what comes before "
            f"(outputs='{_before(node)}'), or where these are values and not logits, choose a loss of values, such as 'mse'"
        )


def _softmax_of_several(value: ir.Value) -> ir.Node | None:
    """Return the Softmax along an axis of three elements or more that a value is the moved output of; else None."""
    node = moved_from(value)
    if node is None or node.op_type != "Softmax" or node.inputs[0] is None or node.inputs[0].shape is None:
        return None
    extent = node.inputs[0].shape[node.attributes["axis"].as_int() if "axis" in node.attributes else -1]
    return node if isinstance(extent, int) and extent > 2 else None


def _before(node: ir.Node) -> str:
    """The name of the first operand of a node that has one."""
    return next((operand.name for operand in node.inputs if operand is not None and operand.name), "...")
