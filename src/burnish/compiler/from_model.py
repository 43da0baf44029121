"""The work of ``burnish.compile``: a source model, a loss and an optimizer become the six graphs of a program."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from burnish import losses, metrics, optim
from burnish.adapters.graph import read_adapters
from burnish.analysis.dependence import left_out_weights, reasons_together
from burnish.compiler.batch_weight import warn_of_accumulation
from burnish.compiler.cached_features import Backbone, CachedFeatures, cut_backbone
from burnish.compiler.compilation import OPTIONS, Compilation
from burnish.compiler.distillation import has_teacher, prepare_teachers, with_projections
from burnish.compiler.draft import finish
from burnish.compiler.evaluation import Evaluation, evaluated_predictions, state_within
from burnish.compiler.lifting import lift_state, rounded_weights, state_dtypes
from burnish.compiler.memory_limit import memory_saving, program_with
from burnish.compiler.modules import Norm, held_rows_of, take_module
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
from burnish.compiler.selection import (
    ModelState,
    Trainable,
    find_held_rows,
    find_state,
    hold_frozen,
    settle_policies,
)
from burnish.compiler.sparse_tables import SparseRequest, warning_of
from burnish.compiler.update import warn_of_no_effect
from burnish.errors import ConfigurationError, DenseGradientWarning, ObjectiveWarning, UntrainedWeightsWarning
from burnish.graph import integer_weights
from burnish.importer import SOURCE, Bind, Source, described_bindings, load, refuse_gradients, with_plain_tensors
from burnish.modes import batch_normalizations, batch_normalizations_in_loops
from burnish.norms import (
    Auto,
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
from burnish.program.program import Inference, Program
from burnish.program.signature import GraphSignature
from burnish.program.state import Weights
from burnish.rewriting.change_dtypes import compute_in_float32, has_sixteen_bit_values
from burnish.rewriting.compute_integers import compute_integers
from burnish.rewriting.precision import get as get_precision
from burnish.rewriting.stages import RECOGNIZED
from burnish.sample_axes import AskedAxes, find_sample_axes, result_axes
from burnish.targets import target_of
from burnish.warn import warn

if TYPE_CHECKING:
    from burnish.importer.pytorch import ExportedModule


def program_from(source: Source, options: CompileOptions) -> Program:
    """Compile a model into a training program."""
    runtime, saving = target_of(options.target), memory_saving(options.memory, options.recompute)
    module, source, trainable, norm = take_module(source, options)
    in_file, model, trainable = _opened_to_train(source, options, trainable)
    objective, predictions = _objective(in_file, model, _requested_loss(options), options.outputs)
    axes, updater = _result_axes(model, predictions), optim.get(options.optimizer)
    if isinstance(objective, losses.ConnectionistTemporalClassification):
        for prediction in predictions:
            objective.check_samples(prediction.name, axes.get(prediction.name))
    state = with_projections(find_state(model, trainable), model.graph, objective)
    updater = with_aliases(updater, state.aliases)
    state, frozen, asked_for, policies = _selected(model, norm, state, updater)
    trained, departures = {*state.trainable} - frozen, tuple(find_departures(in_file))
    in_vain = norm_without_effect(norm, options.running_variance, [*asked_for])
    doubts = (*_doubts(in_file, trained, norm, trainable), *frozen_without_statistics(policies), *in_vain)
    _warn_of_objective(predictions, objective, doubts)
    held_rows = find_held_rows(model, state, held_rows_of(module, state, options.hold_rows))
    backbone = _backbone(model, options.cached_features, module, trained, policies, predictions, objective)
    if backbone is not None:
        axes |= backbone.axes
        model, state = backbone.rest, state_within(state, backbone.rest)
        updater = without_freezing(updater, frozen.difference(state.parameters), state.parameters)
    compilation = Compilation(
        model=model,
        in_file=in_file,
        backbone=backbone,
        predictions=predictions,
        loss=objective,
        metrics=_metrics(options, objective),
        data=_names(model.graph.inputs),  # before what is lifted becomes inputs too
        result_axes=axes,
        **_norms(backbone, asked_for, policies),
        running_variance=_running_variance(options, model),
        target=runtime,
        state=state,
        held_rows={name: rows for name, rows in held_rows.items() if name in state.parameters},
        sparse=SparseRequest.of(options.sparse, state.trainable, state.aliases),
        rounded=rounded_weights(in_file, state),  # before these become inputs
        weights=_lifted(in_file, model, state),
        optimizer=updater,
        precision=get_precision(options.precision),
        norm=_norm_option(norm),
        departures=departures,
        as_it_came=in_file.meta.get(SOURCE),
        batch=options.batch,
        bind=described_bindings(options.bind) if options.bind else {},
        steps_per_epoch=options.steps_per_epoch,
        **({} if module is None else _of_module(module, objective, options, state)),
    )
    program = program_with(saving, compilation.program_that_computes_again)
    _warn_of_result(compilation, program, _held_by_the_file(in_file, options.bind) if trainable is None else {})
    return program


def inference_from(source: Source, options: CompileOptions, *, evaluates: bool) -> Inference:
    """Compile a model to predict with, and to be evaluated with if ``evaluates``."""
    runtime = target_of(options.target)
    in_file, model = _opened(source, "inference", options.sample_axis)
    departures = "; ".join(find_departures(in_file))
    objective, predictions = _objective(in_file, model, options.loss, options.outputs, is_read=evaluates)
    layers = batch_normalizations(model.graph)
    compilation = Compilation(
        model=model,
        in_file=in_file,
        predictions=predictions,
        loss=objective,
        metrics=_metrics(options, objective),
        data=_names(model.graph.inputs),
        result_axes=_result_axes(model, predictions),
        layers=layer_names(layers),
        policies=(Frozen(),) * len(layers),
        running_variance=default_running_variance(model),
        target=runtime,
    )
    graphs: dict[str, ir.Model] = {}
    signatures: dict[str, GraphSignature] = {}
    for name in ("predict", "evaluate") if evaluates else ("predict",):
        graphs[name], signatures[name] = finish(getattr(compilation, name)(), name, runtime)
        compute_integers(graphs[name], runtime.float64)
    said = f"inference does not compute what the file of this model computes: {departures}"
    _warn_of_objective(predictions, objective, [said] if departures else [])
    reported = ("loss", "loss_terms", "metrics", "predictions") if evaluates else ()
    noted = {name: value for name, value in compilation.options().items() if name in reported}
    return Inference(graphs["predict"], graphs.get("evaluate"), signatures, noted, dict(model.metadata_props))


def _opened(
    source: Source, purpose: str, sample_axis: AskedAxes, batch: str | None = None, bind: Bind = None
) -> tuple[ir.Model, ir.Model]:
    """Return a model in the dtypes of its file, and the one that computes in float32 what it has in sixteen bits.

    The inputs of both are marked with the axis that their samples stand along, where it is not the first.

    Raises:
        ModelError, UnsupportedOperatorError: what loading raises; ``purpose`` names what the model is for.
        ConfigurationError: ``sample_axis`` does not fit the inputs, or the file leaves open which axis it is.
    """
    loaded = load(source, batch=batch, sample_axis=sample_axis, bind=bind)
    in_file = with_plain_tensors(loaded)
    RECOGNIZED.run(in_file, None)
    refuse_gradients(in_file, purpose)
    _leave_out_lists(in_file.graph)
    find_sample_axes(in_file.graph)
    if not has_sixteen_bit_values(in_file):
        return in_file, in_file
    model = in_file.clone()
    compute_in_float32(model)
    return in_file, model


def _leave_out_lists(graph: ir.Graph) -> None:
    """Remove, in place, outputs that are sequences or optional ones, where another one is a tensor, and warn of it."""
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


def _backbone(
    model: ir.Model,
    cached_features: CachedFeatures,
    module: ExportedModule | None,
    trained: Collection[str],
    policies: Mapping[ir.Node, NormPolicy],
    predictions: Iterable[Prediction],
    objective: losses.Loss,
) -> Backbone | None:
    """Return a model cut where its features are cached; None where they are not."""
    if cached_features is None:
        return None
    if module is not None and module.inference is not None:
        raise ConfigurationError(
            "cached_features: the module computes something else in evaluation, eval(), than in training: export it in "
            "evaluation mode, and compile the file"
        )
    if has_teacher(objective):
        raise ConfigurationError(
            "cached_features: the teacher of the loss reads the inputs of the model, which the steps would not have: compute its "
            "logits before (teacher_logits in the data, without a teacher), or leave cached_features out"
        )
    return cut_backbone(model, cached_features, trained, policies, [prediction.name for prediction in predictions])


def _result_axes(model: ir.Model, predictions: Iterable[Prediction]) -> dict[str, int | None]:
    """Return where samples stand in what a model gives, and in what the loss reads of it."""
    return result_axes(model.graph, [*model.graph.outputs, *(prediction.value for prediction in predictions)])


def _opened_to_train(source: Source, options: CompileOptions, trainable: Trainable) -> tuple[ir.Model, ir.Model, Trainable]:
    """Return both, and what trains: of a model with adapters these alone, where nothing else is said."""
    in_file, model = _opened(source, "burnish.compile", options.sample_axis, options.batch, options.bind)
    adapters = read_adapters(model.metadata_props).trained or None
    return in_file, model, adapters if trainable is None else trainable


def _requested_loss(options: CompileOptions) -> losses.LossLike:
    """Return the loss, or the one that reads the output in which the model computes its own."""
    return options.loss if options.output is None else losses.output(options.output)


def _objective(
    in_file: ir.Model, model: ir.Model, loss: losses.LossLike, outputs: str | Sequence[str] | None, is_read: bool = True
) -> tuple[losses.Loss, tuple[Prediction, ...]]:
    """Return the loss for the outputs of a model, and what it reads there; nothing of a loss that is not read."""
    objective = _in_dtypes_of(model, in_file, losses.get(loss)).bind(_names(model.graph.outputs))
    if is_read:
        objective = prepare_teachers(objective, (in_file, model))
    return objective, find_predictions(model, outputs, objective.readings, objective.name) if is_read else ()


def _lifted(in_file: ir.Model, model: ir.Model, state: ModelState) -> Weights:
    """Make the state of both models their inputs; return its values."""
    dtypes = state_dtypes(in_file, state)
    weights = lift_state(in_file, state, dtypes)
    if model is not in_file:
        lift_state(model, state, dtypes)
    return weights


def _selected(
    model: ir.Model, norm: Norm, state: ModelState, updater: optim.Optimizer
) -> tuple[ModelState, frozenset[str], Mapping[ir.Node, NormPolicy], Mapping[ir.Node, NormPolicy]]:
    """Return what becomes state, what of it the optimizer freezes, the policies that were asked for, and those of layers."""
    layers, in_loops = batch_normalizations(model.graph), batch_normalizations_in_loops(model.graph)
    asked_for = resolve_policies(norm, [*layers, *in_loops])
    state = hold_frozen(state, asked_for)
    frozen = frozen_by_pattern(updater, state.trainable)
    settled = settle_policies(asked_for, state, frozen, in_loops)
    return state, frozen, asked_for, {node: settled[node] for node in layers}


def _norms(
    backbone: Backbone | None, asked_for: Mapping[ir.Node, NormPolicy], policies: Mapping[ir.Node, NormPolicy]
) -> dict[str, Any]:
    """Return what a compilation holds of the batch normalization layers of its model, which may be the rest of the whole."""
    layers = [*policies] if backbone is None else [*compress(policies, backbone.layers)]
    settled, auto_frozen = tuple(policies[node] for node in layers), _auto_frozen(layers, asked_for, policies)
    return {"layers": layer_names(layers), "policies": settled, "auto_frozen": auto_frozen}


def _of_module(module: ExportedModule, objective: losses.Loss, options: CompileOptions, state: ModelState) -> dict[str, Any]:
    """Return what a compilation holds of a module beside its graph."""
    counted = {name: (start, module.batches_per_call[name]) for name, start in module.counted_batches.items()}
    return {"evaluation": _evaluation(module, objective, options, state), "counted_batches": counted}


def _evaluation(module: ExportedModule, objective: losses.Loss, options: CompileOptions, state: ModelState) -> Evaluation | None:
    """Return the form of a module in which it is evaluated, where that differs from the one in which it trains."""
    if module.inference is None:
        return None
    in_file, model = _opened(module.inference, "burnish.compile", options.sample_axis)
    predictions = evaluated_predictions(model, options.outputs, objective)
    present = state_within(state, model)
    _lifted(in_file, model, present)
    return Evaluation(in_file, model, predictions)


def _names(values: Iterable[ir.Value]) -> tuple[str, ...]:
    return tuple(value.name or "" for value in values)


def _doubts(model: ir.Model, trained: Collection[str], norm: object, trainable: Trainable) -> Iterator[str]:
    is_frozen = isinstance(norm, str | NormPolicy) and isinstance(get_policy(norm), Frozen)
    return find_doubts(model, trained, is_frozen, takes_all=trainable is None)


def _auto_frozen(
    layers: Sequence[ir.Node], asked_for: Mapping[ir.Node, NormPolicy], policies: Mapping[ir.Node, NormPolicy]
) -> tuple[str, ...]:
    """Return the names of the layers that ``auto`` froze."""
    frozen = (isinstance(asked_for[node], Auto) and isinstance(policies[node], Frozen) for node in layers)
    return tuple(compress(layer_names(layers), frozen))


def _norm_option(norm: Norm) -> str | dict[str, str]:
    return str(norm) if isinstance(norm, str | NormPolicy) else {pattern: str(policy) for pattern, policy in norm.items()}


def _warn_of_objective(predictions: Iterable[Prediction], loss: losses.Loss, doubts: Iterable[str] = ()) -> None:
    """Warn of what is perhaps not what was meant; refuse what cannot be meant."""
    predictions = list(predictions)
    check_classes(predictions, loss)
    mixing = mixing_doubts([prediction.value for prediction in predictions])
    for problem in (*objective_doubts(predictions, loss), *mixing, *doubts):
        warn(ObjectiveWarning(problem))


def _in_dtypes_of(model: ir.Model, in_file: ir.Model, loss: losses.Loss) -> losses.Loss:
    """Return the loss for a model that computes in float32 what its file has in sixteen bits; a graph that reads them changes."""
    if model is in_file or not isinstance(loss, losses.OnnxLoss) or not has_sixteen_bit_values(loss.model):
        return loss
    own = loss.model.clone()
    compute_in_float32(own, keep_inputs=False)
    return losses.from_onnx(own, reduction=loss.reduction)


def _held_by_the_file(in_file: ir.Model, bind: Bind) -> dict[str, str]:
    """Return the weights that no selection would train, with the reason: integers, and those of branches that are never taken.

    Who binds an input chooses the branch.
    """
    return integer_weights(in_file.graph) | ({} if bind else left_out_weights(in_file.graph))


def _warn_of_result(compilation: Compilation, program: Program, held: Mapping[str, str]) -> None:
    """Warn of what options do not reach: micro-batches that weigh alike, tables with dense gradients, weights without a gradient.

    Args:
        compilation: which knows of them since the graphs were built.
        program: what it became.
        held: weights that no selection would train, with the reason.
    """
    weights = {**compilation.untrained, **held}
    warn_of_accumulation(compilation.optimizer, compilation.weighs_alike)
    warn_of_no_effect(compilation.optimizer, program.signature["grad"], (program.predict, program.evaluate))
    if compilation.dense:
        warn(DenseGradientWarning(warning_of(compilation.dense)))
    if not weights:
        return
    one, several = "weight stays as it is: no gradient reaches it", "weights stay as they are: no gradient reaches them"
    stay = one if len(weights) == 1 else several
    problem = (
        f"{len(weights)} {stay}. {reasons_together(weights)}. Where that is meant, select only what is to train; else let "
        "the loss read another output, or export the model without what stands in the way. `burnish inspect` lists them all"
    )
    warn(UntrainedWeightsWarning(problem, OPTIONS, weights))


def _metrics(options: CompileOptions, loss: losses.Loss) -> tuple[metrics.Metric, ...]:
    requested = loss.default_metrics if options.metrics is None else options.metrics
    return tuple(map(metrics.get, requested))


def _running_variance(options: CompileOptions, model: ir.Model) -> RunningVariance:
    rule = options.running_variance
    return default_running_variance(model) if rule is None else RunningVariance(rule)
