"""That workers stay alike: what a training graph gives must be the same on every worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import attribute_value
from burnish.graph.uses import read_by
from burnish.operators.collectives import ALL_GATHER, ALL_GATHER_ROWS, ALL_REDUCE, ALL_REDUCE_FINISH, GATHER_OWNED, WORKER_RANK
from burnish.operators.semantic import semantic_operator
from burnish.program import Role
from burnish.program.signature import Entry

JOINING = frozenset({ALL_REDUCE, ALL_REDUCE_FINISH, ALL_GATHER, ALL_GATHER_ROWS, GATHER_OWNED})
"""What is the same on every worker behind it."""


def check_replicated(graph: ir.Graph, own: Collection[str], outputs: Mapping[str, Entry]) -> None:
    """Raise ConfigurationError where an output is computed from a worker's own part of the batch without an exchange.

    Args:
        graph: a training graph with its exchanges.
        own: the names of inputs of which each worker has its own.
        outputs: what the outputs are, by name, without those that may differ.
    """
    differing = {value for value in graph.inputs if value.name in own}
    for node in graph:
        if semantic_operator(node) in JOINING and not attribute_value(node, "group", 0):
            continue
        if WORKER_RANK.is_of(node) or any(value in differing for value in read_by(node)):
            differing.update(node.outputs)
    for value in graph.outputs:
        entry = outputs.get(value.name or "")
        if value not in differing or entry is None:
            continue
        if entry.role is Role.METRIC:
            raise ConfigurationError(
                f"parallel=...: the metric '{entry.name}' of a batch is no function of sums over its samples, and workers cannot "
                "add it up: leave it out of burnish.compile(metrics=...), and evaluate it with a session of one worker"
            )
        raise ConfigurationError(
            f"parallel=...: '{entry.name}' would differ between workers: it is computed from each worker's own part of the "
            "batch. Train this program with one worker"
        )
