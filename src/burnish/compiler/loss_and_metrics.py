"""The loss and the metrics of a graph: its labels, the terms of the loss, and the totals that figures are computed of.

Each term is a total over a weight, and a worker of several has its own total over the weight of all: losses and gradients of all
workers add up to those of the batch. Where there is one worker, both are its own, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from burnish import losses, metrics
from burnish.compiler.draft import Draft
from burnish.compiler.predictions import Prediction
from burnish.compiler.prepare import PreparedModel
from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.losses import Loss, Mixed, Term
from burnish.operators.collectives import SAMPLE_SHARE, all_reduce
from burnish.program.signature import Entry, Role

LOSS = "loss"
EXTENTS = frozenset({"Shape", "Size"})
"""What depends on the shape of its operand alone."""


def add_loss(
    draft: Draft, model: PreparedModel, bind: Callable[[ir.Graph], Any], reads: Sequence[Prediction], key: Tensor | None = None
) -> tuple[tuple[losses.Term, ...], losses.Compared | None]:
    """Bind the graph to a mode, add the labels, and emit the terms of the loss; return them and what the metrics read.

    With a ``key`` it is training, which may mix samples.
    """
    predictions = _bound_predictions(draft, bind, reads)
    share = None if key is None else _mix_inputs(draft, model.loss, key, is_cached=model.backbone is not None)
    specs = model.loss.label_specs(predictions)
    axes = [model.result_axes.get(each.name, 0) for each in reads]
    entries = [_label_entry(spec, _label_axis(spec.shape, predictions, axes, model.loss.readings)) for spec in specs]
    pairs = zip(specs, entries, strict=True)
    labels = tuple(_of_extents(draft, draft.add_input(entry), spec, predictions) for spec, entry in pairs)
    with draft.builder.attributed("the loss"):
        if share is not None and isinstance(model.loss, losses.Mixed):
            terms = model.loss.mixed_terms(predictions, labels, share, entries[0].sample_axis or 0)
        else:
            terms = model.loss.terms(predictions, labels)
    return terms, model.loss.compared(predictions, labels)


def add_figures(
    draft: Draft,
    model: PreparedModel,
    terms: Sequence[losses.Term],
    read: losses.Compared | None,
    reported: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    is_step: bool = False,
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Add the loss, each of its terms where it has several, and the metrics as outputs.

    Args:
        draft, model, terms, read: where to, of what.
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
            name = figure_name(term)
            totals[name] = {metrics.SUM: term.total}
            # A sum over samples adds up as it is. What no sample has a part in, such as a penalty, is the same in each batch.
            if term.of_batch or not _is_plain_sum(term) or not _reads(term.total.value, batch):
                totals[name][metrics.COUNT] = term.weight
            if name != LOSS:
                average = losses.average(term.total, term.weight)
                draft.add_output(reported(draft.builder.cast(average, loss.dtype)), name, Role.METRIC)
        for metric in model.metrics:
            if metrics.is_of_rows(metric) and is_step:
                continue
            if read is None:
                raise ConfigurationError(
                    f"metrics: the loss {model.loss.name} compares nothing that '{metric.name}' could read: leave metrics out"
                )
            if metrics.is_of_rows(metric):
                for part, rows in metric.totals(read).items():
                    draft.add_output(rows, metrics.rows_name(metric.name, part), Role.METRIC)
                continue
            totals[metric.name] = {part: reported(total) for part, total in metric.totals(read).items()}
            draft.add_output(metric.figure(read, totals[metric.name], loss.dtype), metric.name, Role.METRIC)
    return loss, totals


def figure_name(term: losses.Term) -> str:
    """The name that a term of the loss is reported under."""
    return f"{LOSS}:{term.name}" if term.name else LOSS


def terms_of_shard(terms: Sequence[Term], graph: ir.Graph, data: Collection[str]) -> tuple[Term, ...]:
    """Return the terms that a worker's loss is the sum of.

    A term that is a plain sum (its weight is the constant 1) adds up as it is; one that depends on no data, such as a penalty of
    the weights, is the same on every worker, and each has the share of it that it has of the samples.

    Args:
        terms: of the loss of a batch.
        graph: the graph they are in.
        data: names of the model's inputs.
    """
    inputs = {value for value in graph.inputs if value.name in data}
    return tuple(_of_shard(term, inputs) for term in terms)


def over_all(total: Tensor) -> Tensor:
    """Emit the sum over all workers of a figure that is reported."""
    return all_reduce((total,), "figure")[0]


def weight_of_batch(terms: Sequence[Term], batch: Collection[ir.Value], lengths: int) -> Tensor | None:
    """Return what the terms of a loss are divided by, a scalar; None where it is a constant, and micro-batches weigh alike.

    What depends on no input, such as a penalty of the weights, is the same in each micro-batch and has no say.

    Args:
        terms: of the loss of a batch.
        batch: the inputs that a batch comes in.
        lengths: how many open extents these have. Where there is one, the batch, terms that are divided by numbers of elements
            are divided by multiples of one number.

    Raises:
        ValueError: the terms are divided by numbers that do not go together: no weight of a micro-batch is right for all.
    """
    weights: list[Tensor] = []
    is_summed = False
    for term in terms:
        constant = term.weight.array
        if constant is None:
            weights.append(term.weight)
        elif _reads(term.total.value, batch):
            is_summed = True
    if not weights:
        return None
    first, *others = weights
    of_extents = lengths <= 1 and not any(_reads(weight.value, batch) for weight in weights)
    if is_summed or not all(of_extents or _are_alike(first.value, other.value) for other in others):
        raise ValueError("its terms are divided by numbers that do not go together")
    return first


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


def _mix_inputs(draft: Draft, loss: Loss, key: Tensor, is_cached: bool) -> Tensor | None:
    """Let a training graph read mixed samples, in place, where its loss is ``Mixed``.

    Args:
        draft: the graph, bound to training, without its loss.
        loss: of the program.
        key: of the step.
        is_cached: whether the graph begins at features that are computed once.

    Returns:
        The share that a sample has in its mixture, a float32 scalar; None where nothing is mixed.

    Raises:
        ConfigurationError: the model has several inputs, or one that cannot be mixed, or its features are computed once; or a
            part of the loss is ``Mixed``.
    """
    if not isinstance(loss, Mixed):
        if any(isinstance(inner, Mixed) for inner in _inside(loss)):
            raise ConfigurationError(
                f"{Mixed.name}: {loss.name} holds it, and samples are mixed under the loss as a whole alone: put {Mixed.name} "
                f"around {loss.name}, where that reads one output and its labels, or train without mixing"
            )
        return None
    if is_cached:
        raise ConfigurationError(
            f"{loss.name}: samples are mixed anew in each step, and features of a frozen backbone are computed once for each "
            "sample: compile without cached_features"
        )
    entries = [entry for entry in draft.inputs if entry.role is Role.DATA]
    if len(entries) != 1 or not entries[0].extents:
        names = ", ".join(f"'{entry.name}'" for entry in entries)
        raise ConfigurationError(
            f"{loss.name}: samples of one input are mixed, and the model reads {names}: train without mixing, or mix what you "
            "feed it"
        )
    value, axis = draft.values()[entries[0].name], entries[0].sample_axis
    if axis is None:
        raise ConfigurationError(
            f"{loss.name}: the input '{value.name}' has no samples, and samples are mixed: say along which axis it has them "
            "(sample_axis=..., --sample-axis), or train without mixing"
        )
    if not entries[0].dtype.is_floating_point() and entries[0].dtype.name not in ("UINT8", "INT8"):
        raise ConfigurationError(
            f"{loss.name}: the input '{value.name}' is {entries[0].dtype.name}: indices cannot be mixed, only numbers: train "
            "without mixing"
        )
    readers = tuple(value.uses())
    builder = Builder(draft.model.graph, before=next(iter(draft.model.graph), None))
    with builder.attributed("the mixing of samples"):
        draws = loss.draws(builder, builder.tensor(key.value))
        mixed, share = loss.mixed_inputs(builder.tensor(value), draws, axis)
    for reader, index in readers:
        reader.replace_input_with(index, mixed.value)
    return draft.builder.tensor(share.value)


def _inside(loss: Loss) -> Iterator[Loss]:
    """The losses that a loss is made of."""
    summands = getattr(loss, "summands", ())
    for inner in (getattr(loss, "loss", None), *(summand.loss for summand in summands)):
        if isinstance(inner, Loss):
            yield inner
            yield from _inside(inner)


def _of_shard(term: Term, data: Collection[ir.Value]) -> Term:
    if not _is_plain_sum(term):
        return term._replace(weight=all_reduce((term.weight,), "count")[0])
    return term if _reads(term.total.value, data) else term._replace(total=SAMPLE_SHARE(term.total))


def _is_plain_sum(term: Term) -> bool:
    """Whether a term is divided by nothing: its weight is the constant 1."""
    weight = term.weight.array
    return weight is not None and float(weight) == 1.0


def _reads(value: ir.Value, sources: Collection[ir.Value]) -> bool:
    """Whether a value is computed from the elements of one of ``sources``, and not from their shapes alone."""
    seen, pending = {value}, [value]
    while pending:
        read = pending.pop()
        if read in sources:
            return True
        producer = read.producer()
        if producer is None or producer.op_type in EXTENTS:
            continue
        for operand in producer.inputs:
            if operand is not None and operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return False


def _are_alike(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether two values are computed alike from the same values."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    if one.const_value is not None and other.const_value is not None:
        left, right = one.const_value.numpy(), other.const_value.numpy()
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    left_node, right_node = one.producer(), other.producer()
    if left_node is None or right_node is None or one.index() != other.index():
        return False
    return (
        left_node.op_identifier() == right_node.op_identifier()
        and {name: str(value) for name, value in left_node.attributes.items()}
        == {name: str(value) for name, value in right_node.attributes.items()}
        and len(left_node.inputs) == len(right_node.inputs)
        and all(_are_alike(left, right) for left, right in zip(left_node.inputs, right_node.inputs, strict=True))
    )
