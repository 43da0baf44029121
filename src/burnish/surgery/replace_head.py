"""Replacement of a classifier's head, to train a pretrained model on other classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from burnish.errors import ConfigurationError
from burnish.graph import (
    FLOATING,
    Builder,
    attribute_value,
    constant_array,
    describe_node,
    infer_outputs,
    output_axis,
    remove_node,
)
from burnish.graph.constants import initial_array, set_initializer
from burnish.importer import Source, load
from burnish.importer.classical.outputs import number_zip_maps
from burnish.random import check_seed
from burnish.settings import suggestion
from burnish.validation import is_whole

BEHIND_HEADS = frozenset(
    {
        *("Softmax", "LogSoftmax", "Sigmoid", "HardSigmoid", "Identity", "Cast", "Flatten", "Reshape", "Squeeze", "Unsqueeze"),
        *("Resize", "Relu", "Dropout", "GlobalAveragePool", "ReduceMean", "AveragePool", "Clip", "ArgMax"),
    }
)
"""Operators that may come between a head and the output."""


@dataclass(frozen=True)
class Head:
    """The last linear layer of a classifier.

    Attributes:
        node: the product: ``Gemm``, ``MatMul`` or ``Conv``.
        weight: its initializer.
        class_axis: axis of the classes in the weight.
        bias: initializer added to the product, or None.
        output: name of the head's model output.
    """

    node: ir.Node
    weight: ir.Value
    class_axis: int
    bias: ir.Value | None
    output: str

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(initial_array(self.weight).shape[self.class_axis])

    @property
    def names(self) -> dict[str, str]:
        """Initializer names, by ``weight`` and, if there is one, ``bias``."""
        values = {"weight": self.weight, "bias": self.bias}
        return {role: value.name or "" for role, value in values.items() if value is not None}

    @property
    def initializers(self) -> tuple[str, ...]:
        """Names of weight and bias."""
        return tuple(value.name or "" for value in (self.weight, self.bias) if value is not None)


def replace_head(source: Source, classes: int, output: str | None = None, seed: int = 0) -> ir.Model:
    """Return a model with a new, randomly initialized head for another number of classes.

    The head is the last ``Gemm``, ``MatMul`` (with its ``Add``) or 1 x 1 ``Conv`` before the output; softmax, sigmoid, pooling
    and reshapes may follow. With f inputs per class, weight and bias are uniform in ``±1/√f``, as in ``torch.nn.Linear``. Names
    and other weights are unchanged.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        classes: new number of classes.
        output: the head's model output; None if it is the only one.
        seed: seed of the new weights.

    Returns:
        A canonical model.

    Raises:
        ConfigurationError: no head is found, its weights have other readers, or an argument is invalid.
        ModelError: invalid ONNX model.
    """
    if not is_whole(classes) or classes < 1:
        raise ConfigurationError(f"replace_head: classes={classes!r}: give a whole number of 1 or more")
    check_seed(seed)
    model = load(source)
    settle_biases(model)
    model = with_a_score_for_each_class(model, output)
    head = find_head(model, output)
    old, weight = head.classes, initial_array(head.weight)
    inputs = math.prod(weight.shape) // old
    shape = [classes if axis == head.class_axis else extent for axis, extent in enumerate(weight.shape)]
    generator, limit = np.random.default_rng(seed), 1 / math.sqrt(inputs)
    set_initializer(head.weight, generator.uniform(-limit, limit, shape))
    if head.bias is not None:
        own = [classes if extent == old else extent for extent in initial_array(head.bias).shape]
        set_initializer(head.bias, generator.uniform(-limit, limit, own))
    _settle_shapes(model, head, old, classes)
    number_zip_maps(model, head.output, classes)
    return model


def settle_biases(model: ir.Model) -> None:
    """Remove, in place, Reshapes between a one-element bias and its Add, which some exporters write."""
    for node in [*model.graph]:
        if node.op_type != "Add" or node.domain != "":
            continue
        for index, value in enumerate(node.inputs):
            reshape = None if value is None else value.producer()
            bias = reshape.inputs[0] if reshape is not None and reshape.op_type == "Reshape" else None
            if bias is not None and bias.is_initializer() and bias.shape is not None and bias.shape.dims == (1,):
                node.replace_input_with(index, bias)
                assert reshape is not None
                if not reshape.outputs[0].uses() and not reshape.outputs[0].is_graph_output():
                    remove_node(reshape)


def with_a_score_for_each_class(model: ir.Model, output: str | None = None) -> ir.Model:
    """Return a binary classifier with a single score as one with a score per class; other models unchanged.

    Classical toolkits write ``Sigmoid(Concat(-z, z))``, ``Concat(1 - p, p)`` with ``p = Sigmoid(z)``, and ``Concat(1 - z, z)``.
    The first two become the equal ``Softmax`` of scores ``(0, z)``, and the last the scores ``(1 - z, z)``.

    Args:
        model: a canonical model; not changed.
        output: output with the classes; None for all outputs.
    """

    def pairs(of: ir.Model) -> list[_Pair]:
        values = [value for value in of.graph.outputs if output in (None, value.name) and value.dtype in FLOATING]
        return [pair for value in values if (pair := _pair_before(value)) is not None]

    if not pairs(model):
        return model
    model = model.clone()
    for pair in pairs(model):
        _spell_out(model.graph, pair)
    RemoveUnusedNodesPass()(model)
    return model


def _spell_out(graph: ir.Graph, pair: _Pair) -> None:
    weight, scores = pair.layer.inputs[1], pair.score
    assert weight is not None
    for tensor, axis, one in ((weight, output_axis(pair.layer), 0.0), (pair.bias, -1, 1.0)):
        if tensor is not None:
            own = initial_array(tensor)
            own = own.reshape(1) if own.ndim == 0 else own
            other = np.zeros_like(own) if pair.is_logistic else (one - own).astype(own.dtype)
            set_initializer(tensor, np.concatenate([other, own] if pair.second_is_score else [own, other], axis=axis))
    if pair.bias is None and not pair.is_logistic:
        raise ConfigurationError(f"replace_head: {describe_node(pair.layer)} has no bias, which the second class of it needs")
    for node in (pair.layer, *pair.between):
        for value in node.outputs:
            value.shape = None
        infer_outputs(node, dict(graph.opset_imports))
    for reader in [reader for reader, _ in scores.uses() if reader.op_type == "Reshape"]:
        if (index := _index_of(reader)) is not None:
            builder = Builder(graph, before=reader)
            _put(graph, index, builder.op("ArgMax", builder.tensor(scores), axis=1, keepdims=0).value)
    last = pair.activation or pair.joined
    result = scores
    if pair.is_logistic:
        builder = Builder(graph, before=last)
        result = builder.op("Softmax", builder.tensor(scores), axis=1).value
    _put(graph, last.outputs[0], result)


def _put(graph: ir.Graph, earlier: ir.Value, value: ir.Value) -> None:
    is_output = earlier.is_graph_output()
    if is_output and value.is_graph_output():
        builder = Builder(graph)
        value = builder.op("Identity", builder.tensor(value)).value
    earlier.replace_all_uses_with(value, replace_graph_outputs=True)
    if is_output:
        value.name, earlier.name = earlier.name, f"{earlier.name}:before"
        value.shape, value.type = earlier.shape, earlier.type


@dataclass(frozen=True)
class _Pair:
    """Two classes with a single score.

    Attributes:
        layer, bias: the linear layer, and the addend of its result.
        score: the value before complement and sigmoid.
        between: nodes from the layer to the score.
        joined: the Concat.
        activation: the sigmoid after it, or None.
        is_logistic: True if the classes are probabilities.
        second_is_score: True if the score is that of the second class.
    """

    layer: ir.Node
    bias: ir.Value | None
    score: ir.Value
    between: tuple[ir.Node, ...]
    joined: ir.Node
    activation: ir.Node | None
    is_logistic: bool
    second_is_score: bool


def _pair_before(value: ir.Value) -> _Pair | None:
    activation: ir.Node | None = None
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in ("Identity", "Sigmoid"):
        if node.op_type == "Sigmoid" and activation is not None:
            return None
        activation = node if node.op_type == "Sigmoid" else activation
        read = node.inputs[0]
        node = None if read is None else read.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2 or attribute_value(node, "axis", None) not in (1, -1):
        return None
    for one, other, second in ((node.inputs[0], node.inputs[1], True), (node.inputs[1], node.inputs[0], False)):
        if one is None or other is None:
            continue
        kind = _complement(one, other)
        score: ir.Value | None = other
        is_logistic = kind == "negated" and activation is not None
        if kind == "rest" and activation is None:
            sigmoid = other.producer()
            is_logistic = sigmoid is not None and sigmoid.op_type == "Sigmoid"
            score = sigmoid.inputs[0] if is_logistic and sigmoid is not None else other
        elif not is_logistic:
            continue
        found = None if score is None else _layer_of(score)
        if found is not None and score is not None:
            layer, bias, between = found
            return _Pair(layer, bias, score, between, node, activation, is_logistic, second)
    return None


def _complement(one: ir.Value, other: ir.Value) -> str | None:
    """Return ``negated`` if a value is minus the other, ``rest`` if it is 1 minus the other, else None."""
    node = one.producer()
    if node is None:
        return None
    if node.op_type == "Neg" and node.inputs[0] is other:
        return "negated"
    constants = [None if value is None else constant_array(value) for value in node.inputs]
    if node.op_type == "Sub" and node.inputs[1] is other and _is_number(constants[0], 1.0):
        return "rest"
    if node.op_type == "Mul" and other in node.inputs and any(_is_number(array, -1.0) for array in constants):
        return "negated"
    return None


def _is_number(array: np.ndarray | None, number: float) -> bool:
    return array is not None and array.size == 1 and float(array.reshape(-1)[0]) == number


def _layer_of(score: ir.Value) -> tuple[ir.Node, ir.Value | None, tuple[ir.Node, ...]] | None:
    node, bias = score.producer(), None
    between: tuple[ir.Node, ...] = ()
    if node is not None and node.op_type == "Add" and (pair := _added(node)) is not None:
        bias, between, node = pair[1], (node,), pair[0].producer()
    head = None if node is None else _head(node, bias, "")
    if head is None or head.node.op_type == "Conv" or head.classes != 1 or head.weight is not head.node.inputs[1]:
        return None
    return head.node, head.bias, between


def _index_of(reshape: ir.Node) -> ir.Value | None:
    """Return the class index that is computed as score > 0."""
    above = next((reader for reader, _ in reshape.outputs[0].uses() if reader.op_type == "Greater"), None)
    cast = None if above is None else next((reader for reader, _ in above.outputs[0].uses() if reader.op_type == "Cast"), None)
    return None if cast is None else cast.outputs[0]


def find_head(model: ir.Model, output: str | None = None) -> Head:
    """Return the head of a canonical model.

    Raises:
        ConfigurationError: no head is found, or its weights have other readers.
    """
    outputs = {value.name or "": value for value in model.graph.outputs}
    if output is not None and output not in outputs:
        raise ConfigurationError(f"replace_head: the model has no output '{output}'{suggestion(output, outputs)}")
    if output is None and len(outputs) > 1:
        raise ConfigurationError(
            f"replace_head: the model has the outputs {', '.join(map(repr, outputs))}: say which one the head is for, with "
            "output="
        )
    name = output or next(iter(outputs))
    value: ir.Value | None = outputs[name]
    bias: ir.Value | None = None
    while value is not None:
        node = value.producer()
        if node is None:
            break
        if node.op_type == "Add" and bias is None and (pair := _added(node)) is not None:
            value, bias = pair
        elif (head := _head(node, bias, name)) is not None:
            return head
        elif node.domain == "" and node.op_type in BEHIND_HEADS:
            value = node.inputs[0]
        elif node.op_type == "DequantizeLinear":
            raise ConfigurationError(
                f"replace_head: before the output '{name}' stands {describe_node(node)}: the model is quantized already. Give "
                "the model in float32 that it was made from; burnish finetune --quantize makes integers of what it tunes"
            )
        else:
            raise ConfigurationError(
                f"replace_head: before the output '{name}' stands {describe_node(node)}, and no Gemm, MatMul or 1 x 1 Conv with "
                "weights of its own: cut the model before it (burnish.surgery.truncate) and append a head of your own "
                "(burnish.surgery.append)"
            )
    raise ConfigurationError(f"replace_head: nothing before the output '{name}' has weights: give the output of a classifier")


def _added(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    first, second = node.inputs
    if first is None or second is None:
        return None
    if second.is_initializer() and not first.is_initializer():
        return first, second
    return (second, first) if first.is_initializer() and not second.is_initializer() else None


def _head(node: ir.Node, added: ir.Value | None, output: str) -> Head | None:
    """Return the head at a node with the addend of its result; None if it is not a linear layer with its own weights."""
    if node.domain != "" or node.op_type not in ("Gemm", "MatMul", "Conv"):
        return None
    turn = _turn_of(node)
    weight = node.inputs[1] if turn is None else turn.inputs[0]
    if weight is None or not weight.is_initializer() or weight.const_value is None:
        return None
    shape = initial_array(weight).shape
    own = node.inputs[2] if len(node.inputs) > 2 else None
    if node.op_type == "Conv":
        if len(shape) < 3 or math.prod(shape[2:]) != 1 or attribute_value(node, "group", 1) != 1:
            return None
    elif len(shape) != 2:
        return None
    axis = output_axis(node) if turn is None else 1 - output_axis(node)
    bias = own if own is not None else added
    for value in (weight, bias):
        if value is None:
            continue
        if not value.is_initializer() or value.const_value is None or value.dtype not in FLOATING:
            raise ConfigurationError(
                f"replace_head: {describe_node(node)} reads '{value.name}', which is no floating-point initializer: a quantized "
                "or computed head cannot be re-initialized. Give the model before it was quantized"
            )
        readers = {reader for reader, _ in value.uses()}
        if len(readers) > 1 or value.is_graph_output():
            other = next((reader for reader in readers if reader is not node and reader.op_type != "Add"), None)
            reader = "the model gives it out" if other is None else f"{describe_node(other)} reads it too"
            raise ConfigurationError(
                f"replace_head: '{value.name}' is not the head's alone: {reader}, and would meet another number of classes"
            )
    return Head(node, weight, axis, bias, output)


def _turn_of(node: ir.Node) -> ir.Node | None:
    """Return the Transpose between a weight and its product, which some exporters write."""
    turn = None if node.op_type == "Conv" or node.inputs[1] is None else node.inputs[1].producer()
    if turn is None or turn.domain != "" or turn.op_type != "Transpose" or len(turn.outputs[0].uses()) != 1:
        return None
    return turn if attribute_value(turn, "perm", None) in (None, [1, 0], (1, 0)) else None


def _settle_shapes(model: ir.Model, head: Head, old: int, classes: int) -> None:
    graph = model.graph
    before = {value: value.shape for value in graph.outputs}
    if (turn := _turn_of(head.node)) is not None:
        turn.outputs[0].shape = None
        infer_outputs(turn, dict(graph.opset_imports))
    order = list(graph)
    behind = {head.node}
    for node in order[order.index(head.node) :]:
        if node is not head.node and not any(value is not None and value.producer() in behind for value in node.inputs):
            continue
        behind.add(node)
        _settle_extents(node, old, classes)
        _number_classes(node, old, classes)
        for value in node.outputs:
            value.shape = None
        infer_outputs(node, dict(graph.opset_imports))
    for value, shape in before.items():
        is_as_before = value.shape is not None and value.shape == shape and old in value.shape.dims
        if value.producer() in behind and is_as_before and classes != old:
            raise ConfigurationError(
                f"replace_head: the output '{value.name}' would still have {old} classes behind the new head: cut the model "
                "at the head (burnish.surgery.truncate)"
            )


def _settle_extents(node: ir.Node, old: int, classes: int) -> None:
    place = {"Reshape": 1, "Resize": 3}.get(node.op_type, len(node.inputs))
    extents = constant_array(node.inputs[place]) if place < len(node.inputs) else None
    if extents is None or node.graph is None:
        return
    counts = extents == old
    if node.op_type == "Resize":  # only axis 1 has the classes
        counts &= np.asarray(attribute_value(node, "axes", range(len(extents)))) == 1
    if counts.any():
        assert isinstance(node.graph, ir.Graph)
        settled = np.where(counts, classes, extents).astype(extents.dtype)
        node.replace_input_with(place, Builder(node.graph, before=node).constant(settled).value)


def _number_classes(node: ir.Node, old: int, classes: int) -> None:
    """Number the class labels 0, 1, 2 and so on in a table after the head, as classical toolkits write it.

    Raises:
        ConfigurationError: the labels are text.
    """
    table = node.inputs[0] if node.op_type == "Gather" and node.domain == "" else None
    labels = None if table is None else constant_array(table)
    if labels is None or labels.size != old or labels.shape[-1:] != (old,) or node.graph is None:
        return
    if labels.dtype.kind not in "iu":
        raise ConfigurationError(
            f"replace_head: {describe_node(node)} returns the file's own classes as text, such as '{labels[0]}': cut the model "
            "at the head (burnish.surgery.truncate)"
        )
    assert isinstance(node.graph, ir.Graph)
    numbers = np.arange(classes, dtype=labels.dtype).reshape(*labels.shape[:-1], classes)
    node.replace_input_with(0, Builder(node.graph, before=node).constant(numbers).value)
