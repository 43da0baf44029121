"""Compilation: a source model, a loss and an optimizer become the six graphs of a program."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from burnish import losses, metrics, optim
from burnish.analysis.adapters import read_adapters
from burnish.analysis.dependence import left_out_weights, reasons_together
from burnish.compiler.batch_weight import warn_of_accumulation
from burnish.compiler.cached_features import Backbone, CachedFeatures, cut_backbone
from burnish.compiler.compilation import OPTIONS, Compilation
from burnish.compiler.distillation import has_teacher, prepare_teachers, with_projections
from burnish.compiler.doubts import find_doubts, mixing_doubts
from burnish.compiler.draft import finish
from burnish.compiler.evaluation import Evaluation, evaluated_predictions, state_within
from burnish.compiler.lifting import lift_state, rounded_weights, state_dtypes
from burnish.compiler.memory_limit import memory_saving, program_with
from burnish.compiler.modules import Norm, held_rows_of, take_module
from burnish.compiler.objectives import check_classes, objective_doubts
from burnish.compiler.predictions import Prediction, find_predictions
from burnish.compiler.selection import (
    HoldRows,
    ModelState,
    Trainable,
    find_held_rows,
    find_state,
    hold_frozen,
    settle_policies,
)
from burnish.compiler.sparse_tables import SparseOption, SparseRequest, warning_of
from burnish.errors import ConfigurationError, DenseGradientWarning, ObjectiveWarning, UntrainedWeightsWarning
from burnish.graph import garbage_kept, integer_weights
from burnish.importer import Bind, Source, described_bindings, load, refuse_gradients
from burnish.lowering import TargetLike, target_of
from burnish.modes import batch_normalizations, batch_normalizations_in_loops
from burnish.norms import (
    Auto,
    Frozen,
    NormPolicy,
    RunningVariance,
    default_running_variance,
    layer_names,
    resolve_policies,
)
from burnish.norms import get as get_policy
from burnish.optim.groups import frozen_by_pattern, without_freezing
from burnish.passes import (
    compute_in_float32,
    compute_integers,
    has_sixteen_bit_values,
    recognize_normalization,
)
from burnish.passes.precision import FULL, Precision
from burnish.passes.precision import get as get_precision
from burnish.passes.recompute_request import RecomputeOption
from burnish.program.inference import Inference
from burnish.program.program import Program
from burnish.program.signature import GraphSignature
from burnish.program.weights import Weights
from burnish.settings import is_whole

if TYPE_CHECKING:
    from burnish.importer.pytorch import ExportedModule

DEFAULT_LOSS = "cross_entropy"


@garbage_kept()
def compile(
    source: Source,
    *,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    loss: losses.LossLike = DEFAULT_LOSS,
    optimizer: str | optim.Optimizer = "sgd",
    trainable: Trainable = None,
    norm: str | NormPolicy | Mapping[str, str | NormPolicy] = "auto",
    metrics: Sequence[str | metrics.Metric] | None = None,
    precision: Precision = FULL,
    outputs: str | Sequence[str] | None = None,
    output: str | None = None,
    running_variance: str | None = None,
    recompute: RecomputeOption = None,
    memory: str | int | None = None,
    hold_rows: HoldRows = None,
    sparse: SparseOption = None,
    cached_features: CachedFeatures = None,
    batch: str | None = None,
    bind: Bind = None,
    steps_per_epoch: int | None = None,
    target: TargetLike = "onnxruntime",
) -> Program:
    """Compile a model into a training program of standard ONNX graphs.

    Args:
        source: path, bytes, ``onnx.ModelProto``, ``onnx_ir.Model`` or ``torch.nn.Module``; left as it is.
        example_inputs, dynamic_shapes: of a module: what it is called with, and which axes are open (``burnish.load``). A module
            also says what trains (``requires_grad``), which rows are held (``padding_idx``) and what each batch normalization
            does (``train()``, ``eval()``, ``momentum``): ``trainable``, ``hold_rows`` and ``norm`` may say otherwise.
        loss: a name out of ``burnish.losses.LOSSES``, with settings behind a colon (``huber:delta=0.5``); an object of
            ``burnish.losses``; or an ONNX graph (path, ``ModelProto`` or ``onnx_ir.Model``) whose inputs are named as the model's
            outputs, or else are labels.
        optimizer: a name out of ``burnish.optim.OPTIMIZERS``, with settings behind a colon (``rmsprop:centered=true``), or an
            object of ``burnish.optim``.
        trainable: None trains every weight, of a model with adapters (``burnish.surgery.lora``) these alone; else names,
            shell-style patterns, or a predicate over (name, array).
        norm: policy of batch normalization layers, or {pattern: policy}: ``auto`` (``train``, but ``frozen`` where none of the
            layer's parameters trains), ``train``, ``frozen`` (scale and bias train), ``frozen:all`` (they do not either),
            ``sync``, ``ghost:<size>``, ``renorm``, or an object of ``burnish.norms``.
            Settings come behind a colon, with commas between: ``train:momentum=cumulative``.
        metrics: names or objects of ``burnish.metrics``; by default accuracy where the loss is over class indices.
        precision: ``float32``: computed in the dtypes of the model, and in float32 what it has in float16 or bfloat16.
            ``float16`` or ``bfloat16``: mixed precision, products in sixteen bits; or its settings (``burnish.MixedPrecision``).
            Weights that train are float32 always. ``predict`` and exports stay in the dtypes of the model.
        outputs: the output the loss reads, or the outputs in order where it reads several; any other value of the model will
            do, by its name. By default all outputs, or all floating-point ones, if there are as many. A final activation that
            the loss applies itself (cross-entropy: Softmax) is stepped over, however it is written.
        output: the output of a model that computes its loss itself, in place of ``loss``; its labels are inputs of the model.
        running_variance: ``onnx`` (population variance) or ``pytorch`` (unbiased); by default PyTorch's for a model that
            PyTorch exported, the standard's for any other.
        recompute: None keeps every activation that the backward reads. Else activations are computed again in the backward, and
            gradients keep their bits: ``layers`` (only what passes between segments of the network is kept), a budget in bytes
            for the step's planned peak (a number, or ``1.5GB``; as little as fits is computed again), or patterns of nodes. A
            batch size to plan for comes behind a colon: ``1.5GB:batch=16``.
        memory: the most that a step may take on ONNX Runtime: the state, twice where it is updated, the batch, and all values
            between; a number of bytes or ``64MB``, for a batch of one, or ``64MB:batch=16``. As little as fits is computed again.
            What is planned is run, in a process of its own, where the system tells how much memory that takes (Linux).
        hold_rows: {initializer name: rows of axis 0, counted from 0} that training leaves as they are, bit for bit, whatever the
            optimizer: ``{"embedding.weight": [0]}`` for the row of ``nn.Embedding(padding_idx=0)``, which no file names.
        sparse: which embedding tables keep the gradient of the rows that a batch reads alone: a step then reads and writes no
            other rows, of the table or of the optimizer's state. None: no table. ``auto``: each that Gather alone reads, on axis
            0, where the weights come out the same (SGD without momentum, Adagrad, row-wise Adagrad; no weight decay). Names or
            patterns: these, also where the optimizer moves rows without a gradient (momentum, Adam, weight decay), which then
            miss that until a batch reads them.
        cached_features: where a frozen backbone ends, whose results are computed once for each sample: the name of a value, or of
            a node, whose first output is meant; several names; or ``auto``, right before what trains. ``step``, ``grad`` and
            ``evaluate`` then take these values, by their names, in place of the inputs that they are computed from, and a graph
            ``features`` computes them (``Session.features``); its weights are constants, in ``predict`` too, and no state. A
            ``Trainer`` computes the features before the first epoch. Nothing before them may train, draw at random (Dropout),
            or normalize by the batch.
        batch: None: batches have the extents that the model gives its inputs. ``open``: a model that was exported at batch 1
            trains on batches of any size (``burnish.load`` says which inputs hold samples).
        bind: {input: value}: inputs that are fixed to a value, and that the program and its exports do not have:
            ``{"sr": 16000, "state": 0}`` (``burnish.load`` says what it may be). An If that they decide becomes its branch.
        steps_per_epoch: of the training, for a quantized model whose observed ranges stay after a number of epochs.
        target: the runtime that the graphs are lowered for: a name, the TOML file of one (``burnish.lowering.target_file``), or a
            ``burnish.lowering.Target``, such as that of an engine.

    Returns:
        The program; nothing is run.

    Warns:
        ObjectiveWarning: the loss reads what it is not made for, such as probabilities where it applies a Softmax itself; what
            the model computes of a sample depends on the others of its batch; or what exported the model merged weights, made
            two of one, folded batch normalization into layers that train, or left scalars that look like parameters, and do not
            train unless ``trainable`` names them.
        DenseGradientWarning: ``sparse`` asks for a table whose every row a step reads and writes all the same, with the reason.
        UntrainedWeightsWarning: no gradient reaches weights that ``trainable`` selects, and the optimizer does not freeze: an
            operator such as Round or ArgMax stands in the way, they are integers, or the loss does not depend on them.

    Raises:
        ModelError: the source is not a valid ONNX model.
        ConfigurationError: an option does not fit the model, or no step fits ``memory``, with what takes it and what would help.
        GradientError: an operator between a trained weight and the loss has no gradient.
        UnsupportedOperatorError: an operator cannot be trained or lowered as it stands, or cannot take several samples where the
            batch is to be opened.
    """
    runtime, saving = target_of(target), memory_saving(memory, recompute)
    module, source, trainable, norm = take_module(source, example_inputs, dynamic_shapes, trainable, norm)
    in_file, model, trainable = _opened_to_train(source, batch, bind, trainable)
    objective, predictions = _objective(in_file, model, _requested_loss(loss, output), outputs)
    state, frozen, asked_for, policies = _selected(model, norm, trainable, objective, updater := optim.get(optimizer))
    _warn_of_objective(predictions, objective, _doubts(in_file, trained := {*state.trainable} - frozen, norm, trainable))
    held_rows = find_held_rows(model, state, held_rows_of(module, state, hold_rows))
    backbone = _backbone(model, cached_features, module, trained, policies, predictions, objective)
    if backbone is not None:
        model, state = backbone.rest, state_within(state, backbone.rest)
        updater = without_freezing(updater, frozen.difference(state.parameters), state.parameters)
    compilation = Compilation(
        model=model,
        in_file=in_file,
        backbone=backbone,
        predictions=predictions,
        loss=objective,
        metrics=_resolve_metrics(metrics, objective),
        data=_names(model.graph.inputs),  # before what is lifted becomes inputs too
        **_norms(backbone, asked_for, policies),
        running_variance=_resolve_running_variance(running_variance, model),
        target=runtime,
        state=state,
        held_rows={name: rows for name, rows in held_rows.items() if name in state.parameters},
        sparse=SparseRequest.of(sparse, state.trainable),
        rounded=rounded_weights(in_file, state),  # before these become inputs
        weights=_lifted(in_file, model, state),
        optimizer=updater,
        precision=get_precision(precision),
        norm=_norm_option(norm),
        **_as_loaded(batch, bind, steps_per_epoch),
        **({} if module is None else _of_module(module, objective, outputs, state)),
    )
    program = program_with(saving, compilation.program_that_computes_again)
    _warn_of_result(compilation, _held_by_the_file(in_file, bind) if trainable is None else {})
    return program


@garbage_kept()
def compile_inference(
    source: Source,
    *,
    loss: losses.LossLike | None = None,
    metrics: Sequence[str | metrics.Metric] | None = None,
    outputs: str | Sequence[str] | None = None,
    target: TargetLike = "onnxruntime",
) -> Inference:
    """Compile a model to predict and to be evaluated with. Nothing is differentiated: any model that a runtime runs will do.

    Args:
        source, metrics, outputs, target: as ``compile`` takes them.
        loss: the same; None leaves the graph ``evaluate`` out.

    Warns:
        ObjectiveWarning: the loss reads what it is not made for, or samples of a batch are mixed, as in ``compile``.

    Raises:
        ModelError, ConfigurationError, UnsupportedOperatorError: as ``compile``.
    """
    runtime = target_of(target)
    in_file, model = _opened(source, "inference")
    objective, predictions = _objective(in_file, model, DEFAULT_LOSS if loss is None else loss, outputs, is_read=loss is not None)
    layers = batch_normalizations(model.graph)
    compilation = Compilation(
        model=model,
        in_file=in_file,
        predictions=predictions,
        loss=objective,
        metrics=_resolve_metrics(metrics, objective),
        data=_names(model.graph.inputs),
        layers=layer_names(layers),
        policies=(Frozen(),) * len(layers),
        running_variance=default_running_variance(model),
        target=runtime,
    )
    graphs: dict[str, ir.Model] = {}
    signatures: dict[str, GraphSignature] = {}
    for name in ("predict",) if loss is None else ("predict", "evaluate"):
        graphs[name], signatures[name] = finish(getattr(compilation, name)(), name, runtime)
        compute_integers(graphs[name], runtime.float64)
    _warn_of_objective(predictions, objective)
    reported = ("loss", "loss_terms", "metrics", "predictions") if loss is not None else ()
    options = {name: value for name, value in compilation.options().items() if name in reported}
    return Inference(graphs["predict"], graphs.get("evaluate"), signatures, options, dict(model.metadata_props))


def _as_loaded(batch: str | None, bind: Bind, steps_per_epoch: int | None) -> dict[str, Any]:
    """What a program keeps of how its model was loaded, and of how long its epochs are."""
    if steps_per_epoch is not None and (not is_whole(steps_per_epoch) or steps_per_epoch < 1):
        raise ConfigurationError(f"steps_per_epoch={steps_per_epoch!r}: give a whole number of 1 or more")
    return {"batch": batch, "bind": described_bindings(bind or {}), "steps_per_epoch": steps_per_epoch}


def _opened(source: Source, purpose: str, batch: str | None = None, bind: Bind = None) -> tuple[ir.Model, ir.Model]:
    """Return a model in the dtypes of its file, and the one that computes in float32 what it has in sixteen bits.

    Raises:
        ModelError, UnsupportedOperatorError: what loading raises; ``purpose`` names what the model is for.
    """
    in_file = recognize_normalization(load(source, batch=batch, bind=bind))
    refuse_gradients(in_file, purpose)
    return in_file, compute_in_float32(in_file.clone()) if has_sixteen_bit_values(in_file) else in_file


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


def _opened_to_train(source: Source, batch: str | None, bind: Bind, trainable: Trainable) -> tuple[ir.Model, ir.Model, Trainable]:
    """Return both, and what trains: of a model with adapters these alone, where nothing else is said."""
    in_file, model = _opened(source, "burnish.compile", batch, bind)
    adapters = read_adapters(model.metadata_props).trained or None
    return in_file, model, adapters if trainable is None else trainable


def _requested_loss(loss: losses.LossLike, output: str | None) -> losses.LossLike:
    """Return the loss, or the one that reads the output in which the model computes its own.

    Raises:
        ConfigurationError: both are given.
    """
    if output is None:
        return loss
    if loss != DEFAULT_LOSS:
        raise ConfigurationError(f"loss and output: the model computes its loss as '{output}', so leave loss out, or output")
    return losses.output(output)


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
    model: ir.Model, norm: Norm, trainable: Trainable, objective: losses.Loss, updater: optim.Optimizer
) -> tuple[ModelState, frozenset[str], Mapping[ir.Node, NormPolicy], Mapping[ir.Node, NormPolicy]]:
    """Return what becomes state, what of it the optimizer freezes, the policies that were asked for, and those of layers."""
    layers, in_loops = batch_normalizations(model.graph), batch_normalizations_in_loops(model.graph)
    asked_for = resolve_policies(norm, [*layers, *in_loops])
    state = hold_frozen(with_projections(find_state(model, trainable), model.graph, objective), asked_for)
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


def _of_module(
    module: ExportedModule, objective: losses.Loss, outputs: str | Sequence[str] | None, state: ModelState
) -> dict[str, Any]:
    """Return what a compilation holds of a module beside its graph."""
    counted = {name: (start, module.batches_per_call[name]) for name, start in module.counted_batches.items()}
    return {"evaluation": _evaluation(module, objective, outputs, state), "counted_batches": counted}


def _evaluation(
    module: ExportedModule, objective: losses.Loss, outputs: str | Sequence[str] | None, state: ModelState
) -> Evaluation | None:
    """Return the form of a module in which it is evaluated, where that differs from the one in which it trains."""
    if module.inference is None:
        return None
    in_file, model = _opened(module.inference, "burnish.compile")
    predictions = evaluated_predictions(model, outputs, objective)
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
        warnings.warn(ObjectiveWarning(problem), stacklevel=4)


def _in_dtypes_of(model: ir.Model, in_file: ir.Model, loss: losses.Loss) -> losses.Loss:
    """Return the loss for a model that computes in float32 what its file has in sixteen bits; a graph that reads them changes."""
    if model is in_file or not isinstance(loss, losses.OnnxLoss) or not has_sixteen_bit_values(loss.model):
        return loss
    return losses.from_onnx(compute_in_float32(loss.model.clone(), keep_inputs=False), reduction=loss.reduction)


def _held_by_the_file(in_file: ir.Model, bind: Bind) -> dict[str, str]:
    """Return the weights that no selection would train, with the reason: integers, and those of branches that are never taken.

    Who binds an input chooses the branch.
    """
    return integer_weights(in_file.graph) | ({} if bind else left_out_weights(in_file.graph))


def _warn_of_result(compilation: Compilation, held: Mapping[str, str]) -> None:
    """Warn of micro-batches that weigh alike, of tables with dense gradients, and of weights that no gradient reaches.

    Args:
        compilation: which knows of them since the graphs were built.
        held: weights that no selection would train, with the reason.
    """
    weights = {**compilation.untrained, **held}
    warn_of_accumulation(compilation.optimizer, compilation.weighs_alike, stacklevel=4)
    if compilation.dense:
        warnings.warn(DenseGradientWarning(warning_of(compilation.dense)), stacklevel=4)
    if not weights:
        return
    one, several = "weight stays as it is: no gradient reaches it", "weights stay as they are: no gradient reaches them"
    stay = one if len(weights) == 1 else several
    problem = (
        f"{len(weights)} {stay}. {reasons_together(weights)}. Where that is meant, select only what is to train; else let "
        "the loss read another output, or export the model without what stands in the way. `burnish inspect` lists them all"
    )
    warnings.warn(UntrainedWeightsWarning(problem, OPTIONS, weights), stacklevel=4)


def _resolve_metrics(requested: Sequence[str | metrics.Metric] | None, loss: losses.Loss) -> tuple[metrics.Metric, ...]:
    if requested is None:
        requested = loss.default_metrics
    if isinstance(requested, str):
        requested = (requested,)
    if not isinstance(requested, Iterable):
        raise ConfigurationError(f"metrics must be None, or a list of names or objects of burnish.metrics, not {requested!r}")
    resolved = {metric.name: metric for metric in map(metrics.get, requested)}
    for metric in resolved.values():
        # A program holds its metrics by name, and they are looked up when it is opened.
        if not metrics.is_known(metric):
            raise ConfigurationError(
                f"metrics: burnish.metrics.METRICS does not lead from '{metric.name}' to this metric, and a program finds those "
                f"that it was compiled with there: enter METRICS['{metric.name.partition(':')[0]}'] = {type(metric).__name__}"
            )
    return tuple(resolved.values())


def _resolve_running_variance(requested: str | None, model: ir.Model) -> RunningVariance:
    if requested is None:
        return default_running_variance(model)
    try:
        return RunningVariance(requested)
    except ValueError:
        rules = ", ".join(f"'{rule.value}'" for rule in RunningVariance)
        raise ConfigurationError(f"running_variance: unknown rule '{requested}'; choose among {rules}") from None
