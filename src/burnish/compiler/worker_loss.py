"""The loss of a worker's part of a batch: losses and gradients of all workers add up to those of the batch.

Each term is the worker's own total over the weight of all. Where there is one worker, both are its own, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from burnish.graph import Tensor
from burnish.losses import Term
from burnish.operators.collectives import SAMPLE_SHARE, all_reduce

EXTENTS = frozenset({"Shape", "Size"})
"""What depends on the shape of its operand alone."""


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


def is_plain_sum(term: Term) -> bool:
    """Whether a term is divided by nothing: its weight is the constant 1."""
    weight = term.weight.array
    return weight is not None and float(weight) == 1.0


def _of_shard(term: Term, data: Collection[ir.Value]) -> Term:
    if not is_plain_sum(term):
        return term._replace(weight=all_reduce((term.weight,), "count")[0])
    return term if reads(term.total.value, data) else term._replace(total=SAMPLE_SHARE(term.total))


def reads(value: ir.Value, sources: Collection[ir.Value]) -> bool:
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
