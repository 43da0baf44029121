"""What of a model trains, what the loss reads, and the model's weights turned into explicit state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import FLOATING
from burnish.importer import InitializerKind, classify_initializers
from burnish.losses import Activation, Reading
from burnish.norm_policies import Frozen, NormPolicy, layer_name
from burnish.program.dependence import reasons, why_no_gradient, why_no_weight
from burnish.program.weights import Weights
from burnish.settings import matches_pattern, nearest

Trainable = str | Sequence[str] | Callable[[str, np.ndarray], bool] | None


@dataclass(frozen=True)
class ModelState:
    """The initializers of a model that become state.

    Attributes:
        parameters: initializer names of the weights, trainable or not, in the model's order.
        statistics: initializer names of running statistics.
        trainable: those of ``parameters`` that are trained.
        asked_for: for each name or pattern that the user gave, the parameters that it selects.
    """

    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    trainable: tuple[str, ...]
    asked_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def state_names(self) -> dict[str, str]:
        """Initializer name -> state name."""
        return {name: f"param/{name}" for name in self.parameters} | {name: f"stat/{name}" for name in self.statistics}


def find_state(model: ir.Model, trainable: Trainable) -> ModelState:
    """Classify the initializers and select those that train.

    Args:
        model: a canonical model.
        trainable: None for every weight; names or shell-style patterns; or a predicate over (name, array).

    Raises:
        ConfigurationError: a pattern that matches no weight, a ``trainable`` of another kind, or nothing to train.
    """
    kinds = classify_initializers(model)
    parameters = tuple(name for name, kind in kinds.items() if kind is InitializerKind.WEIGHT)
    statistics = tuple(name for name, kind in kinds.items() if kind is InitializerKind.STATISTIC)
    asked_for: dict[str, tuple[str, ...]] = {}
    if trainable is None:
        selected = parameters
    elif callable(trainable):
        _check_predicate(trainable)
        initializers = model.graph.initializers
        selected = tuple(name for name in parameters if trainable(name, _array(initializers[name])))
    else:
        patterns = _patterns(trainable)
        asked_for = {pattern: tuple(name for name in parameters if matches_pattern(name, pattern)) for pattern in patterns}
        for pattern, matches in asked_for.items():
            if not matches:
                raise ConfigurationError(_no_match(pattern, model, parameters, statistics))
        chosen = {name for matches in asked_for.values() for name in matches}
        selected = tuple(name for name in parameters if name in chosen)
    if not parameters:
        raise ConfigurationError(f"nothing would train: {why_nothing_trains(model)}")
    if not selected:
        raise ConfigurationError(
            "nothing would train: trainable selects none of the model's weights, such as "
            f"'{parameters[0]}'; let it select some, or leave it out to train all {len(parameters)}"
        )
    return ModelState(parameters, statistics, selected, asked_for)


def hold_frozen(state: ModelState, policies: Mapping[ir.Node, NormPolicy]) -> ModelState:
    """Take scale and bias of layers that are frozen as a whole (``frozen:all``) out of what trains.

    Raises:
        ConfigurationError: the user asked for one of them by name, one of them is computed from weights that train, or nothing
            is left to train.
    """
    held: dict[str, ir.Node] = {}
    for node, policy in policies.items():
        if isinstance(policy, Frozen) and not policy.affine:
            for value in node.inputs[1:3]:
                held |= dict.fromkeys(_held(node, value, state.trainable), node)
    for pattern, names in state.asked_for.items():
        if names and all(name in held for name in names):
            layer = layer_name(held[names[0]])
            raise ConfigurationError(
                f"trainable: '{pattern}' would not train: '{names[0]}' belongs to the batch normalization '{layer}', which is "
                f"'frozen:all'; let its scale and bias train with norm={{'{layer}': 'frozen'}}, or leave '{pattern}' out"
            )
    trainable = tuple(name for name in state.trainable if name not in held)
    if not trainable:
        raise ConfigurationError(
            "nothing would train: everything that trainable selects belongs to batch normalization that is 'frozen:all'; "
            "let other weights train, or choose norm='frozen'"
        )
    return replace(state, trainable=trainable)


def _held(node: ir.Node, value: ir.Value | None, trainable: Collection[str]) -> list[str]:
    """Return the weight that the scale or bias of a layer is, through nodes that only pass it on."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.domain != "" or producer.op_type not in ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"):
            break
        value = producer.inputs[0]
    if value is None:
        return []
    if value.producer() is None:
        return [name] if (name := value.name or "") in trainable else []
    sources, pending = set(), [value]
    while pending:
        current = pending.pop()
        producer = current.producer()
        if producer is None:
            sources.add(current.name or "")
        else:
            pending.extend(operand for operand in producer.inputs if operand is not None)
    computed = sorted(sources.intersection(trainable))
    if computed:
        raise ConfigurationError(
            f"norm: the batch normalization '{layer_name(node)}' cannot be 'frozen:all': '{value.name}' is computed from the "
            f"weight '{computed[0]}'; choose 'frozen', and leave that weight out with trainable=[...]"
        )
    return []


def why_nothing_trains(model: ir.Model) -> str:
    """Return why a canonical model has no weights, and what to do."""
    kinds = classify_initializers(model)
    values = [model.graph.initializers[name] for name, kind in kinds.items() if kind is InitializerKind.CONSTANT]
    tensors = [value for value in values if value.dtype in FLOATING and value.shape is not None and len(value.shape) > 0]
    if not tensors:
        return (
            "the model has no weights, that is floating-point initializers of one dimension or more. Give a model that holds "
            "its parameters as such, neither left out nor quantized to integers"
        )
    found = reasons([(value.name or "", why_no_weight(model.graph, value)) for value in tensors])
    return (
        f"no gradient reaches the floating-point initializers of the model ({found}). Give a model whose outputs depend on "
        "them through differentiable operators"
    )


def check_reached(state: ModelState, reached: Collection[str], graph: ir.Graph, predictions: Collection[str]) -> None:
    """Refuse to train what the loss does not depend on.

    Args:
        state: what was to train.
        reached: the parameters that a gradient reaches.
        graph: the model, whose inputs are ``param/<initializer>``.
        predictions: names of the values that the loss reads.

    Raises:
        ConfigurationError: no gradient reaches any parameter, or any that one of the user's names or patterns selects.
    """
    lost = [(pattern, names) for pattern, names in state.asked_for.items() if not any(name in reached for name in names)]
    if reached and not lost:
        return
    names = [name for _, selected in lost for name in selected] if lost else list(state.trainable)
    inputs = {value.name: value for value in graph.inputs}
    values = (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs))
    read = [value for value in values if value.name in predictions]
    found = reasons([(name, why_no_gradient(graph, inputs[f"param/{name}"], read)) for name in names])
    subject = f"trainable: '{lost[0][0]}' would not train" if lost else "nothing would train"
    names_read = " and ".join(f"'{value.name}'" for value in read)
    raise ConfigurationError(
        f"{subject}: the loss reads {names_read}, and no gradient flows from there ({found}). "
        "Train other weights (trainable), or let the loss read another output (outputs)"
    )


def _check_predicate(predicate: Callable[[str, np.ndarray], bool]) -> None:
    try:
        inspect.signature(predicate).bind("name", "array")
    except TypeError as error:
        raise ConfigurationError(
            f"trainable: the function {predicate!r} cannot be called with a weight's name and array ({error}): "
            "give a function of these two, such as lambda name, array: array.ndim > 1"
        ) from error
    except ValueError:  # a function of an extension module may have no signature to look at
        return


def _patterns(trainable: str | Sequence[str]) -> list[str]:
    patterns = [trainable] if isinstance(trainable, str) else list(trainable) if isinstance(trainable, Iterable) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigurationError(
            f"trainable must be None, names or patterns of weights, or a function of (name, array), not {trainable!r}"
        )
    return patterns


def _no_match(pattern: str, model: ir.Model, parameters: tuple[str, ...], statistics: tuple[str, ...]) -> str:
    if any(matches_pattern(name, pattern) for name in statistics):
        return (
            f"trainable: '{pattern}' names a running statistic of a batch normalization, which is updated, never trained; "
            "select its scale or bias instead"
        )
    constants = [(name, value) for name, value in model.graph.initializers.items() if matches_pattern(name, pattern)]
    if constants:
        found = reasons([(name, why_no_weight(model.graph, value)) for name, value in constants])
        return f"trainable: '{pattern}' selects only what stays as it is ({found}); `burnish inspect` lists the weights"
    if not parameters:
        return f"trainable: '{pattern}' matches no weight: {why_nothing_trains(model)}"
    hint = nearest(pattern, parameters)
    return f"trainable: '{pattern}' matches no weight of the model; did you mean {hint}? `burnish inspect` lists them all"


def find_predictions(
    model: ir.Model, chosen: str | Sequence[str] | None, readings: Sequence[Reading], loss: str
) -> tuple[ir.Value, ...]:
    """Return the values the loss reads, one per reading.

    Args:
        model: a canonical model.
        chosen: the output, or the outputs in order, for the readings that name none; None where there is no choice.
        readings: what the loss reads; a final activation that it applies itself is stepped over.
        loss: its name.

    Raises:
        ConfigurationError: no such output, several to choose from, or not as many as the loss reads.
    """
    outputs = {value.name or "": value for value in model.graph.outputs}
    known = ", ".join(f"'{name}'" for name in outputs)
    count = max((reading.position + 1 for reading in readings if reading.output is None), default=0)
    names = _chosen_outputs(chosen, count, list(outputs), loss)
    found = []
    for reading in readings:
        name = names[reading.position] if reading.output is None else reading.output
        if name not in outputs:
            option = "outputs" if reading.output is None else f"loss {loss}"
            raise ConfigurationError(f"{option}: the model has no output '{name}'; it has {known}")
        found.append(outputs[name] if reading.activation is None else _before(outputs[name], reading.activation))
    return tuple(found)


def _chosen_outputs(chosen: str | Sequence[str] | None, count: int, outputs: Sequence[str], loss: str) -> list[str]:
    """Return ``count`` names: those chosen, or all outputs of a model that has as many."""
    known = ", ".join(f"'{name}'" for name in outputs)
    if chosen is None:
        if len(outputs) == count or count == 0:
            return list(outputs[:count])
        which = "which one the loss reads" if count == 1 else f"which {count} the loss {loss} reads, in order,"
        raise ConfigurationError(f"the model has the outputs {known}: say {which} with the option outputs")
    names = [chosen] if isinstance(chosen, str) else list(chosen) if isinstance(chosen, Iterable) else [chosen]
    if count == 1 and (len(names) != 1 or not isinstance(names[0], str)):
        raise ConfigurationError(
            f"outputs is the name of the one output that the loss reads, not {chosen!r}; the model has {known}"
        )
    if count == 0:
        raise ConfigurationError(f"outputs: the loss {loss} says itself which outputs it reads; leave outputs out")
    if len(names) != count or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"outputs: the loss {loss} reads {count} outputs, in order: give as many names, not {chosen!r}; the model has {known}"
        )
    return names


def _before(value: ir.Value, activation: Activation) -> ir.Value:
    """Return what a value was before a final activation, or the value itself where there is none."""
    behind = value
    while (producer := behind.producer()) is not None and producer.op_type == "Identity":
        behind = producer.inputs[0] or behind
    producer = behind.producer()
    if producer is None or producer.op_type not in activation.operators or producer.domain != "":
        return value
    source = producer.inputs[0]
    if source is None or activation.axis is None:
        return source or value
    attribute = producer.attributes.get("axis")
    axis = -1 if attribute is None else int(attribute.value)
    rank = None if behind.shape is None else len(behind.shape)
    is_same_axis = axis == activation.axis or (rank is not None and axis + rank == activation.axis)
    return source if is_same_axis else value


def lift_state(model: ir.Model, state: ModelState) -> Weights:
    """Turn the initializers of ``state`` into graph inputs named ``param/...`` and ``stat/...``, in place.

    Returns:
        Their arrays, by state name.
    """
    graph = model.graph
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, state_name in state.state_names.items():
        value = graph.initializers[name]
        assert value.const_value is not None
        tensors[state_name] = value.const_value
        if value.is_graph_output():
            raise ConfigurationError(f"the initializer '{name}' is an output of the model; remove that output to train it")
        if any(other.name == state_name for other in graph.inputs):
            raise ConfigurationError(
                f"the model has an input '{state_name}', a name the program needs for its state: rename that input"
            )
        array = _array(value)
        replacement = ir.Value(
            name=state_name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape)
        )
        value.replace_all_uses_with(replacement)
        del graph.initializers[name]
        graph.inputs.append(replacement)
    return Weights(tensors)


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
