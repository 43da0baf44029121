"""A loss as a graph of its own: predictions, labels and a cotangent in; totals, loss and gradients out."""

from __future__ import annotations

from collections.abc import Mapping

from burnish import losses
from burnish.autodiff import differentiate
from oracles.small_graphs import Shape, SmallGraph


def prediction_graph(predictions: Mapping[str, Shape], dtype: str) -> SmallGraph:
    return SmallGraph({name: (dtype, shape) for name, shape in predictions.items()})


def label_specs(loss: losses.Loss, predictions: Mapping[str, Shape], dtype: str = "float64") -> tuple[losses.LabelSpec, ...]:
    graph = prediction_graph(predictions, dtype)
    return loss.label_specs([graph[name] for name in predictions])


def loss_graph(
    loss: losses.Loss,
    predictions: Shape | Mapping[str, Shape],
    dtype: str = "float64",
    labels: Mapping[str, tuple[str, Shape]] | None = None,
) -> SmallGraph:
    """(predictions, labels, dy) -> total, weight, loss, and ``d<name>`` for each prediction.

    Args:
        loss: with a single term.
        predictions: shapes by name, in the order of the loss's readings; a shape alone is that of ``x``.
        dtype: of the predictions.
        labels: dtypes and shapes by name, where they are not those that the loss asks for.
    """
    shapes = predictions if isinstance(predictions, Mapping) else {"x": predictions}
    specs = label_specs(loss, shapes, dtype)
    declared = {spec.name: (spec.dtype.numpy().name, spec.shape) for spec in specs} | dict(labels or {})
    graph = SmallGraph({**{name: (dtype, shape) for name, shape in shapes.items()}, **declared, "dy": (dtype, ())})
    read = [graph[name] for name in shapes]
    (term,) = loss.terms(read, [graph[spec.name] for spec in specs])
    assert term.total.dtype == term.weight.dtype == read[0].dtype
    assert tuple(term.total.shape or (0,)) == tuple(term.weight.shape or (0,)) == (0,)
    assert (term.coefficient, term.name) == (1.0, "")
    value = losses.combined([term])
    gradients = differentiate(graph.builder, {value.value: graph["dy"]}, [tensor.value for tensor in read])
    outputs = {"total": term.total, "weight": term.weight, "loss": value}
    for name, tensor in zip(shapes, read, strict=True):
        gradient = gradients[tensor.value]
        assert gradient is not None
        assert (gradient.dtype, gradient.shape) == (tensor.dtype, tensor.shape)
        outputs[f"d{name}"] = gradient
    for name, tensor in outputs.items():
        graph.output(name, tensor)
    graph.check()
    return graph
