"""Build the graphs ``grad``, ``evaluate`` and ``predict`` of a program from a prepared model, before they are lowered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from burnish import autodiff, metrics
from burnish.compiler.distillation import teacher_rules
from burnish.compiler.draft import Draft, entry_of, finish
from burnish.compiler.loss_and_metrics import (
    add_figures,
    add_loss,
    figure_name,
    over_all,
    terms_of_shard,
    weight_of_batch,
)
from burnish.compiler.options import CompileOptions
from burnish.compiler.prepare import PreparedModel
from burnish.compiler.selection import check_reached
from burnish.compiler.update import SCALE, SKIPPED, STEP
from burnish.errors import GradientError
from burnish.graph import Tensor, name_sources
from burnish.graph.annotations import changing_masks
from burnish.graph.constants import is_quantized
from burnish.losses import Term
from burnish.modes import batch_normalizations, bind_inference, bind_training, numbered_draws
from burnish.norms import extent_rules
from burnish.operators import semantic_operators
from burnish.operators.collectives import PARTS_OF, all_reduce, all_reduce_rows
from burnish.operators.row_gradients import coalesced
from burnish.optim.accumulate import LOSS_WEIGHT
from burnish.optim.arithmetic import where
from burnish.optim.groups import frozen_by_pattern
from burnish.optim.loss_scale import LOSS_SCALE, all_finite
from burnish.optim.row_updates import without_rows
from burnish.program.signature import FEATURES, Entry, GraphSignature, Role
from burnish.random import KEY_DTYPE, KEY_SHAPE, next_key
from burnish.rewriting import precision, recompute_request
from burnish.rewriting.fold_constants import fold_constants
from burnish.rewriting.precision import MixedPrecision
from burnish.rewriting.recompute_request import name_origins
from burnish.rewriting.simulate_quantization import refuse_lost_gradients, simulate_quantization
from burnish.rewriting.stages import HOISTED, RECOGNIZED_IN_MODE, RECOGNIZED_TO_TRAIN
from burnish.rewriting.train_pruning import train_pruning
from burnish.rewriting.train_quantization import train_quantization
from burnish.targets import Target, check_has_dtypes, target_of

OPTIONS = "trainable=[...] says what trains, outputs='...' what the loss reads"
"""The part of a message about a missing gradient that names the options."""


@dataclass(frozen=True)
class Drafts:
    """The graphs of a program before they are lowered to its target, and the findings of differentiation.

    Attributes:
        model: the prepared model.
        graphs: ``grad``, ``evaluate`` and ``predict``, and ``features`` if features are cached, with semantic operators.
        signatures: their signatures.
        coefficients: coefficient of each figure in the sum that is the loss.
        untrained: selected weights that no gradient reaches, with the reason.
        dense: parameters that ``sparse`` selects but that have dense gradients, with the reason.
        weighs_alike: the reason why an optimizer that accumulates gives micro-batches of any size the same weight; empty if it
            does not.
    """

    model: PreparedModel
    graphs: Mapping[str, ir.Model]
    signatures: Mapping[str, GraphSignature]
    coefficients: Mapping[str, float]
    untrained: Mapping[str, str]
    dense: Mapping[str, str]
    weighs_alike: str


def differentiate(model: PreparedModel, options: CompileOptions) -> Drafts:
    """Build the graphs of a program from a prepared model."""
    target = target_of(options.target)
    check_has_dtypes(model.trained.in_file, target)
    trained = folded(model.trained.model)
    evaluated = trained if model.evaluated is model.trained else folded(model.evaluated.model)
    gradients = _draft_gradients(trained, model, options)
    evaluation, coefficients = draft_evaluation(evaluated, model, precision.get(options.precision))
    drafts = {"grad": gradients.draft, "evaluate": evaluation, "predict": draft_inference(model.evaluated.in_file, model)}
    if model.backbone is not None:
        drafts[FEATURES] = draft_inference(folded(model.backbone.model), model)
    graphs: dict[str, ir.Model] = {}
    signatures: dict[str, GraphSignature] = {}
    for name, draft in drafts.items():
        graphs[name], signatures[name] = finish(draft, name, _semantic(target))
    return Drafts(model, graphs, signatures, coefficients, gradients.untrained, gradients.dense, gradients.weighs_alike)


def _semantic(target: Target) -> Target:
    return target.with_kernels(semantic_operators())


def folded(model: ir.Model) -> ir.Model:
    """Return a copy with constant subgraphs computed, for training. An export keeps the form of its file."""
    copy = model.clone()
    fold_constants(copy)
    return copy


def _draft_of(source: ir.Model, model: PreparedModel) -> Draft:
    """Return a draft of a model with its data, parameters and statistics as inputs and no outputs."""
    draft = Draft(source.clone())
    name_sources(draft.model.graph)
    draft.model.graph.outputs.clear()
    roles = {f"param/{name}": Role.PARAMETER for name in model.state.parameters}
    roles |= {f"stat/{name}": Role.STATISTIC for name in model.state.statistics}
    draft.inputs = [entry_of(value, roles.get(value.name or "", Role.DATA)) for value in draft.model.graph.inputs]
    return draft


def draft_inference(source: ir.Model, model: PreparedModel) -> Draft:
    """Return a form of the model in inference mode, with its own outputs."""
    draft = _draft_of(source, model)
    names = [value.name or "" for value in source.graph.outputs]
    values = draft.values()
    draft.model.graph.outputs.extend(values[name] for name in names)
    bind_inference(draft.model.graph)
    RECOGNIZED_IN_MODE.run(draft.model, None)
    produced = list(draft.model.graph.outputs)
    draft.model.graph.outputs.clear()
    for name, value in zip(names, produced, strict=True):  # a running statistic may replace the output of a layer
        draft.add_output(draft.builder.tensor(value), name, Role.OUTPUT, sample_axis=model.result_axes.get(name, 0))
    return draft


def draft_evaluation(source: ir.Model, model: PreparedModel, mixed: MixedPrecision | None) -> tuple[Draft, dict[str, float]]:
    """Return the model with loss and metrics in inference mode, and the coefficient of each figure in the loss."""
    draft = _draft_of(source, model)
    draft.extents = teacher_rules(model.loss)

    def bind(bound: ir.Graph) -> None:
        _narrow(draft, mixed)
        bind_inference(bound)
        RECOGNIZED_IN_MODE.run(draft.model, None)

    terms, read = add_loss(draft, model, bind, model.evaluated.predictions)
    totals = add_figures(draft, model, terms, read)[1]
    for name, parts in totals.items():
        for part, total in parts.items():
            draft.add_output(total, metrics.output_name(name, part), Role.METRIC)
    return draft, {figure_name(term): term.coefficient for term in terms}


def _narrow(draft: Draft, mixed: MixedPrecision | None) -> None:
    if mixed is not None:
        values = draft.values()
        weights = [entry.name for entry in draft.inputs if entry.role in (Role.PARAMETER, Role.STATISTIC)]
        mixed.narrow(draft.model, [values[name] for name in weights])


@dataclass(frozen=True)
class _Gradients:
    draft: Draft
    untrained: Mapping[str, str]
    dense: Mapping[str, str]
    weighs_alike: str


def _draft_gradients(source: ir.Model, model: PreparedModel, options: CompileOptions) -> _Gradients:
    """Return the training graph up to the gradients: its last outputs, in the order of the reverse pass.

    Updates are emitted in that order too, so that a runtime updates each layer as soon as its gradient is known.
    """
    draft, mixed = _draft_of(source, model), precision.get(options.precision)
    builder, graph = draft.builder, draft.model.graph
    recompute = recompute_request.get(options.recompute)
    if recompute is not None and recompute.patterns:
        name_origins(graph)
    key = draft.add_input(Entry("rng/key", Role.KEY, KEY_DTYPE, KEY_SHAPE))
    policies = dict(zip(batch_normalizations(graph), model.normalization.policies, strict=True))
    draft.extents = (*extent_rules(policies), *teacher_rules(model.loss))
    updated: dict[ir.Value, ir.Value] = {}
    stopped: dict[ir.Value, ir.Node] = {}

    def step() -> ir.Value:
        return draft.add_input(STEP).value

    def bind(bound: ir.Graph) -> None:
        RECOGNIZED_TO_TRAIN.run(draft.model, None)
        HOISTED.run(draft.model, None)
        _narrow(draft, mixed)
        values = draft.values()
        places = numbered_draws(bound, model.data)  # before quantization, because its operators have no sample axis
        if changing_masks(bound):
            updated.update(train_pruning(bound, step))
        if is_quantized(bound):
            updated.update(train_quantization(bound, step, options.steps_per_epoch))
            stopped.update(simulate_quantization(bound, [values[f"param/{name}"] for name in model.state.trainable]))
        updated.update(bind_training(bound, policies, model.normalization.running_variance, key.value, step, places))
        RECOGNIZED_IN_MODE.run(draft.model, None)

    terms, read = add_loss(draft, model, bind, model.trained.predictions, key)
    with builder.attributed("the loss"):
        terms = terms_of_shard(terms, draft.model.graph, model.data)
    loss, _ = add_figures(draft, model, terms, read, over_all, is_step=True)
    weighs_alike = _add_weight(draft, terms)
    scale = draft.add_input(SCALE) if mixed is not None and mixed.initial_scale is not None else None
    reached, untrained = _reach(draft, model, loss, scale, stopped)
    rows, dense = _rows_of(draft, model, reached)
    gradients = {
        name: rows[name][1] if name in rows else all_reduce((gradient,), "gradient")[0] for name, gradient in reached.items()
    }
    gradients = without_rows(gradients, {name: held for name, held in model.held_rows.items() if name not in rows})
    finite = None
    if scale is not None:
        gradients = {name: gradient / builder.cast(scale, gradient.dtype) for name, gradient in gradients.items()}
        finite = all_finite(builder, gradients, PARTS_OF)
        draft.add_output(builder.op("Identity", draft.add_input(SCALE)), LOSS_SCALE, Role.DIAGNOSTIC)
        draft.add_output(builder.cast(builder.op("Not", finite), ir.DataType.FLOAT), SKIPPED, Role.DIAGNOSTIC)
    for statistic, value in updated.items():
        if statistic.is_graph_input():
            name, following = statistic.name or "", builder.tensor(value)
            if finite is not None:
                following = where(finite, following, builder.tensor(statistic))
            draft.add_output(following, f"next:{name}", Role.STATISTIC, updates=name)
    with builder.attributed("the random key"):
        draft.add_output(next_key(builder, key), "next:rng/key", Role.KEY, updates="rng/key")
    for name, gradient in gradients.items():
        if name in rows:
            draft.add_output(rows[name][0], f"indices:{name}", Role.INDICES)
            draft.add_output(gradient, f"rows:{name}", Role.ROWS)
        else:
            draft.add_output(gradient, f"grad:{name}", Role.GRADIENT)
    return _Gradients(draft, untrained, dense, weighs_alike)


def _add_weight(draft: Draft, terms: tuple[Term, ...]) -> str:
    """Add the divisor of the loss, whatever the optimizer: a later one may weigh gradients by it.

    Returns:
        The reason why there is no single weight; empty if there is one, or none is needed.
    """
    batch = [entry for entry in draft.inputs if entry.role in (Role.DATA, Role.LABEL)]
    values = draft.values()
    lengths = {extent for entry in batch for extent in entry.shape or () if not isinstance(extent, int)}
    try:
        weight = weight_of_batch(terms, {values[entry.name] for entry in batch}, len(lengths))
    except ValueError as error:
        return str(error)
    if weight is not None:
        draft.add_output(weight, LOSS_WEIGHT, Role.WEIGHT)
    return ""


def _reach(
    draft: Draft, model: PreparedModel, loss: Tensor, scale: Tensor | None, stopped: Mapping[ir.Value, ir.Node]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Emit the gradients of the parameters that the loss depends on, in the order of the reverse pass.

    Returns:
        The gradients, and the other selected parameters with the reason why they have none.
    """
    builder, values = draft.builder, draft.values()
    wrt = {name: values[f"param/{name}"] for name in model.state.trainable}
    cotangent = builder.scalar(1.0, loss) if scale is None else builder.cast(scale, loss.dtype)
    try:
        gradients = autodiff.differentiate(builder, {loss.value: cotangent}, list(wrt.values()))
    except GradientError as error:
        raise GradientError(error.problem, OPTIONS) from error
    reached = {name: gradient for name, value in wrt.items() if (gradient := gradients[value]) is not None}
    if stopped:
        refuse_lost_gradients(stopped, [wrt[name] for name in reached], loss.value)
    predictions = [prediction.name for prediction in model.trained.predictions]
    untrained = check_reached(model.state, reached, model.trained.model.graph, predictions)
    frozen = frozen_by_pattern(model.optimizer, untrained)
    position: dict[ir.Node | None, int] = {node: index for index, node in enumerate(builder.graph)}
    reached = dict(sorted(reached.items(), key=lambda item: position.get(item[1].value.producer(), 0)))
    return reached, {name: why for name, why in untrained.items() if name not in frozen}


def _rows_of(
    draft: Draft, model: PreparedModel, gradients: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, str]]:
    """Emit indices and rows of the gradients that are kept as rows; return the reason for each selected one that is not."""
    builder, values = draft.builder, draft.values()
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    dense: dict[str, str] = {}
    for name, gradient in gradients.items():
        table = values[f"param/{name}"]
        parts = model.sparse.parts(name, gradient, table, model.optimizer)
        if isinstance(parts, str):
            dense[name] = parts
        elif parts is not None:
            with builder.attributed(f"the rows of '{name}'"):
                own = coalesced(parts, builder.tensor(table), model.held_rows.get(name, ()))
                rows[name] = all_reduce_rows(*own, name)
    return rows, dense
