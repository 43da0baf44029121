"""What of a model trains, what the loss reads, and the model's weights turned into explicit state."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.importer import InitializerKind, classify_initializers

Trainable = str | Sequence[str] | Callable[[str, np.ndarray], bool] | None


@dataclass(frozen=True)
class ModelState:
    """The initializers of a model that become state.

    Attributes:
        parameters: initializer names of the weights, trainable or not, in the model's order.
        statistics: initializer names of running statistics.
        trainable: those of ``parameters`` that are trained.
    """

    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    trainable: tuple[str, ...]

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
        ConfigurationError: a pattern that matches no weight, or nothing left to train.
    """
    kinds = classify_initializers(model)
    parameters = tuple(name for name, kind in kinds.items() if kind is InitializerKind.WEIGHT)
    statistics = tuple(name for name, kind in kinds.items() if kind is InitializerKind.STATISTIC)
    selected = _select(model, parameters, statistics, trainable)
    if not selected:
        raise ConfigurationError(
            "nothing would train: the model has no floating-point initializer that is a weight"
            if not parameters
            else "nothing would train: trainable=... selects none of the model's weights"
        )
    return ModelState(parameters, statistics, selected)


def _select(model: ir.Model, parameters: tuple[str, ...], statistics: tuple[str, ...], trainable: Trainable) -> tuple[str, ...]:
    if trainable is None:
        return parameters
    if callable(trainable):
        initializers = model.graph.initializers
        return tuple(name for name in parameters if trainable(name, _array(initializers[name])))
    patterns = [trainable] if isinstance(trainable, str) else list(trainable)
    chosen: set[str] = set()
    for pattern in patterns:
        matches = [name for name in parameters if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            raise ConfigurationError(_no_match(pattern, parameters, statistics))
        chosen.update(matches)
    return tuple(name for name in parameters if name in chosen)


def _no_match(pattern: str, parameters: tuple[str, ...], statistics: tuple[str, ...]) -> str:
    if any(name == pattern or fnmatchcase(name, pattern) for name in statistics):
        return (
            f"trainable: '{pattern}' names a running statistic of a batch normalization, which is updated, never trained; "
            "select its scale or bias instead"
        )
    close = difflib.get_close_matches(pattern, parameters, n=3, cutoff=0.4) or list(parameters[:3])
    hint = ", ".join(f"'{name}'" for name in close)
    return f"trainable: '{pattern}' matches no weight of the model; did you mean {hint}? `burnish inspect` lists them all"


def find_prediction(model: ir.Model, output: str | None, reads_logits: bool) -> ir.Value:
    """Return the value the loss reads.

    Args:
        model: a canonical model.
        output: the name of an output; None for the only one.
        reads_logits: whether the loss applies a softmax itself; then a final Softmax or LogSoftmax is stepped over.

    Raises:
        ConfigurationError: no such output, or several to choose from.
    """
    outputs = {value.name or "": value for value in model.graph.outputs}
    known = ", ".join(f"'{name}'" for name in outputs)
    if output is None:
        if len(outputs) != 1:
            raise ConfigurationError(f"the model has the outputs {known}: say which one the loss reads with outputs=...")
        output = next(iter(outputs))
    if output not in outputs:
        raise ConfigurationError(f"outputs: the model has no output '{output}'; it has {known}")
    return _logits(outputs[output]) if reads_logits else outputs[output]


def _logits(value: ir.Value) -> ir.Value:
    behind = value
    while (producer := behind.producer()) is not None and producer.op_type == "Identity":
        behind = producer.inputs[0] or behind
    producer = behind.producer()
    if producer is None or producer.op_type not in ("Softmax", "LogSoftmax") or producer.domain != "":
        return value
    attribute = producer.attributes.get("axis")
    axis = -1 if attribute is None else int(attribute.value)
    rank = None if behind.shape is None else len(behind.shape)
    source = producer.inputs[0]
    on_class_axis = axis == 1 or (rank is not None and axis + rank == 1)
    return source if on_class_axis and source is not None else value


def lift_state(model: ir.Model, state: ModelState) -> dict[str, np.ndarray]:
    """Turn the initializers of ``state`` into graph inputs named ``param/...`` and ``stat/...``, in place.

    Returns:
        Their arrays, by state name.
    """
    graph = model.graph
    arrays: dict[str, np.ndarray] = {}
    for name, state_name in state.state_names.items():
        value = graph.initializers[name]
        array = _array(value)
        arrays[state_name] = array
        if value.is_graph_output():
            raise ConfigurationError(f"the initializer '{name}' is an output of the model; remove that output to train it")
        replacement = ir.Value(
            name=state_name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape)
        )
        value.replace_all_uses_with(replacement)
        del graph.initializers[name]
        graph.inputs.append(replacement)
    return arrays


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
