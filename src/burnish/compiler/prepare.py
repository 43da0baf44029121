"""Prepare a source for differentiation: load the model and apply the options of ``burnish.compile``, with weights as inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from burnish import losses, metrics, optim
from burnish.adapters.graph import read_adapters
from burnish.analysis.dependence import left_out_weights
from burnish.compiler.cached_features import Backbone, cut_backbone
from burnish.compiler.distillation import has_teacher, prepare_teachers, with_projections
from burnish.compiler.objective_warnings import (
    check_classes,
    find_departures,
    find_doubts,
    frozen_without_statistics,
    mixing_doubts,
    objective_doubts,
)
from burnish.compiler.options import CompileOptions
from burnish.compiler.predictions import Prediction, find_predictions
from burnish.compiler.selection import HoldRows, ModelState, Trainable, find_held_rows, find_state, hold_frozen, settle_policies
from burnish.compiler.sparse_tables import SparseRequest
from burnish.compiler.state_inputs import make_inputs, rounded_weights, state_dtypes
from burnish.errors import ConfigurationError, ObjectiveWarning
from burnish.graph import integer_weights
from burnish.graph.annotations import ADAPTERS
from burnish.graph.shapes import has_sixteen_bit_values
from burnish.importer import SOURCE, Bind, Source, SourceModel, exported_module, load, refuse_gradients, with_plain_tensors
from burnish.modes import batch_normalizations, batch_normalizations_in_loops
from burnish.norms import (
    CUMULATIVE,
    Auto,
    BatchStatistics,
    Frozen,
    NormPolicy,
    RunningVariance,
    default_running_variance,
    layer_names,
    norm_without_effect,
    resolve_policies,
)
from burnish.norms import get as get_policy
from burnish.optim.groups import frozen_by_pattern, with_aliases, without_freezing
from burnish.program.state import Weights
from burnish.rewriting.change_dtypes import compute_in_float32
from burnish.rewriting.stages import RECOGNIZED
from burnish.sample_axes import AskedAxes, find_sample_axes, result_axes
from burnish.warn import warn

if TYPE_CHECKING:
    from burnish.importer.pytorch import ExportedModule

Norm = str | NormPolicy | Mapping[str, str | NormPolicy]


@dataclass(frozen=True)
class Forms:
    """A model in the two forms that graphs are made from, and the values that the loss reads.

    Attributes:
        in_file: the form with the dtypes of its file, for prediction and export.
        model: the same computation in float32 at least, for training and evaluation. The same object if no value has sixteen
            bits.
        predictions: values that the loss reads.
    """

    in_file: ir.Model
    model: ir.Model
    predictions: tuple[Prediction, ...] = ()


@dataclass(frozen=True)
class Normalization:
    """The behaviour of each batch normalization layer of a model.

    Attributes:
        layers: names of the layers.
        policies: their policies, in the same order.
        running_variance: the kind of variance that running statistics hold.
        option: the requested policies, as JSON-compatible values.
        auto_frozen: layers that are frozen because none of their parameters trains.
    """

    layers: tuple[str, ...]
    policies: tuple[NormPolicy, ...]
    running_variance: RunningVariance
    option: str | dict[str, str] = Auto.name
    auto_frozen: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedModel:
    """A model with everything that is settled before it is differentiated.

    Attributes:
        trained: the model that trains; it starts at the features if they are cached.
        evaluated: the model that predicts and is evaluated: a different one for a module whose ``eval()`` computes something
            else.
        loss, metrics: the loss and the metrics that the graphs report.
        data: input names of the model that trains.
        result_axes: sample axes of the model's outputs and of the values that the loss reads, by name; inputs are marked.
        normalization: the behaviour of batch normalization.
        state: the initializers that became parameters and statistics.
        weights: their values.
        optimizer: the optimizer.
        held_rows: rows that training does not change, by weight.
        sparse: the parameters that should keep only the gradients of the rows that a batch reads.
        backbone: the model that computes the features; None if the model starts at the inputs of the file.
        rounded: weights and statistics in a sixteen-bit dtype in the file and in float32 in the state, with the file's dtype.
        unselected: weights that no selection would train, with the reason, if the user made no selection.
        departures: sentences on why inference in the initial state differs from the file.
        counted_batches: initial value and increment per step of a module's batch counters, by their name.
        source: the original model.
    """

    trained: Forms
    evaluated: Forms
    loss: losses.Loss
    metrics: tuple[metrics.Metric, ...]
    data: tuple[str, ...]
    result_axes: Mapping[str, int | None]
    normalization: Normalization
    state: ModelState = field(default_factory=lambda: ModelState((), (), ()))
    weights: Weights = field(default_factory=lambda: Weights({}, {}))
    optimizer: optim.Optimizer = field(default_factory=optim.sgd)
    held_rows: Mapping[str, list[int]] = field(default_factory=dict)
    sparse: SparseRequest = field(default_factory=SparseRequest)
    backbone: Backbone | None = None
    rounded: Mapping[str, str] = field(default_factory=dict)
    unselected: Mapping[str, str] = field(default_factory=dict)
    departures: tuple[str, ...] = ()
    counted_batches: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    source: SourceModel | None = None


def prepare(source: Source, options: CompileOptions) -> PreparedModel:
    """Read a source, apply the options, and make inputs of the state; warn about likely mistakes."""
    module = exported_module(source, options.example_inputs, options.dynamic_shapes, options.verify, options.sample_axis)
    source, trainable, norm = (source, options.trainable, options.norm) if module is None else _of_module(module, options)
    forms = _read_forms(source, "burnish.compile", options.sample_axis, options.batch, options.bind)
    if trainable is None:
        trainable = (read_adapters(forms.model.metadata_props).trained if ADAPTERS.is_on(forms.model) else ()) or None
    loss, forms = _with_loss(forms, options)
    axes, optimizer = _result_axes(forms), optim.get(options.optimizer)
    if isinstance(loss, losses.ConnectionistTemporalClassification):
        for prediction in forms.predictions:
            loss.check_samples(prediction.name, axes.get(prediction.name))

    state = with_projections(find_state(forms.model, trainable), forms.model.graph, loss)
    optimizer = with_aliases(optimizer, state.aliases)
    layers, in_loops = batch_normalizations(forms.model.graph), batch_normalizations_in_loops(forms.model.graph)
    asked_for = resolve_policies(norm, [*layers, *in_loops])
    state = hold_frozen(state, asked_for)
    frozen = frozen_by_pattern(optimizer, state.trainable)
    settled = settle_policies(asked_for, state, frozen, in_loops)
    policies = {node: settled[node] for node in layers}

    trained, departures = {*state.trainable} - frozen, tuple(find_departures(forms.in_file))
    is_frozen = isinstance(norm, str | NormPolicy) and isinstance(get_policy(norm), Frozen)
    doubts = find_doubts(forms.in_file, trained, is_frozen, takes_all=trainable is None)
    in_vain = norm_without_effect(norm, options.running_variance, [*asked_for])
    _warn_of_objective(forms.predictions, loss, (*doubts, *frozen_without_statistics(policies), *in_vain))
    held_rows = find_held_rows(forms.model, state, _held_rows(module, state, options.hold_rows))
    backbone = _backbone(forms, options, module, trained, policies, loss)
    if backbone is not None:
        axes = {**axes, **backbone.axes}
        forms = replace(forms, model=backbone.rest)
        state = state_within(state, forms.model)
        optimizer = without_freezing(optimizer, frozen.difference(state.parameters), state.parameters)
        policies = {node: policies[node] for node in compress(policies, backbone.layers)}

    # Before the state becomes inputs as well.
    data, rounded = _names(forms.model.graph.inputs), rounded_weights(forms.in_file, state)
    normalization = _normalization(norm, options.running_variance, forms.model, asked_for, policies)
    sparse = SparseRequest.of(options.sparse, state.trainable, state.aliases)
    weights = _make_inputs(forms, state)
    evaluated = forms
    if module is not None and module.inference is not None:
        evaluated = _evaluated_form(module.inference, loss, options)
        _make_inputs(evaluated, state_within(state, evaluated.model))
    return PreparedModel(
        trained=forms,
        evaluated=evaluated,
        loss=loss,
        metrics=_metrics(options, loss),
        data=data,
        result_axes=axes,
        normalization=normalization,
        state=state,
        weights=weights,
        optimizer=optimizer,
        held_rows={name: rows for name, rows in held_rows.items() if name in state.parameters},
        sparse=sparse,
        backbone=backbone,
        rounded=rounded,
        unselected=_unselected(forms.in_file, options.bind) if trainable is None else {},
        departures=departures,
        source=SOURCE.get(forms.in_file),
        counted_batches={} if module is None else _counted_batches(module),
    )


def prepare_inference(source: Source, options: CompileOptions, *, evaluates: bool) -> PreparedModel:
    """Read a source for prediction, and for evaluation if ``evaluates``; its weights stay constants."""
    forms = _read_forms(source, "inference", options.sample_axis)
    departures = "; ".join(find_departures(forms.in_file))
    loss, forms = _with_loss(forms, options, is_read=evaluates)
    said = f"inference does not compute what the file of this model computes: {departures}"
    _warn_of_objective(forms.predictions, loss, [said] if departures else [])
    layers = batch_normalizations(forms.model.graph)
    return PreparedModel(
        trained=forms,
        evaluated=forms,
        loss=loss,
        metrics=_metrics(options, loss),
        data=_names(forms.model.graph.inputs),
        result_axes=_result_axes(forms),
        normalization=Normalization(layer_names(layers), (Frozen(),) * len(layers), default_running_variance(forms.model)),
    )


def _of_module(module: ExportedModule, options: CompileOptions) -> tuple[ir.Model, Trainable, Norm]:
    """Return the model, the selection and the normalization policies of a module.

    The user's selection overrides ``requires_grad``, and the user's policies override the modes of the layers.
    """

    def requires_gradient(name: str, array: np.ndarray) -> bool:
        return module.parameters.get(name, False)

    trainable = requires_gradient if options.trainable is None else options.trainable
    policies = {layer: _continued(module, layer, policy) for layer, policy in module.norm_policies.items()}
    if isinstance(options.norm, Mapping):
        return module.model, trainable, {**policies, **options.norm}
    is_default = options.norm == Auto.name or isinstance(options.norm, Auto)
    return module.model, trainable, policies if is_default and policies else options.norm


def _continued(module: ExportedModule, layer: str, policy: str) -> str:
    """Return a cumulative policy that continues from the number of batches that the module has counted."""
    found, seen = get_policy(policy), module.counted_batches.get(f"{layer}.num_batches_tracked", 0)
    if not isinstance(found, BatchStatistics) or found.momentum != CUMULATIVE:
        return policy
    return str(replace(found, seen=seen))


def _held_rows(module: ExportedModule | None, state: ModelState, asked: HoldRows) -> HoldRows:
    if module is None:
        return asked
    held = {name: rows for name, rows in module.held_rows.items() if name in state.trainable}
    return {**held, **asked} if isinstance(asked, Mapping) else held if asked is None else asked


def _counted_batches(module: ExportedModule) -> dict[str, tuple[int, int]]:
    return {name: (start, module.batches_per_call[name]) for name, start in module.counted_batches.items()}


def _read_forms(source: Source, purpose: str, sample_axis: AskedAxes, batch: str | None = None, bind: Bind = None) -> Forms:
    """Load a model in both forms; ``purpose`` is for messages.

    The inputs of both are marked with their sample axis if it is not the first.
    """
    in_file = with_plain_tensors(load(source, batch=batch, sample_axis=sample_axis, bind=bind))
    RECOGNIZED.run(in_file, None)
    refuse_gradients(in_file, purpose)
    _leave_out_lists(in_file.graph)
    find_sample_axes(in_file.graph)
    if not has_sixteen_bit_values(in_file):
        return Forms(in_file, in_file)
    model = in_file.clone()
    compute_in_float32(model)
    return Forms(in_file, model)


def _leave_out_lists(graph: ir.Graph) -> None:
    """Remove outputs that are sequences or optionals, in place, if another output is a tensor, and warn about it."""
    lists = [value for value in graph.outputs if isinstance(value.type, ir.SequenceType | ir.OptionalType)]
    if not lists or len(lists) == len(graph.outputs):
        return
    named = ", ".join(f"'{value.name}'" for value in lists)
    warn(
        ObjectiveWarning(
            f"outputs that are sequences or may be missing, {named}, are left out of predictions and exports: export the model "
            "with a tensor for each if you need them"
        )
    )
    kept = [value for value in graph.outputs if value not in lists]
    graph.outputs.clear()
    graph.outputs.extend(kept)


def _with_loss(forms: Forms, options: CompileOptions, *, is_read: bool = True) -> tuple[losses.Loss, Forms]:
    asked = losses.get(options.loss if options.output is None else losses.output(options.output))
    loss = _in_dtypes_of(forms, asked).bind(_names(forms.model.graph.outputs))
    if not is_read:
        return loss, forms
    loss = prepare_teachers(loss, (forms.in_file, forms.model))
    return loss, replace(forms, predictions=find_predictions(forms.model, options.outputs, loss.readings, loss.name))


def _in_dtypes_of(forms: Forms, loss: losses.Loss) -> losses.Loss:
    """Return the loss for a model in float32 instead of sixteen bits; a loss graph with sixteen-bit values is converted."""
    if forms.model is forms.in_file or not isinstance(loss, losses.OnnxLoss) or not has_sixteen_bit_values(loss.model):
        return loss
    own = loss.model.clone()
    compute_in_float32(own, keep_inputs=False)
    return losses.from_onnx(own, reduction=loss.reduction)


def _evaluated_form(source: ir.Model, loss: losses.Loss, options: CompileOptions) -> Forms:
    """Return the form in which a module is evaluated, if it differs from the one that trains.

    The loss reads the outputs of the same names, or the only output.
    """
    forms = _read_forms(source, "burnish.compile", options.sample_axis)
    try:
        predictions = find_predictions(forms.model, options.outputs, loss.readings, loss.name)
    except ConfigurationError as error:
        try:
            predictions = find_predictions(forms.model, None, loss.readings, loss.name)
        except ConfigurationError:
            raise ConfigurationError(
                f"{error}. That is so in evaluation, eval(): let forward return in both modes what the loss reads"
            ) from error
    return replace(forms, predictions=predictions)


def _result_axes(forms: Forms) -> Mapping[str, int | None]:
    graph = forms.model.graph
    return result_axes(graph, [*graph.outputs, *(prediction.value for prediction in forms.predictions)])


def _backbone(
    forms: Forms,
    options: CompileOptions,
    module: ExportedModule | None,
    trained: Collection[str],
    policies: Mapping[ir.Node, NormPolicy],
    loss: losses.Loss,
) -> Backbone | None:
    if options.cached_features is None:
        return None
    if module is not None and module.inference is not None:
        raise ConfigurationError(
            "cached_features: the module computes something else in evaluation, eval(), than in training: export it in "
            "evaluation mode, and compile the file"
        )
    if has_teacher(loss):
        raise ConfigurationError(
            "cached_features: the teacher of the loss reads the inputs of the model, which the steps would not have: compute its "
            "logits before (teacher_logits in the data, without a teacher), or leave cached_features out"
        )
    names = [prediction.name for prediction in forms.predictions]
    return cut_backbone(forms.model, options.cached_features, trained, policies, names)


def state_within(state: ModelState, model: ir.Model) -> ModelState:
    """Return the state restricted to the parameters and statistics of a model."""

    def present(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in model.graph.initializers)

    return replace(
        state,
        parameters=present(state.parameters),
        statistics=present(state.statistics),
        trainable=present(state.trainable),
        asked_for={pattern: held for pattern, names in state.asked_for.items() if (held := present(names))},
    )


def _make_inputs(forms: Forms, state: ModelState) -> Weights:
    dtypes = state_dtypes(forms.in_file, state)
    weights = make_inputs(forms.in_file, state, dtypes)
    if forms.model is not forms.in_file:
        make_inputs(forms.model, state, dtypes)
    return weights


def _unselected(in_file: ir.Model, bind: Bind) -> dict[str, str]:
    """Return the weights that no selection would train, with the reason: integers, and weights of branches that are never taken.

    If the user binds an input, the branch is the user's choice.
    """
    return integer_weights(in_file.graph) | ({} if bind else left_out_weights(in_file.graph))


def _warn_of_objective(predictions: Sequence[Prediction], loss: losses.Loss, doubts: Iterable[str]) -> None:
    check_classes(predictions, loss)
    mixing = mixing_doubts([prediction.value for prediction in predictions])
    for problem in (*objective_doubts(predictions, loss), *mixing, *doubts):
        warn(ObjectiveWarning(problem))


def _metrics(options: CompileOptions, loss: losses.Loss) -> tuple[metrics.Metric, ...]:
    return tuple(map(metrics.get, loss.default_metrics if options.metrics is None else options.metrics))


def _names(values: Iterable[ir.Value]) -> tuple[str, ...]:
    return tuple(value.name or "" for value in values)


def _normalization(
    norm: Norm, rule: str | None, model: ir.Model, asked_for: Mapping[ir.Node, NormPolicy], policies: Mapping[ir.Node, NormPolicy]
) -> Normalization:
    names = layer_names([*policies])
    frozen = (isinstance(asked_for[node], Auto) and isinstance(policy, Frozen) for node, policy in policies.items())
    return Normalization(
        layers=names,
        policies=tuple(policies.values()),
        running_variance=default_running_variance(model) if rule is None else RunningVariance(rule),
        option=str(norm) if isinstance(norm, str | NormPolicy) else {pattern: str(policy) for pattern, policy in norm.items()},
        auto_frozen=tuple(compress(names, frozen)),
    )
