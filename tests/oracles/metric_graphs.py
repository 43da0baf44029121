"""The totals and the figure of a metric as a graph of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from burnish import losses, metrics
from oracles.small_graphs import SmallGraph

FIGURE = "figure"


def metric_graph(metric: str | metrics.Metric, loss: losses.Loss, shape: Any, dtype: str = "float64") -> SmallGraph:
    """A graph of inputs ``x`` and ``label`` with an output per total, by its name, and the output ``figure``."""
    metric = metrics.get(metric)
    graph = SmallGraph({"x": (dtype, shape)})
    (spec,) = loss.label_specs((graph["x"],))
    graph = SmallGraph({"x": (dtype, shape), "label": (spec.dtype.numpy().name, spec.shape)})
    compared = loss.compared((graph["x"],), (graph["label"],))
    assert compared is not None
    totals = metric.totals(compared)
    graph.output(FIGURE, metric.figure(compared, totals, graph["x"].dtype))
    for name, total in totals.items():
        graph.output(name, total)
    graph.check()
    return graph


def added(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The totals of several runs, added up; without their figures."""
    return {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0] if name != FIGURE}
