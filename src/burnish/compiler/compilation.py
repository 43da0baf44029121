"""The graphs of a program, from a source model whose loss, state, policies and precision are settled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from burnish import losses, metrics, optim
from burnish.autodiff import differentiate
from burnish.compiler.batch_weight import WEIGHS_ALIKE, weight_of_batch
from burnish.compiler.cached_features import Backbone
from burnish.compiler.distillation import teacher_rules
from burnish.compiler.draft import Draft, entry_of, finish
from burnish.compiler.evaluation import Evaluation
from burnish.compiler.lowered_graphs import LoweredGraphs, semantic_target
from burnish.compiler.mixing import mix_inputs
from burnish.compiler.predictions import Prediction
from burnish.compiler.selection import (
    ModelState,
    check_reached,
)
from burnish.compiler.sparse_tables import SparseRequest
from burnish.compiler.update import SCALE, SKIPPED, STEP
from burnish.compiler.worker_loss import is_plain_sum, over_all, reads, terms_of_shard
from burnish.errors import ConfigurationError, GradientError
from burnish.graph import Builder, Tensor, name_sources
from burnish.graph.annotations import changing_masks
from burnish.graph.constants import is_quantized
from burnish.importer import SourceModel
from burnish.modes import batch_normalizations, bind_inference, bind_training, numbered_draws
from burnish.norms import (
    NormPolicy,
    RunningVariance,
    extent_rules,
)
from burnish.operators.collectives import PARTS_OF, all_reduce, all_reduce_rows
from burnish.operators.row_gradients import coalesced
from burnish.optim.accumulate import LOSS_WEIGHT
from burnish.optim.arithmetic import where
from burnish.optim.groups import frozen_by_pattern
from burnish.optim.loss_scale import LOSS_SCALE, all_finite
from burnish.optim.row_updates import hold_rows as holding
from burnish.optim.row_updates import without_rows
from burnish.program.program import Program
from burnish.program.signature import FEATURES, Entry, GraphSignature, Role
from burnish.program.state import ROUNDED, Weights
from burnish.quantization.graph import freezes_by_epochs
from burnish.random import KEY_DTYPE, KEY_SHAPE, next_key
from burnish.rewriting.fold_constants import fold_constants
from burnish.rewriting.precision import FULL, MixedPrecision
from burnish.rewriting.recompute_request import Recompute, name_origins
from burnish.rewriting.simulate_quantization import refuse_lost_gradients, simulate_quantization
from burnish.rewriting.stages import HOISTED, RECOGNIZED_IN_MODE, RECOGNIZED_TO_TRAIN
from burnish.rewriting.train_pruning import train_pruning
from burnish.rewriting.train_quantization import train_quantization
from burnish.targets import TARGETS, Target, check_has_dtypes, target_to_dict

LOSS, STEPS_PER_EPOCH = "loss", "steps_per_epoch"
OPTIONS = "trainable=[...] says what trains, outputs='...' what the loss reads"
"""What a message about a missing gradient says of the options."""


@dataclass
class Compilation:
    """A source model with all that a program is made of, and the graphs that it becomes.

    Attributes:
        model: computes what the file does, in float32 at least.
        in_file: the model with the dtypes of its file.
        predictions: what the loss reads.
        loss, metrics: what the graphs report.
        data: names of the inputs of ``model``.
        result_axes: along which axis samples stand in what the model gives and the loss reads, by name; inputs are marked.
        layers: names of the batch normalization layers.
        policies: of these, in the same order.
        running_variance: which variance running statistics hold.
        target: what the graphs are lowered for.
        state: the initializers that become parameters and statistics.
        weights: their values.
        optimizer: what updates the parameters.
        precision: None without mixed precision.
        norm: the policies as they were asked for.
        auto_frozen: the layers that are frozen because none of their parameters trains.
        recompute: None keeps every activation that the backward reads.
        held_rows: rows that training leaves as they are, by weight.
        sparse: the parameters that are asked to keep gradients of the rows that a batch reads alone.
        backbone: computes the features that ``model`` begins at; None where that begins at the inputs of the file.
        batch, bind: as the model was loaded.
        rounded: weights and statistics that the file has in a dtype of sixteen bits, with that dtype, and the state in float32.
        evaluation: the form in which a module is evaluated, where it is another.
        departures: why inference in the initial state does not compute what the file computes, as sentences.
        counted_batches: what counts of batches of a module started from, and how many a step adds, by its name for them.
        steps_per_epoch: of the training, where it is known.
        coefficients: of each figure that the loss is added up from; known once a graph has been built.
        untrained: weights that were to train and that no gradient reaches, with the reason; known once they are differentiated.
        dense: parameters that ``sparse`` asks for and whose gradients are of all rows, with the reason; known then too.
        weighs_alike: why an optimizer that accumulates would weigh micro-batches of any size alike; known then too.
    """

    model: ir.Model
    in_file: ir.Model
    predictions: tuple[Prediction, ...]
    loss: losses.Loss
    metrics: tuple[metrics.Metric, ...]
    data: tuple[str, ...]
    layers: tuple[str, ...]
    policies: tuple[NormPolicy, ...]
    running_variance: RunningVariance
    target: Target
    state: ModelState = field(default_factory=lambda: ModelState((), (), ()))
    weights: Weights = field(default_factory=lambda: Weights({}, {}))
    optimizer: optim.Optimizer = field(default_factory=optim.sgd)
    precision: MixedPrecision | None = None
    norm: str | dict[str, str] = "auto"
    auto_frozen: tuple[str, ...] = ()
    recompute: Recompute | None = None
    held_rows: dict[str, list[int]] = field(default_factory=dict)
    sparse: SparseRequest = field(default_factory=SparseRequest)
    backbone: Backbone | None = None
    batch: str | None = None
    bind: dict[str, Any] = field(default_factory=dict)
    result_axes: dict[str, int | None] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    departures: tuple[str, ...] = ()
    counted_batches: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps_per_epoch: int | None = None
    coefficients: dict[str, float] = field(default_factory=dict)
    untrained: dict[str, str] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    weighs_alike: str = ""
    as_it_came: SourceModel | None = None

    def program(self) -> Program:
        check_has_dtypes(self.in_file, self.target)
        semantic: dict[str, ir.Model] = {}
        signatures: dict[str, GraphSignature] = {}
        for name in ("grad", "evaluate", "predict", *([] if self.backbone is None else [FEATURES])):
            semantic[name], signatures[name] = finish(getattr(self, name)(), name, semantic_target(self.target))
        optimizer = self.optimizer if self.precision is None else self.precision.scaled(self.optimizer)
        optimizer = holding(optimizer, self.held_rows)
        graphs = LoweredGraphs.linked(semantic, signatures, optimizer, self.target, self.options())
        source = None if self.as_it_came is None else self.as_it_came.beside(self.weights.as_they_came())
        return Program(graphs, self.weights, source)

    def program_that_computes_again(self, recompute: Recompute | None) -> Program:
        """The program, with what its backward is to compute again."""
        self.recompute = recompute
        return self.program()

    def options(self) -> dict[str, Any]:
        return {
            "loss": self.loss.options(),
            **({} if self.coefficients == {LOSS: 1.0} else {"loss_terms": self.coefficients}),
            "optimizer": self.optimizer.options(),
            "metrics": [metric.name for metric in self.metrics],
            "precision": FULL if self.precision is None else self.precision.options(),
            "predictions": [prediction.options() for prediction in self.predictions],
            "trainable": list(self.state.trainable),
            **({"preparing": dict(self.state.preparing)} if self.state.preparing else {}),
            **({"hold_rows": self.held_rows} if self.held_rows else {}),
            **({"sparse": self.sparse.option} if self.sparse.option else {}),
            **({WEIGHS_ALIKE: self.weighs_alike} if self.weighs_alike else {}),
            **({} if self.backbone is None else {"cached_features": list(self.backbone.features)}),
            **({"batch": self.batch} if self.batch else {}),
            **({"bind": self.bind} if self.bind else {}),
            **(
                {STEPS_PER_EPOCH: self.steps_per_epoch}
                if is_quantized(self.model.graph) and freezes_by_epochs(self.model.graph)
                else {}
            ),
            "norm": self.norm,
            "norm_layers": {layer: str(policy) for layer, policy in zip(self.layers, self.policies, strict=True)},
            **({"auto_frozen_layers": list(self.auto_frozen)} if self.auto_frozen else {}),
            **({ROUNDED: self.rounded} if self.rounded else {}),
            **({"departures": list(self.departures)} if self.departures else {}),
            **({"counted_batches": self.counted_batches} if self.counted_batches else {}),
            "running_variance": self.running_variance.value,
            "recompute": None if self.recompute is None else self.recompute.options(),
            "target": self.target.name if TARGETS.get(self.target.name) == self.target else target_to_dict(self.target),
        }

    @functools.cached_property
    def folded(self) -> ir.Model:
        """The model with what hangs on constants alone computed. It is trained; an export keeps the form of its file."""
        folded = self.model.clone()
        fold_constants(folded)
        return folded

    def source(self, model: ir.Model | None = None) -> Draft:
        """A draft that holds the source model, with its data, parameters and statistics as inputs and no outputs."""
        draft = Draft((model or self.folded).clone())
        name_sources(draft.model.graph)
        draft.model.graph.outputs.clear()
        roles = {f"param/{name}": Role.PARAMETER for name in self.state.parameters}
        roles |= {f"stat/{name}": Role.STATISTIC for name in self.state.statistics}
        draft.inputs = [entry_of(value, roles.get(value.name or "", Role.DATA)) for value in draft.model.graph.inputs]
        return draft

    def predict(self) -> Draft:
        return self._inference((self.evaluation or self).in_file)

    def features(self) -> Draft:
        """The graph that computes what ``model`` begins at."""
        assert self.backbone is not None
        folded = self.backbone.model.clone()
        fold_constants(folded)
        return self._inference(folded)

    def _inference(self, model: ir.Model) -> Draft:
        """A model in inference mode, with its own outputs."""
        draft = self.source(model)
        names = [value.name or "" for value in model.graph.outputs]
        values = draft.values()
        draft.model.graph.outputs.extend(values[name] for name in names)
        bind_inference(draft.model.graph)
        RECOGNIZED_IN_MODE.run(draft.model, None)
        produced = list(draft.model.graph.outputs)
        draft.model.graph.outputs.clear()
        for name, value in zip(names, produced, strict=True):  # a running statistic may stand in for what a layer returned
            draft.add_output(draft.builder.tensor(value), name, Role.OUTPUT, sample_axis=self.result_axes.get(name, 0))
        return draft

    def evaluate(self) -> Draft:
        form = self.evaluation or self
        draft = self.source(form.folded)
        draft.extents = teacher_rules(self.loss)

        def bind(bound: ir.Graph) -> None:
            self._narrow(draft)
            bind_inference(bound)
            RECOGNIZED_IN_MODE.run(draft.model, None)

        terms, read = self._add_loss(draft, bind, form.predictions)
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
        draft.extents = (*extent_rules(policies), *teacher_rules(self.loss))
        updated: dict[ir.Value, ir.Value] = {}
        stopped: dict[ir.Value, ir.Node] = {}

        def step() -> ir.Value:
            return draft.add_input(STEP).value

        def bind(bound: ir.Graph) -> None:
            RECOGNIZED_TO_TRAIN.run(draft.model, None)
            HOISTED.run(draft.model, None)
            self._narrow(draft)
            values = draft.values()
            places = numbered_draws(bound, self.data)  # before quantization, whose operators say nothing of samples
            if changing_masks(bound):
                updated.update(train_pruning(bound, step))
            if is_quantized(bound):
                updated.update(train_quantization(bound, step, self.steps_per_epoch))
                stopped.update(simulate_quantization(bound, [values[f"param/{name}"] for name in self.state.trainable]))
            updated.update(bind_training(bound, policies, self.running_variance, key.value, step, places))
            RECOGNIZED_IN_MODE.run(draft.model, None)

        terms, read = self._add_loss(draft, bind, self.predictions, key)
        with builder.attributed("the loss"):
            terms = terms_of_shard(terms, draft.model.graph, self.data)
        loss, _ = self._add_figures(draft, terms, read, over_all, is_step=True)
        self._add_weight(draft, terms)
        gradients, indices, finite = self._gradients(draft, loss, stopped)
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
            if name in indices:
                draft.add_output(indices[name], f"indices:{name}", Role.INDICES)
                draft.add_output(gradient, f"rows:{name}", Role.ROWS)
            else:
                draft.add_output(gradient, f"grad:{name}", Role.GRADIENT)
        return draft

    def _add_weight(self, draft: Draft, terms: Sequence[losses.Term]) -> None:
        """Add what the loss is divided by, whatever the optimizer: another one may weigh gradients by it."""
        batch = [entry for entry in draft.inputs if entry.role in (Role.DATA, Role.LABEL)]
        values = draft.values()
        lengths = {extent for entry in batch for extent in entry.shape or () if not isinstance(extent, int)}
        try:
            weight = weight_of_batch(terms, {values[entry.name] for entry in batch}, len(lengths))
        except ValueError as error:
            self.weighs_alike = str(error)
        else:
            if weight is not None:
                draft.add_output(weight, LOSS_WEIGHT, Role.WEIGHT)

    def _gradients(
        self, draft: Draft, loss: Tensor, stopped: Mapping[ir.Value, ir.Node]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        """Emit the gradients of the parameters that the loss depends on, in the order the reverse pass reaches them; of those
        that are of some rows, which rows; and, of a scaled loss, whether they are finite."""
        builder, values = draft.builder, draft.values()
        wrt = {name: values[f"param/{name}"] for name in self.state.trainable}
        is_scaled = self.precision is not None and self.precision.initial_scale is not None
        scale = draft.add_input(SCALE) if is_scaled else None
        cotangent = builder.scalar(1.0, loss) if scale is None else builder.cast(scale, loss.dtype)
        try:
            gradients = differentiate(builder, {loss.value: cotangent}, list(wrt.values()))
        except GradientError as error:
            raise GradientError(error.problem, OPTIONS) from error
        reached = {name: gradient for name, value in wrt.items() if (gradient := gradients[value]) is not None}
        if stopped:
            refuse_lost_gradients(stopped, [wrt[name] for name in reached], loss.value)
        untrained = check_reached(self.state, reached, self.model.graph, [prediction.name for prediction in self.predictions])
        frozen = frozen_by_pattern(self.optimizer, untrained)
        self.untrained = {name: why for name, why in untrained.items() if name not in frozen}
        position: dict[ir.Node | None, int] = {node: index for index, node in enumerate(builder.graph)}
        reached = dict(sorted(reached.items(), key=lambda item: position.get(item[1].value.producer(), 0)))
        rows = self._of_rows(builder, reached, wrt)
        indices = {name: places for name, (places, _) in rows.items()}
        reached = {
            name: rows[name][1] if name in rows else all_reduce((gradient,), "gradient")[0] for name, gradient in reached.items()
        }
        reached = without_rows(reached, {name: held for name, held in self.held_rows.items() if name not in rows})
        if scale is None:
            return reached, indices, None
        reached = {name: gradient / builder.cast(scale, gradient.dtype) for name, gradient in reached.items()}
        return reached, indices, all_finite(builder, reached, PARTS_OF)

    def _of_rows(
        self, builder: Builder, gradients: Mapping[str, Tensor], tables: Mapping[str, ir.Value]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Emit, of the gradients that are kept as rows, the indices and rows; note why others that are asked for are not."""
        rows: dict[str, tuple[Tensor, Tensor]] = {}
        for name, gradient in gradients.items():
            parts = self.sparse.parts(name, gradient, tables[name], self.optimizer)
            if isinstance(parts, str):
                self.dense[name] = parts
            elif parts is not None:
                with builder.attributed(f"the rows of '{name}'"):
                    own = coalesced(parts, builder.tensor(tables[name]), self.held_rows.get(name, ()))
                    rows[name] = all_reduce_rows(*own, name)
        return rows

    def _narrow(self, draft: Draft) -> None:
        """Place the casts of mixed precision in a draft that is not bound to a mode yet."""
        if self.precision is not None:
            values = draft.values()
            weights = [entry.name for entry in draft.inputs if entry.role in (Role.PARAMETER, Role.STATISTIC)]
            self.precision.narrow(draft.model, [values[name] for name in weights])

    def _add_loss(
        self, draft: Draft, bind: Callable[[ir.Graph], Any], reads: Sequence[Prediction], key: Tensor | None = None
    ) -> tuple[tuple[losses.Term, ...], losses.Compared | None]:
        """Bind the graph to a mode, add the labels, and emit the terms of the loss; return them and what the metrics read.

        With a ``key`` it is training, which may mix samples.
        """
        predictions = _bound_predictions(draft, bind, reads)
        share = None if key is None else mix_inputs(draft, self.loss, key, is_cached=self.backbone is not None)
        specs = self.loss.label_specs(predictions)
        axes = [self.result_axes.get(each.name, 0) for each in reads]
        entries = [_label_entry(spec, _label_axis(spec.shape, predictions, axes, self.loss.readings)) for spec in specs]
        pairs = zip(specs, entries, strict=True)
        labels = tuple(_of_extents(draft, draft.add_input(entry), spec, predictions) for spec, entry in pairs)
        with draft.builder.attributed("the loss"):
            if share is not None and isinstance(self.loss, losses.Mixed):
                terms = self.loss.mixed_terms(predictions, labels, share, entries[0].sample_axis or 0)
            else:
                terms = self.loss.terms(predictions, labels)
        return terms, self.loss.compared(predictions, labels)

    def _add_figures(
        self,
        draft: Draft,
        terms: Sequence[losses.Term],
        read: losses.Compared | None,
        reported: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        is_step: bool = False,
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """Add the loss, each of its terms where it has several, and the metrics as outputs.

        Args:
            draft, terms, read: where to, of what.
            reported: emits what is reported of a sum that was taken here.
            is_step: whether this is a step of training, which reports no figures of whole data sets.

        Returns:
            The loss, as it was summed here; and by the name of each figure the totals that it is a function of.
        """
        with draft.builder.attributed("the loss"):
            loss = losses.combined(terms)
        draft.add_output(reported(loss), LOSS, Role.LOSS)
        totals: dict[str, dict[str, Tensor]] = {}
        values = draft.values()
        batch = {values[entry.name] for entry in draft.inputs if entry.role in (Role.DATA, Role.LABEL)}
        with draft.builder.attributed("the metrics"):
            for term in terms:
                name = _figure(term)
                totals[name] = {metrics.SUM: term.total}
                # A sum over samples adds up as it is. What no sample has a part in, such as a penalty, is the same in each batch.
                if term.of_batch or not is_plain_sum(term) or not reads(term.total.value, batch):
                    totals[name][metrics.COUNT] = term.weight
                if name != LOSS:
                    average = losses.average(term.total, term.weight)
                    draft.add_output(reported(draft.builder.cast(average, loss.dtype)), name, Role.METRIC)
            for metric in self.metrics:
                if metrics.is_of_rows(metric) and is_step:
                    continue
                if read is None:
                    raise ConfigurationError(
                        f"metrics: the loss {self.loss.name} compares nothing that '{metric.name}' could read: leave metrics out"
                    )
                if metrics.is_of_rows(metric):
                    for part, rows in metric.totals(read).items():
                        draft.add_output(rows, metrics.rows_name(metric.name, part), Role.METRIC)
                    continue
                totals[metric.name] = {part: reported(total) for part, total in metric.totals(read).items()}
                draft.add_output(metric.figure(read, totals[metric.name], loss.dtype), metric.name, Role.METRIC)
        return loss, totals


def _bound_predictions(draft: Draft, bind: Callable[[ir.Graph], Any], reads: Sequence[Prediction]) -> tuple[Tensor, ...]:
    """The predictions after the graph was bound to a mode; binding may put other values in their place."""
    outputs = draft.model.graph.outputs
    values = draft.values()
    names = list(dict.fromkeys(prediction.name for prediction in reads))
    outputs.extend(values[name] for name in names)
    bind(draft.model.graph)
    bound = {name: draft.builder.tensor(value) for name, value in zip(names, outputs, strict=True)}
    outputs.clear()
    return tuple(bound[prediction.name] for prediction in reads)


def _label_entry(spec: losses.LabelSpec, axis: int | None) -> Entry:
    bounds: dict[str, Any] = {"minimum": spec.minimum, "maximum": spec.maximum, "ignored": spec.ignored}
    return Entry(spec.name, Role.LABEL, spec.dtype, spec.shape, **bounds, two_values=spec.two_values, sample_axis=axis)


def _label_axis(
    shape: Sequence[int | str | None],
    predictions: Sequence[Tensor],
    axes: Sequence[int | None],
    readings: Sequence[losses.Reading],
) -> int | None:
    """The axis of samples of a label: that of the prediction, among the axes that the label has of it.

    Args:
        shape: of the label.
        predictions: what the loss reads.
        axes: along which samples stand in each.
        readings: how the loss reads each, which says where its classes are.
    """
    if not shape:
        return None
    for prediction, axis, reading in zip(predictions, axes, readings, strict=False):
        if not axis or prediction.shape is None:
            continue
        dims = [extent if isinstance(extent, int) else extent.value for extent in prediction.shape.dims]
        if list(shape).count(dims[axis]) == 1:
            return list(shape).index(dims[axis])
        if len(shape) == len(dims):
            return axis
        classes = reading.classes_along
        if len(shape) == len(dims) - 1:
            return axis - (classes is not None and classes % len(dims) < axis)
    return 0


def _of_extents(draft: Draft, label: Tensor, spec: losses.LabelSpec, predictions: Sequence[Tensor]) -> Tensor:
    """Hold a label to the extents of the prediction that no input has, so that a session cannot compare them with the batch.

    Such an extent is what a convolution leaves of an open length. A label of another would be broadcast, or in part not be read.
    """
    in_batch = {extent for entry in draft.inputs if entry.role is Role.DATA for extent in entry.shape or ()}
    unknown = [extent for extent in spec.shape[1:] if isinstance(extent, str) and extent not in in_batch]
    for prediction in predictions if unknown else ():
        axes, builder = _axes_of(spec.shape, prediction), draft.builder
        if axes is None:
            continue
        with builder.attributed("the extents of the labels"):
            # One Gather: where the extents are joined, ONNX Runtime's optimizer makes one of them "what is left over".
            target = builder.op("Gather", builder.op("Shape", prediction), builder.integers(axes), axis=0)
            return builder.op("Reshape", label, target, like=label)
    return label


def _axes_of(shape: Sequence[int | str | None], prediction: Tensor) -> list[int] | None:
    """The axes of a prediction that a label has, in their order; None where it has others."""
    dims = [] if prediction.shape is None else [d if isinstance(d, int) else d.value for d in prediction.shape.dims]
    axes: list[int] = []
    for extent in shape:
        start = axes[-1] + 1 if axes else 0
        if extent is None or extent not in dims[start:]:
            return None
        axes.append(dims.index(extent, start))
    return axes


def _figure(term: losses.Term) -> str:
    """The name that a term of the loss is reported under."""
    return f"{LOSS}:{term.name}" if term.name else LOSS
