"""The loss and the metrics of a graph: its labels, the terms of the loss, and the totals that figures are computed from.

Each term is a total divided by a weight. With several workers, each has its own total and the weight of all, so that losses and
gradients of the workers add up to those of the batch. With one worker, both are its own.
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
"""Operators whose results depend only on the shape of their operand."""


def add_loss(
    draft: Draft, model: PreparedModel, bind: Callable[[ir.Graph], Any], reads: Sequence[Prediction], key: Tensor | None = None
) -> tuple[tuple[losses.Term, ...], losses.Compared | None]:
    """Bind the graph to a mode, add the labels, and emit the terms of the loss; return them and the values that the metrics read.

    A ``key`` makes it a training graph, which may mix samples.
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
    """Add the loss, each of its terms if there are several, and the metrics as outputs.

    Args:
        draft: the graph to add to.
        model: the prepared model.
        terms: terms of the loss.
        read: values that the metrics read.
        reported: a function that emits the reported form of a sum, such as the sum over all workers.
        is_step: True for a training step, which reports no figures of whole data sets.

    Returns:
        The loss as summed in this graph, and for each figure the totals that it is computed from, by name.
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
            # A sum over samples adds up. A term that depends on no sample, such as a penalty, is the same in each batch.
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
    """Return the name under which a term of the loss is reported."""
    return f"{LOSS}:{term.name}" if term.name else LOSS


def terms_of_shard(terms: Sequence[Term], graph: ir.Graph, data: Collection[str]) -> tuple[Term, ...]:
    """Return the terms of a worker's loss, which is their sum.

    A term that is a plain sum (its weight is the constant 1) adds up as it is. A term that depends on no data, such as a penalty
    on the weights, is the same on every worker and is multiplied by the worker's share of the samples.

    Args:
        terms: terms of the loss of a batch.
        graph: the graph that holds them.
        data: names of the model's inputs.
    """
    inputs = {value for value in graph.inputs if value.name in data}
    return tuple(_of_shard(term, inputs) for term in terms)


def over_all(total: Tensor) -> Tensor:
    """Emit the sum of a reported figure over all workers."""
    return all_reduce((total,), "figure")[0]


def weight_of_batch(terms: Sequence[Term], batch: Collection[ir.Value], lengths: int) -> Tensor | None:
    """Return the divisor of a loss, a scalar; None if it is constant and micro-batches have equal weights.

    A term that depends on no input, such as a penalty on the weights, is the same in each micro-batch and does not count.

    Args:
        terms: terms of the loss of a batch.
        batch: inputs that hold the batch.
        lengths: number of open extents of these inputs. If the batch is the only one, all divisors that count elements are
            multiples of one number.

    Raises:
        ValueError: the terms have unrelated divisors, so that no weight of a micro-batch is right for all of them.
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
    """Return the sample axis of a label: that of the prediction, counted among the axes that the label shares with it."""
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
    """Reshape a label to the extents of the prediction that no input has, so that a session cannot compare them with the batch.

    Such an extent is computed, for example by a convolution over an open length. Without the check, a label of another extent
    would be broadcast or read in part.
    """
    in_batch = {extent for entry in draft.inputs if entry.role is Role.DATA for extent in entry.shape or ()}
    unknown = [extent for extent in spec.shape[1:] if isinstance(extent, str) and extent not in in_batch]
    for prediction in predictions if unknown else ():
        axes, builder = _axes_of(spec.shape, prediction), draft.builder
        if axes is None:
            continue
        with builder.attributed("the extents of the labels"):
            # One Gather: if the extents were concatenated, ONNX Runtime's optimizer would turn one of them into -1 (inferred).
            target = builder.op("Gather", builder.op("Shape", prediction), builder.integers(axes), axis=0)
            return builder.op("Reshape", label, target, like=label)
    return label


def _axes_of(shape: Sequence[int | str | None], prediction: Tensor) -> list[int] | None:
    """Return the axes of a prediction that a label has, in order; None if it has others."""
    dims = [] if prediction.shape is None else [d if isinstance(d, int) else d.value for d in prediction.shape.dims]
    axes: list[int] = []
    for extent in shape:
        start = axes[-1] + 1 if axes else 0
        if extent is None or extent not in dims[start:]:
            return None
        axes.append(dims.index(extent, start))
    return axes


def _mix_inputs(draft: Draft, loss: Loss, key: Tensor, is_cached: bool) -> Tensor | None:
    """Make a training graph read mixed samples, in place, if its loss is ``Mixed``.

    Returns:
        The share that a sample has in its mixture, a float32 scalar; None if nothing is mixed.

    Raises:
        ConfigurationError: the model has several inputs, an input that cannot be mixed, or cached features; or ``Mixed`` is only
            a part of the loss.
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
    weight = term.weight.array
    return weight is not None and float(weight) == 1.0


def _reads(value: ir.Value, sources: Collection[ir.Value]) -> bool:
    """True if a value is computed from the elements of one of ``sources``, not only from their shapes."""
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
