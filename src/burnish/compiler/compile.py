"""Compilation: a source model, a loss and an optimizer become the six graphs of a program."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from burnish import losses, metrics, optim
from burnish.analysis.dependence import held_in_bodies, reasons_together
from burnish.autodiff import differentiate
from burnish.compiler.lifting import lift_state, rounded_weights, state_dtypes
from burnish.compiler.predictions import Prediction, find_predictions
from burnish.compiler.selection import (
    HoldRows,
    ModelState,
    Trainable,
    check_reached,
    find_held_rows,
    find_state,
    hold_frozen,
    settle_policies,
)
from burnish.compiler.worker_loss import over_all, terms_of_shard
from burnish.errors import ConfigurationError, GradientError, ObjectiveWarning, UntrainedWeightsWarning
from burnish.graph import Tensor, garbage_kept, integer_weights, name_sources
from burnish.importer import Bind, Source, described_bindings, load, refuse_gradients
from burnish.lowering import TARGETS, Target, TargetLike, target_of, target_to_dict
from burnish.modes import batch_normalizations, bind_inference, bind_training
from burnish.norms import (
    Auto,
    Frozen,
    NormPolicy,
    RunningVariance,
    default_running_variance,
    extent_rules,
    layer_names,
    resolve_policies,
)
from burnish.ops.collectives import PARTS_OF, all_reduce
from burnish.optim.groups import frozen_by_pattern
from burnish.optim.held_rows import hold_rows as holding
from burnish.optim.held_rows import without_rows
from burnish.optim.loss_scale import LOSS_SCALE, all_finite, where
from burnish.passes import (
    compute_in_float32,
    fold_constants,
    has_sixteen_bit_values,
    hoist_gather,
    recognize_normalization,
    recognize_training_normalization,
)
from burnish.passes.precision import FULL, MixedPrecision, Precision
from burnish.passes.precision import get as get_precision
from burnish.passes.recompute_request import Recompute, RecomputeOption, name_origins
from burnish.passes.recompute_request import get as recompute_request
from burnish.program.draft import Draft, entry_of, finish
from burnish.program.executable import check_extents
from burnish.program.inference import Inference
from burnish.program.lowered_graphs import SEMANTIC_GRAPHS, lowered_graphs, semantic_target
from burnish.program.program import GRAPH_NAMES, Program
from burnish.program.signature import Entry, GraphSignature, Role, Signature
from burnish.program.update import SCALE, SKIPPED, STEP
from burnish.program.weights import ROUNDED, Weights
from burnish.random import KEY_DTYPE, KEY_SHAPE, next_key

DEFAULT_LOSS = "cross_entropy"
LOSS = "loss"
OPTIONS = "trainable=[...] says what trains, outputs='...' what the loss reads"
"""What a message about a missing gradient says of the options."""


@garbage_kept()
def compile(
    source: Source,
    *,
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
    hold_rows: HoldRows = None,
    batch: str | None = None,
    bind: Bind = None,
    target: TargetLike = "onnxruntime",
) -> Program:
    """Compile a model into a training program of standard ONNX graphs.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        loss: a name out of ``burnish.losses.LOSSES``, with settings behind a colon (``huber:delta=0.5``); an object of
            ``burnish.losses``; or an ONNX graph (path, ``ModelProto`` or ``onnx_ir.Model``) whose inputs are named as the model's
            outputs, or else are labels.
        optimizer: a name out of ``burnish.optim.OPTIMIZERS``, with settings behind a colon (``rmsprop:centered=true``), or an
            object of ``burnish.optim``.
        trainable: None trains every weight; else names, shell-style patterns, or a predicate over (name, array).
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
        hold_rows: {initializer name: rows of axis 0, counted from 0} that training leaves as they are, bit for bit, whatever the
            optimizer: ``{"embedding.weight": [0]}`` for the row of ``nn.Embedding(padding_idx=0)``, which no file names.
        batch: None: batches have the extents that the model gives its inputs. ``open``: a model that was exported at batch 1
            trains on batches of any size (``burnish.load`` says which inputs hold samples).
        bind: {input: value}: inputs that are fixed to a value, and that the program and its exports do not have:
            ``{"sr": 16000, "state": 0}`` (``burnish.load`` says what it may be). An If that they decide becomes its branch.
        target: the runtime that the graphs are lowered for: a name, the TOML file of one (``burnish.lowering.target_file``), or a
            ``burnish.lowering.Target``, such as that of an engine.

    Returns:
        The program; nothing is run.

    Warns:
        ObjectiveWarning: the loss applies a Softmax or Sigmoid itself, and reads probabilities.
        UntrainedWeightsWarning: no gradient reaches weights that ``trainable`` selects, and the optimizer does not freeze: an
            operator such as QuantizeLinear or Round stands in the way, or the loss does not depend on them.

    Raises:
        ModelError: the source is not a valid ONNX model.
        ConfigurationError: an option does not fit the model.
        GradientError: an operator between a trained weight and the loss has no gradient.
        UnsupportedOperatorError: an operator cannot be trained or lowered as it stands, or cannot take several samples where the
            batch is to be opened.
    """
    runtime = target_of(target)
    in_file = recognize_normalization(load(source, batch=batch, bind=bind))
    refuse_gradients(in_file, "burnish.compile")
    model = compute_in_float32(in_file.clone()) if has_sixteen_bit_values(in_file) else in_file
    if output is not None:
        if loss != DEFAULT_LOSS:
            raise ConfigurationError(f"loss and output: the model computes its loss as '{output}', so leave loss out, or output")
        loss = losses.output(output)
    resolved_loss = _in_dtypes_of(model, in_file, losses.get(loss)).bind([value.name or "" for value in model.graph.outputs])
    predictions = find_predictions(model, outputs, resolved_loss.readings, resolved_loss.name)
    layers = batch_normalizations(model.graph)
    asked_for = resolve_policies(norm, layers)
    state = hold_frozen(find_state(model, trainable), asked_for)
    updater = optim.get(optimizer)
    policies = settle_policies(asked_for, state, frozen_by_pattern(updater, state.trainable))
    held = find_held_rows(model, state, hold_rows)
    # The inputs of the file: what is lifted becomes inputs too.
    data = tuple(value.name or "" for value in model.graph.inputs)
    dtypes, rounded = state_dtypes(in_file, state), rounded_weights(in_file, state)
    weights = lift_state(in_file, state, dtypes)
    if model is not in_file:
        lift_state(model, state, dtypes)
    compilation = _Compilation(
        model=model,
        predictions=predictions,
        state=state,
        loss=resolved_loss,
        optimizer=updater,
        metrics=_resolve_metrics(metrics, resolved_loss),
        precision=get_precision(precision),
        norm=str(norm) if isinstance(norm, str | NormPolicy) else {pattern: str(policy) for pattern, policy in norm.items()},
        layers=layer_names(layers),
        policies=tuple(policies[node] for node in layers),
        auto_frozen=tuple(
            name
            for name, node in zip(layer_names(layers), layers, strict=True)
            if isinstance(asked_for[node], Auto) and isinstance(policies[node], Frozen)
        ),
        running_variance=_resolve_running_variance(running_variance, model),
        target=runtime,
        data=data,
        weights=weights,
        recompute=recompute_request(recompute),
        held_rows=held,
        batch=batch,
        bind=described_bindings(bind or {}),
        in_file=in_file,
        rounded=rounded,
    )
    for prediction in predictions:
        if prediction.bounded_by is not None:
            warnings.warn(ObjectiveWarning(prediction.warning(resolved_loss.name)), stacklevel=3)
    program = compilation.program()
    untrained = compilation.untrained | (integer_weights(in_file.graph) if trainable is None else {})
    if untrained:
        warnings.warn(_untrained_warning(untrained), stacklevel=3)
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
        ObjectiveWarning: the loss applies a Softmax or Sigmoid itself, and reads probabilities.

    Raises:
        ModelError, ConfigurationError, UnsupportedOperatorError: as ``compile``.
    """
    runtime = target_of(target)
    in_file = recognize_normalization(load(source))
    refuse_gradients(in_file, "inference")
    model = compute_in_float32(in_file.clone()) if has_sixteen_bit_values(in_file) else in_file
    resolved = _in_dtypes_of(model, in_file, losses.get(DEFAULT_LOSS if loss is None else loss))
    resolved = resolved.bind([value.name or "" for value in model.graph.outputs])
    predictions = () if loss is None else find_predictions(model, outputs, resolved.readings, resolved.name)
    layers = batch_normalizations(model.graph)
    compilation = _Compilation(
        model=model,
        predictions=predictions,
        state=ModelState((), (), ()),
        loss=resolved,
        optimizer=optim.get("sgd"),
        metrics=_resolve_metrics(metrics, resolved),
        precision=None,
        norm="auto",
        layers=layer_names(layers),
        policies=(Frozen(),) * len(layers),
        auto_frozen=(),
        running_variance=default_running_variance(model),
        target=runtime,
        data=tuple(value.name or "" for value in model.graph.inputs),
        weights=Weights({}, {}),
        recompute=None,
        held_rows={},
        batch=None,
        bind={},
        in_file=in_file,
        rounded={},
    )
    graphs: dict[str, ir.Model] = {}
    signatures: dict[str, GraphSignature] = {}
    for name in ("predict",) if loss is None else ("predict", "evaluate"):
        graphs[name], signatures[name] = finish(getattr(compilation, name)(), name, runtime)
    for prediction in predictions:
        if prediction.bounded_by is not None:
            warnings.warn(ObjectiveWarning(prediction.warning(resolved.name)), stacklevel=3)
    known = ("loss", "loss_terms", "metrics", "predictions") if loss is not None else ()
    options = {name: value for name, value in compilation.options().items() if name in known}
    return Inference(graphs["predict"], graphs.get("evaluate"), signatures, options, dict(model.metadata_props))


def _in_dtypes_of(model: ir.Model, in_file: ir.Model, loss: losses.Loss) -> losses.Loss:
    """Return the loss for a model that computes in float32 what its file has in sixteen bits; a graph that reads them changes."""
    if model is in_file or not isinstance(loss, losses.OnnxLoss) or not has_sixteen_bit_values(loss.model):
        return loss
    return losses.from_onnx(compute_in_float32(loss.model.clone(), keep_inputs=False), reduction=loss.reduction)


def _untrained_warning(weights: Mapping[str, str]) -> UntrainedWeightsWarning:
    stay = (
        "weight stays as it is: no gradient reaches it"
        if len(weights) == 1
        else ("weights stay as they are: no gradient reaches them")
    )
    return UntrainedWeightsWarning(
        f"{len(weights)} {stay}. {reasons_together(weights)}. Where that is meant, select only what is to train; else let "
        "the loss read another output, or export the model without what stands in the way. `burnish inspect` lists them all",
        OPTIONS,
        weights,
    )


def _resolve_metrics(requested: Sequence[str | metrics.Metric] | None, loss: losses.Loss) -> tuple[metrics.Metric, ...]:
    if requested is None:
        requested = loss.default_metrics
    if isinstance(requested, str):
        requested = (requested,)
    if not isinstance(requested, Iterable):
        raise ConfigurationError(f"metrics must be None, or a list of names or objects of burnish.metrics, not {requested!r}")
    resolved = {(found := metrics.get(metric)).name: found for metric in requested}
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
        known = ", ".join(f"'{rule.value}'" for rule in RunningVariance)
        raise ConfigurationError(f"running_variance: unknown rule '{requested}'; choose among {known}") from None


@dataclass
class _Compilation:
    model: ir.Model
    predictions: tuple[Prediction, ...]
    state: ModelState
    loss: losses.Loss
    optimizer: optim.Optimizer
    metrics: tuple[metrics.Metric, ...]
    precision: MixedPrecision | None
    norm: str | dict[str, str]
    layers: tuple[str, ...]
    policies: tuple[NormPolicy, ...]
    auto_frozen: tuple[str, ...]
    running_variance: RunningVariance
    target: Target
    data: tuple[str, ...]
    weights: Weights
    recompute: Recompute | None
    held_rows: dict[str, list[int]]
    batch: str | None
    bind: dict[str, Any]
    in_file: ir.Model
    """The model with the dtypes of its file; ``model`` computes the same in float32 at least."""
    rounded: dict[str, str]
    """Weights and statistics that the file has in a dtype of sixteen bits, with that dtype, and the state in float32."""
    coefficients: dict[str, float] = field(default_factory=dict)
    """Of each figure that the loss is added up from; known once a graph has been built."""
    untrained: dict[str, str] = field(default_factory=dict)
    """Weights that were to train and that no gradient reaches, with the reason; known once they have been differentiated."""

    def program(self) -> Program:
        semantic: dict[str, ir.Model] = {}
        signatures: dict[str, GraphSignature] = {}
        for name in SEMANTIC_GRAPHS:
            semantic[name], signatures[name] = finish(getattr(self, name)(), name, semantic_target(self.target))
        optimizer = self.optimizer if self.precision is None else self.precision.scaled(self.optimizer)
        optimizer = holding(optimizer, self.held_rows)
        models, update_signatures = lowered_graphs(semantic, signatures["grad"], optimizer, self.target, self.recompute)
        signature = Signature({name: (signatures | update_signatures)[name] for name in GRAPH_NAMES})
        check_extents(signature, self.target)
        return Program(**models, signature=signature, weights=self.weights, options=self.options(), semantic=semantic)

    def options(self) -> dict[str, Any]:
        return {
            "loss": self.loss.options(),
            **({} if self.coefficients == {LOSS: 1.0} else {"loss_terms": self.coefficients}),
            "optimizer": self.optimizer.options(),
            "metrics": [metric.name for metric in self.metrics],
            "precision": FULL if self.precision is None else self.precision.options(),
            "predictions": [prediction.options() for prediction in self.predictions],
            "trainable": list(self.state.trainable),
            **({"hold_rows": self.held_rows} if self.held_rows else {}),
            **({"batch": self.batch} if self.batch else {}),
            **({"bind": self.bind} if self.bind else {}),
            "norm": self.norm,
            "norm_layers": {layer: str(policy) for layer, policy in zip(self.layers, self.policies, strict=True)},
            **({"auto_frozen_layers": list(self.auto_frozen)} if self.auto_frozen else {}),
            **({ROUNDED: self.rounded} if self.rounded else {}),
            "running_variance": self.running_variance.value,
            "recompute": None if self.recompute is None else self.recompute.options(),
            "target": self.target.name if TARGETS.get(self.target.name) == self.target else target_to_dict(self.target),
        }

    @functools.cached_property
    def folded(self) -> ir.Model:
        """The model with what hangs on constants alone computed. It is trained; an export keeps the form of its file."""
        return fold_constants(self.model.clone())

    def source(self, model: ir.Model | None = None) -> Draft:
        """A draft that holds the source model, with its data, parameters and statistics as inputs and no outputs."""
        draft = Draft((model or self.folded).clone())
        name_sources(draft.model.graph)
        draft.model.graph.outputs.clear()
        roles = dict.fromkeys(self.data, Role.DATA)
        roles |= {f"param/{name}": Role.PARAMETER for name in self.state.parameters}
        roles |= {f"stat/{name}": Role.STATISTIC for name in self.state.statistics}
        draft.inputs = [entry_of(value, roles[value.name or ""]) for value in draft.model.graph.inputs]
        return draft

    def predict(self) -> Draft:
        draft = self.source(self.in_file)
        names = [value.name or "" for value in self.in_file.graph.outputs]
        values = draft.values()
        draft.model.graph.outputs.extend(values[name] for name in names)
        bind_inference(draft.model.graph)
        produced = list(draft.model.graph.outputs)
        draft.model.graph.outputs.clear()
        for value in produced:
            draft.add_output(draft.builder.tensor(value), value.name or "", Role.OUTPUT)
        return draft

    def evaluate(self) -> Draft:
        draft = self.source()

        def bind(bound: ir.Graph) -> None:
            self._narrow(draft)
            bind_inference(bound)

        terms, read = self._add_loss(draft, bind)
        self.coefficients = {_figure(term): term.coefficient for term in terms}
        totals = self._add_figures(draft, terms, read)[1]
        for name, parts in totals.items():
            for part, total in parts.items():
                draft.add_output(total, metrics.output_name(name, part), Role.METRIC)
        return draft

    def grad(self) -> Draft:
        """The training graph up to the gradients, which are its last outputs, in the order the reverse pass reaches them.

        Updates are emitted in that order too: a runtime that walks back from the outputs then updates the last layer first,
        and needs no gradient to wait for that of the first layer.
        """
        draft = self.source()
        builder, graph = draft.builder, draft.model.graph
        if self.recompute is not None and self.recompute.patterns:
            name_origins(graph)
        key = draft.add_input(Entry("rng/key", Role.KEY, KEY_DTYPE, KEY_SHAPE))
        policies = dict(zip(batch_normalizations(graph), self.policies, strict=True))
        draft.extents = extent_rules(policies)
        updated: dict[ir.Value, ir.Value] = {}

        def step() -> ir.Value:
            return draft.add_input(STEP).value

        def bind(bound: ir.Graph) -> None:
            recognize_training_normalization(draft.model)
            hoist_gather(draft.model)
            self._narrow(draft)
            updated.update(bind_training(bound, policies, self.running_variance, key.value, step, self.data))

        terms, read = self._add_loss(draft, bind)
        with builder.attributed("the loss"):
            terms = terms_of_shard(terms, draft.model.graph, self.data)
        loss, _ = self._add_figures(draft, terms, read, over_all)
        gradients, finite = self._gradients(draft, loss)
        if finite is not None:
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
            draft.add_output(gradient, f"grad:{name}", Role.GRADIENT)
        return draft

    def _gradients(self, draft: Draft, loss: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Emit the gradients of the parameters that the loss depends on, in the order the reverse pass reaches them; and, of a
        scaled loss, whether they are finite."""
        builder, values = draft.builder, draft.values()
        wrt = {name: values[f"param/{name}"] for name in self.state.trainable}
        state = [values[entry.name] for entry in draft.inputs if entry.role in (Role.PARAMETER, Role.STATISTIC)]
        held = held_in_bodies(builder.graph, [loss.value], state)
        wrt = {name: value for name, value in wrt.items() if value not in held}
        is_scaled = self.precision is not None and self.precision.initial_scale is not None
        scale = draft.add_input(SCALE) if is_scaled else None
        cotangent = builder.scalar(1.0, loss) if scale is None else builder.cast(scale, loss.dtype)
        try:
            gradients = differentiate(builder, {loss.value: cotangent}, list(wrt.values()))
        except GradientError as error:
            raise GradientError(error.problem, OPTIONS) from error
        reached = {name: gradient for name, value in wrt.items() if (gradient := gradients[value]) is not None}
        untrained = check_reached(self.state, reached, self.model.graph, [prediction.name for prediction in self.predictions])
        frozen = frozen_by_pattern(self.optimizer, untrained)
        self.untrained = {name: why for name, why in untrained.items() if name not in frozen}
        position: dict[ir.Node | None, int] = {node: index for index, node in enumerate(builder.graph)}
        reached = dict(sorted(reached.items(), key=lambda item: position.get(item[1].value.producer(), 0)))
        reached = {name: all_reduce((gradient,), "gradient")[0] for name, gradient in reached.items()}
        reached = without_rows(reached, self.held_rows)
        if scale is None:
            return reached, None
        reached = {name: gradient / builder.cast(scale, gradient.dtype) for name, gradient in reached.items()}
        return reached, all_finite(builder, reached, PARTS_OF)

    def _narrow(self, draft: Draft) -> None:
        """Place the casts of mixed precision in a draft that is not bound to a mode yet."""
        if self.precision is not None:
            values = draft.values()
            weights = [entry.name for entry in draft.inputs if entry.role in (Role.PARAMETER, Role.STATISTIC)]
            self.precision.narrow(draft.model, [values[name] for name in weights])

    def _add_loss(self, draft: Draft, bind: Callable[[ir.Graph], Any]) -> tuple[tuple[losses.Term, ...], losses.Compared | None]:
        """Bind the graph to a mode, add the labels, and emit the terms of the loss; return them and what the metrics read."""
        predictions = self._bound_predictions(draft, bind)
        labels = tuple(draft.add_input(_label_entry(spec)) for spec in self.loss.label_specs(predictions))
        with draft.builder.attributed("the loss"):
            terms = self.loss.terms(predictions, labels)
        return terms, self.loss.compared(predictions, labels)

    def _add_figures(
        self,
        draft: Draft,
        terms: Sequence[losses.Term],
        read: losses.Compared | None,
        reported: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """Add the loss, each of its terms where it has several, and the metrics as outputs.

        Args:
            draft, terms, read: where to, of what.
            reported: emits what is reported of a sum that was taken here.

        Returns:
            The loss, as it was summed here; and by the name of each figure the totals that it is a function of.
        """
        with draft.builder.attributed("the loss"):
            loss = losses.combined(terms)
        draft.add_output(reported(loss), LOSS, Role.LOSS)
        totals: dict[str, dict[str, Tensor]] = {}
        with draft.builder.attributed("the metrics"):
            for term in terms:
                name = _figure(term)
                totals[name] = {metrics.SUM: term.total, metrics.COUNT: term.weight}
                if name != LOSS:
                    average = losses.average(term.total, term.weight)
                    draft.add_output(reported(draft.builder.cast(average, loss.dtype)), name, Role.METRIC)
            for metric in self.metrics:
                if read is None:
                    raise ConfigurationError(
                        f"metrics: the loss {self.loss.name} compares nothing that '{metric.name}' could read: leave metrics out"
                    )
                totals[metric.name] = {part: reported(total) for part, total in metric.totals(read).items()}
                draft.add_output(metric.figure(read, totals[metric.name], loss.dtype), metric.name, Role.METRIC)
        return loss, totals

    def _bound_predictions(self, draft: Draft, bind: Callable[[ir.Graph], Any]) -> tuple[Tensor, ...]:
        """The predictions after the graph was bound to a mode; binding may put other values in their place."""
        outputs = draft.model.graph.outputs
        values = draft.values()
        names = list(dict.fromkeys(prediction.name for prediction in self.predictions))
        outputs.extend(values[name] for name in names)
        bind(draft.model.graph)
        bound = {name: draft.builder.tensor(value) for name, value in zip(names, outputs, strict=True)}
        outputs.clear()
        return tuple(bound[prediction.name] for prediction in self.predictions)


def _label_entry(spec: losses.LabelSpec) -> Entry:
    return Entry(spec.name, Role.LABEL, spec.dtype, spec.shape, minimum=spec.minimum, maximum=spec.maximum, ignored=spec.ignored)


def _figure(term: losses.Term) -> str:
    """The name that a term of the loss is reported under."""
    return f"{LOSS}:{term.name}" if term.name else LOSS
