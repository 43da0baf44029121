"""Select the weights that train and the initializers that become state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from burnish.analysis.dependence import Obstacles, candidates, reasons, reasons_together, why_no_weight
from burnish.errors import ConfigurationError
from burnish.graph import FLOATING, describe_node, quantization_of
from burnish.graph.annotations import PREPARES
from burnish.graph.names import Aliases, other_names, select_named
from burnish.importer import InitializerKind, classify_initializers, untrained_scalars
from burnish.norms import Auto, Frozen, NormPolicy, Train, frozen_by_mode, layer_name, never_updated, normalizes_by_batch
from burnish.settings import check_call, matches_pattern, nearest
from burnish.validation import is_whole

HoldRows = Mapping[str, int | Iterable[int]] | None
Trainable = str | Sequence[str] | Callable[[str, np.ndarray], bool] | None


@dataclass(frozen=True)
class ModelState:
    """The initializers of a model that become state.

    Attributes:
        parameters: initializer names of the weights, trainable or not, in the model's order.
        statistics: initializer names of running statistics.
        trainable: the members of ``parameters`` that train.
        asked_for: the parameters that each name or pattern of the user selects.
        unreached: initializer names of constants that look like selected weights, but have no gradient from any output of the
            model.
        preparing: initializer names of constants that only prepare an input for the first layer, or encode positions, with their
            purpose in words.
        aliases: initializer name -> other names, if known.
    """

    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    trainable: tuple[str, ...]
    asked_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    preparing: Mapping[str, str] = field(default_factory=dict)
    aliases: Aliases = field(default_factory=dict)

    @property
    def state_names(self) -> dict[str, str]:
        """Initializer name -> state name."""
        return {name: f"param/{name}" for name in self.parameters} | {name: f"stat/{name}" for name in self.statistics}


def find_state(model: ir.Model, trainable: Trainable) -> ModelState:
    """Classify the initializers and select the ones that train.

    Args:
        model: a canonical model.
        trainable: None for every weight; names or shell-style patterns; or a predicate over (name, array) of weights. Names are
            those of the file, or of the parameters of the modules that read the initializers. They select buffers if they match
            no weight, and scalars if they match neither.

    Raises:
        ConfigurationError: a pattern matches nothing, ``trainable`` has the wrong type, or nothing is left to train.
    """
    kinds = classify_initializers(model)
    parameters = tuple(name for name, kind in kinds.items() if kind is InitializerKind.WEIGHT)
    statistics = tuple(name for name, kind in kinds.items() if kind is InitializerKind.STATISTIC)
    buffers = tuple(name for name, kind in kinds.items() if kind is InitializerKind.BUFFER)
    unreached = tuple(candidates(model.graph, kinds))
    asked_for: dict[str, tuple[str, ...]] = {}
    initializers = model.graph.initializers
    aliases = other_names(model.graph)
    if trainable is None:
        selected = parameters
    elif callable(trainable):
        check_call("trainable", trainable, "a weight's name and array", "lambda name, array: array.ndim > 1")
        selected, unreached = (
            tuple(name for name in names if trainable(name, _array(initializers[name]))) for names in (parameters, unreached)
        )
    else:
        patterns = _patterns(trainable)
        scalars = untrained_scalars(model)
        for pattern in patterns:
            matching = (select_named(pattern, names, aliases) for names in (parameters, buffers, scalars))
            asked_for[pattern] = next((names for names in matching if names), ())
            if not asked_for[pattern]:
                raise ConfigurationError(_no_match(pattern, model, parameters, statistics, aliases))
        chosen = {name for matches in asked_for.values() for name in matches}
        parameters = tuple(name for name in kinds if name in parameters or name in chosen)
        selected = tuple(name for name in parameters if name in chosen)
        unreached = tuple(name for pattern in patterns for name in select_named(pattern, unreached, aliases))
    if not parameters:
        raise ConfigurationError(f"nothing would train: {why_nothing_trains(model)}")
    if not selected:
        raise ConfigurationError(
            "nothing would train: trainable selects none of the model's weights, such as "
            f"'{parameters[0]}'; let it select some, or leave it out to train all {len(parameters)}"
        )
    preparing = {name: why for name in buffers if (why := PREPARES.get(initializers[name])) is not None}
    preparing = {name: why for name, why in preparing.items() if name not in parameters}
    return ModelState(parameters, statistics, selected, asked_for, unreached, preparing, aliases)


def hold_frozen(state: ModelState, policies: Mapping[ir.Node, NormPolicy]) -> ModelState:
    """Remove the scale and bias of layers with the policy ``frozen:all`` from the trainable weights.

    Raises:
        ConfigurationError: the user selected one of them by name, one is computed from weights that train, or nothing is left to
            train.
    """
    held: dict[str, ir.Node] = {}
    unreached = set(state.unreached)
    for node, policy in policies.items():
        if isinstance(policy, Frozen) and not policy.affine:
            for value in node.inputs[1:3]:
                held |= dict.fromkeys(_held(node, value, state.trainable), node)
                unreached -= {None if (weight := _passed_on(value)) is None else weight.name}
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
    return replace(state, trainable=trainable, unreached=tuple(name for name in state.unreached if name in unreached))


def _passed_on(value: ir.Value | None) -> ir.Value | None:
    while value is not None and (producer := value.producer()) is not None:
        if producer.domain != "" or producer.op_type not in ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"):
            break
        value = producer.inputs[0]
    return value


def settle_policies(
    policies: Mapping[ir.Node, NormPolicy], state: ModelState, frozen: Collection[str], in_loops: Iterable[ir.Node] = ()
) -> dict[ir.Node, NormPolicy]:
    """Return the policies with ``train`` or ``frozen`` in place of each ``auto``.

    If a file has some layers in training mode, the others count as frozen. A layer in training mode whose running statistics were
    never updated cannot be frozen, because it has none.

    Args:
        policies: policies of the batch normalization layers.
        state: the state of the model.
        frozen: trainable weights that the optimizer freezes.
        in_loops: batch normalization layers in loop bodies.

    Raises:
        ConfigurationError: a layer that trains is in a loop, or one of its running statistics is not an initializer, so that no
            step could update it.
    """
    trained = set(state.trainable).difference(frozen)
    everything_trains = len(trained) == len(state.parameters)
    in_loops = list(in_loops)
    held_by_mode = frozen_by_mode(node for node in policies if node not in in_loops)

    def settled(node: ir.Node) -> NormPolicy:
        if normalizes_by_batch(node) and never_updated(node) and node not in in_loops:
            return Train()
        if node in held_by_mode:
            return Frozen()
        scale_and_bias = _weights_before(node.inputs[1:3], state.parameters)
        deciding = scale_and_bias or _weights_before(node.inputs[:1], state.parameters)
        return Train() if everything_trains or trained.intersection(deciding) else Frozen()

    result = {node: settled(node) if isinstance(policy, Auto) else policy for node, policy in policies.items()}
    for node, policy in result.items():
        if not isinstance(policy, Frozen):
            _check_statistics(node, state.statistics)
    _check_frozen(in_loops, result)
    return result


def _check_frozen(layers: Iterable[ir.Node], policies: Mapping[ir.Node, NormPolicy]) -> None:
    """Check that batch normalization in loop bodies is frozen.

    Raises:
        ConfigurationError: a layer trains: the number of updates of its running statistics is unknown.
    """
    for node in layers:
        if not isinstance(policies[node], Frozen):
            raise ConfigurationError(
                f"norm: the batch normalization '{layer_name(node)}' is in the body of a loop, which normalizes any "
                "number of times in a step: no running statistics are those of inference. Freeze it, "
                f"norm={{'{layer_name(node)}': 'frozen'}}, and its scale and bias still train"
            )


def _check_statistics(node: ir.Node, statistics: Collection[str]) -> None:
    """Check that a step can update the running statistics of a layer; otherwise inference would not match training."""
    for operand, value in zip(("mean", "variance"), node.inputs[3:5], strict=True):
        origin = value
        while origin is not None and (producer := origin.producer()) is not None and producer.op_type == "Cast":
            origin = producer.inputs[0]
        if value is None or origin is None or (origin.producer() is None and origin.name in statistics):
            continue
        producer = origin.producer()
        source = "is an input of the model" if producer is None else f"is computed by {describe_node(producer)}"
        raise ConfigurationError(
            f"norm: the batch normalization '{layer_name(node)}' has a running {operand} that no step can move: "
            f"'{origin.name}' {source}, and is no initializer. Freeze the layer, norm={{'{layer_name(node)}': 'frozen'}}, "
            "or export the model with the running statistics as initializers"
        )


def _weights_before(values: Iterable[ir.Value | None], parameters: Collection[str]) -> set[str]:
    seen: set[ir.Value] = set()
    pending = [value for value in values if value is not None]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if (producer := value.producer()) is not None:
            pending.extend(operand for operand in producer.inputs if operand is not None)
    return {value.name or "" for value in seen if value.producer() is None}.intersection(parameters)


def _held(node: ir.Node, value: ir.Value | None, trainable: Collection[str]) -> list[str]:
    """Return the weight that is the scale or bias of a layer, through nodes that only pass it on."""
    value = _passed_on(value)
    if value is None:
        return []
    if value.producer() is None:
        return [name] if (name := value.name or "") in trainable else []
    computed = sorted(_weights_before([value], trainable))
    if computed:
        raise ConfigurationError(
            f"norm: the batch normalization '{layer_name(node)}' cannot be 'frozen:all': '{value.name}' is computed from the "
            f"weight '{computed[0]}'; choose 'frozen', and leave that weight out with trainable=[...]"
        )
    return []


def why_nothing_trains(model: ir.Model) -> str:
    """Return the reason why a canonical model has no weights, and the remedy."""
    kinds = classify_initializers(model)
    values = [model.graph.initializers[name] for name, kind in kinds.items() if kind is InitializerKind.CONSTANT]
    tensors = [value for value in values if value.dtype in FLOATING and value.shape is not None and len(value.shape) > 0]
    if all(len(value.shape or ()) == 1 for value in tensors):  # such as quantization scales
        for node in model.graph.all_nodes():
            if (quantized := quantization_of(node)) is not None:
                return quantized
    fitted = next((node for node in model.graph.all_nodes() if node.op_type.startswith(("TreeEnsemble", "SVM"))), None)
    if not tensors and fitted is not None:
        return (
            f"what {describe_node(fitted)} was fitted to are attributes, which no gradient moves: trees and support vector "
            "machines are not trained in steps. Fit the model again where it was made, or give one of layers"
        )
    if not tensors:
        return (
            "the model has no weights, that is floating-point initializers of one dimension or more. Give a model that holds "
            "its parameters as such, neither left out nor quantized to integers"
        )
    why = reasons([(value.name or "", why_no_weight(model.graph, value)) for value in tensors])
    return (
        f"no gradient reaches the floating-point initializers of the model ({why}). Give a model whose outputs depend on "
        "them through differentiable operators"
    )


def check_reached(state: ModelState, reached: Collection[str], graph: ir.Graph, predictions: Collection[str]) -> dict[str, str]:
    """Raise an error if the loss depends on none of the requested weights; return the reason for each weight without a gradient.

    Args:
        state: the selected state.
        reached: the parameters that a gradient reaches.
        graph: the model, with inputs ``param/<initializer>``.
        predictions: names of the values that the loss reads.

    Returns:
        Initializer name -> reason why no gradient reaches it, for selected weights.

    Raises:
        ConfigurationError: no gradient reaches any parameter, or any that one of the user's names or patterns selects.
    """
    lost = [(pattern, names) for pattern, names in state.asked_for.items() if not any(name in reached for name in names)]
    missed = [name for name in state.trainable if name not in reached]
    if not missed and not lost and not state.unreached:
        return {}
    inputs = {value.name: value for value in graph.inputs}
    values = (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs))
    read = [value for value in values if value.name in predictions]
    obstacles = Obstacles(graph, read)
    untrained = {name: obstacles.why(inputs[f"param/{name}"]) for name in missed}
    if reached and not lost:
        return {name: obstacles.why(graph.initializers[name]) for name in state.unreached} | untrained
    names = [name for _, selected in lost for name in selected] if lost else missed
    why = reasons_together({name: obstacles.why(inputs[f"param/{name}"]) for name in names})
    subject = f"trainable: '{lost[0][0]}' would not train" if lost else "nothing would train"
    names_read = " and ".join(f"'{value.name}'" for value in read)
    raise ConfigurationError(
        f"{subject}: the loss reads {names_read}, and no gradient flows from there ({why}). "
        "Train other weights (trainable), or let the loss read another output (outputs)"
    )


def _patterns(trainable: str | Sequence[str]) -> list[str]:
    patterns = [trainable] if isinstance(trainable, str) else list(trainable) if isinstance(trainable, Iterable) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigurationError(
            f"trainable must be None, names or patterns of weights, or a function of (name, array), not {trainable!r}"
        )
    return patterns


def _no_match(pattern: str, model: ir.Model, parameters: tuple[str, ...], statistics: tuple[str, ...], aliases: Aliases) -> str:
    if any(matches_pattern(name, pattern) for name in statistics):
        return (
            f"trainable: '{pattern}' names a running statistic of a batch normalization, which is updated, never trained; "
            "select its scale or bias instead"
        )
    constants = [(name, value) for name, value in model.graph.initializers.items() if matches_pattern(name, pattern)]
    if constants:
        why = reasons([(name, why_no_weight(model.graph, value)) for name, value in constants])
        return f"trainable: '{pattern}' selects only what stays as it is ({why}); `burnish inspect` lists the weights"
    if not parameters:
        return f"trainable: '{pattern}' matches no weight: {why_nothing_trains(model)}"
    hint = nearest(pattern, [each for name in parameters for each in (name, *aliases.get(name, ()))])
    return f"trainable: '{pattern}' matches no weight of the model; did you mean {hint}? `burnish inspect` lists them all"


def find_held_rows(model: ir.Model, state: ModelState, requested: HoldRows) -> dict[str, list[int]]:
    """Return the rows of axis 0 that training does not change: initializer name -> sorted, unique rows.

    Args:
        model: a canonical model, whose weights are initializers.
        state: the selected state.
        requested: the option ``hold_rows`` of ``burnish.compile``.

    Raises:
        ConfigurationError: a weight does not exist or does not train, or a row does not exist.
    """
    if requested is None:
        return {}
    if not isinstance(requested, Mapping) or not all(isinstance(name, str) for name in requested):
        raise ConfigurationError(
            f"hold_rows must be {{initializer: rows}}, such as {{'embedding.weight': [0]}}, not {requested!r}"
        )
    held = {}
    for asked, selected in requested.items():
        called = [asked] if asked in model.graph.initializers else [name for name, each in state.aliases.items() if asked in each]
        name = called[0] if len(called) == 1 else asked
        if name not in state.trainable:
            raise ConfigurationError(f"hold_rows: {_why_not_held(name, model, state)}")
        rows = list(selected) if isinstance(selected, Iterable) and not isinstance(selected, str) else [selected]
        if not all(map(is_whole, rows)):
            raise ConfigurationError(f"hold_rows: the rows of '{name}' must be integers, such as [0], not {selected!r}")
        shape = model.graph.initializers[name].shape
        assert shape is not None
        count = shape.numpy()[0]
        beyond = next((row for row in rows if not 0 <= row < count), None)
        if beyond is not None:
            raise ConfigurationError(
                f"hold_rows: '{name}' has no row {beyond}: it has shape {list(shape.numpy())}, with the rows 0 to {count - 1}"
            )
        if rows:
            held[name] = sorted({int(row) for row in rows})
    return held


def _why_not_held(name: str, model: ir.Model, state: ModelState) -> str:
    if name in state.parameters:
        return f"'{name}' does not train, as trainable or the policy of its normalization says: it stays as a whole; leave it out"
    if name in state.statistics:
        return f"'{name}' is a running statistic, which no optimizer updates: leave it out"
    value = model.graph.initializers.get(name)
    if value is not None:
        return f"'{name}' does not train: {why_no_weight(model.graph, value)}; leave it out"
    return f"'{name}' is no weight of the model; did you mean {nearest(name, state.trainable)}? `burnish inspect` lists them all"


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
