"""Exact recomputation of running statistics over a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from burnish.analysis.layer_selection import warn_of_bodies
from burnish.engines import Engine
from burnish.errors import ConfigurationError, InputError
from burnish.graph import Builder, Tensor, attribute_value, replace_node
from burnish.norms.policies import RunningVariance, layer_name
from burnish.operators.normalization.statistics import channel_affine
from burnish.rewriting.change_dtypes import compute_in_float32
from burnish.value_statistics import Batch, Measurement, Moments, Statistics, emit_statistics

PREFIX = "stat/"


class TrainingSession(Protocol):
    """The required parts of ``burnish.Session``."""

    program: Any
    engine: Any

    def state(self) -> dict[str, np.ndarray]: ...

    def load_state(self, state: Mapping[str, np.ndarray]) -> None: ...


def recalibrate(session: TrainingSession, data: Iterable[Batch], *, engine: str | Engine | None = None) -> dict[str, np.ndarray]:
    """Replace the running statistics of a session by those of a dataset.

    Running statistics average over earlier steps with other weights. Here they are those of all inputs at the present weights
    (PreciseBN; Wu and Johnson 2021, "Rethinking 'Batch' in BatchNorm", section 3). As in training, layers pass on batches
    normalized with batch statistics, so all but the first layer's statistics depend on the batches; make these as large as in
    training. Results are merged in float64 and rounded once.

    Frozen layers keep and use their running statistics; others use the whole batch, even under ``ghost`` and ``renorm``. Dropout
    is off. A layer that runs several times with one set of statistics gets those of all its inputs.

    Args:
        session: an open ``burnish.Session``.
        data: batches, dicts of arrays by input name; labels are ignored.
        engine: engine, or its name, to run the layers; that of the session by default.

    Returns:
        The new running statistics by state name, ``stat/...``. The variance is divided by N, or by N - 1 under the rule
            ``pytorch``, for N elements per channel in the dataset.

    Raises:
        ConfigurationError: not a session, or a program without running statistics that training updates.
        InputError: a batch does not fit, there is none, values are not finite, or N - 1 is 0. The state is unchanged.
        EngineError: the engine failed; the state is unchanged.
    """
    if not all(hasattr(session, name) for name in ("program", "engine", "state", "load_state")):
        raise ConfigurationError(
            f"recalibrate: statistics belong to a state, and a {type(session).__name__} holds none: give burnish.Session(program)"
        )
    program = session.program
    updated = {name for name in program.signature["step"].updates if name.startswith(PREFIX)}
    model = program.predict.clone()
    compute_in_float32(model, keep_inputs=False)
    data_names = {entry.name for entry in program.signature["predict"].inputs if not entry.is_state}
    measurement = Measurement(model)
    targets = _measure_layers(model.graph, measurement, updated)
    warn_of_bodies("recalibrate", _in_bodies(model.graph, updated), "their statistics are those that training left")
    if not targets:
        raise ConfigurationError(
            "recalibrate: the program has no running statistics that training updates: its model has no batch normalization, or "
            "all of it is frozen. Compile with norm='train', or put layers in with burnish.surgery.insert"
        )
    state = session.state()
    inputs = [value for value in model.graph.inputs if value.name in data_names]
    fixed = {name: _read_as(value, state[name]) for value in model.graph.inputs if (name := value.name or "") not in data_names}
    moments = measurement.run(data, inputs, fixed, session.engine if engine is None else engine)
    unbiased = program.options.get("running_variance") == RunningVariance.PYTORCH
    results = {}
    for name, target in targets.items():
        measured = moments[target.key]
        values = _variance(target.layer, measured, unbiased) if target.is_variance else measured.mean
        results[name] = values.astype(state[name].dtype)
    session.load_state(state | results)
    return results


def _read_as(value: ir.Value, array: np.ndarray) -> np.ndarray:
    """Return a state entry in the dtype of an input: frozen weights of a 16-bit file are read in float32."""
    assert value.dtype is not None
    return array.astype(value.dtype.numpy(), copy=False)


def _variance(layer: str, moments: Moments, unbiased: bool) -> np.ndarray:
    if not unbiased:
        return moments.variance
    if moments.count < 2:
        raise InputError(
            f"The layer '{layer}' has a single element per channel in the whole data set, and the running variance of this "
            "program is divided by N - 1: give more data, or compile with running_variance='onnx'"
        )
    return moments.deviations / (moments.count - 1)


@dataclass(frozen=True)
class _Target:
    """Source of a running statistic: the key of its moments, its layer, and True for the variance."""

    key: str
    layer: str
    is_variance: bool


def _measure_layers(graph: ir.Graph, measurement: Measurement, updated: set[str]) -> dict[str, _Target]:
    """Make the layers that training updates use batch statistics and measure them; return their running statistics."""
    targets: dict[str, _Target] = {}
    for node in list(graph):
        if node.op_type != "BatchNormalization" or node.domain != "":
            continue
        mean, variance = (_state_name(value) for value in node.inputs[3:5])
        key = next((name for name in (mean, variance) if name in updated), None)
        if key is None:
            continue
        builder = Builder(graph, before=node)
        x = builder.tensor(node.inputs[0])  # type: ignore[arg-type]
        statistics = emit_statistics(x)
        layer = layer_name(node)
        measurement.add(key, layer, x, statistics)
        targets |= {name: _Target(key, layer, name == variance) for name in (mean, variance) if name in updated}
        replace_node(node, _normalized(node, builder, x, statistics))
    return targets


def _in_bodies(graph: ir.Graph, updated: set[str]) -> list[ir.Node]:
    inside = (node for body in graph.subgraphs() for node in body if node.op_type == "BatchNormalization" and node.domain == "")
    return [node for node in inside if any(_state_name(value) in updated for value in node.inputs[3:5])]


def _state_name(value: ir.Value | None) -> str | None:
    """Return the state entry of a running statistic, also through Identity and Cast."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type not in ("Identity", "Cast"):
            return None
        value = producer.inputs[0]
    return None if value is None else value.name


def _normalized(node: ir.Node, builder: Builder, x: Tensor, statistics: Statistics) -> Tensor:
    dtype = statistics.mean.dtype
    scale, bias = (builder.cast(builder.tensor(value), dtype) for value in node.inputs[1:3] if value is not None)
    epsilon = float(attribute_value(node, "epsilon", 1e-5))
    gain = scale / builder.op("Sqrt", statistics.variance + epsilon)
    return builder.cast(channel_affine(statistics.centered, gain, bias - statistics.shift * gain), x.dtype)
