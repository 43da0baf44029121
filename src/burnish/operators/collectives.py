"""Collectives: exchanges between workers that train one model together, as semantic operators of a training graph.

A training graph marks each value that must cover the whole batch, although a worker has only its part. For a single worker the
part is the whole, and every operator here is lowered to its operand. A session of several workers keeps them
(``burnish.distributed``).

    AllReduce(x1, x2, ...; purpose, group) -> y1, y2, ...     the sums over the workers, each like its operand
    AllGather(x1, x2, ...; purpose, group) -> y1, y2, ...     [workers, ...]: the values of all workers, in rank order
    AllReduceWhere(x, when; parameter) -> y         the sum over the workers in steps with ``when``, a boolean scalar, true;
                                                    otherwise x, which differs between workers and must not reach the
                                                    graph's results. ``parameter``: the initializer with gradient x
    PartsOf(x) -> y                                 the sum over the workers if x is computed from gradients of each worker's
                                                    part of the batch; x if from gradients of the whole batch
    AllReduceStart(x1, x2, ...) -> buffer           begins an AllReduce; AllReduceFinish(buffer, x1, ...) -> y1, ... ends it
    ReduceScatterStart(x1, x2, ...; owners) -> buffer         begins to sum each value on the worker that owns it; owners ascend
    ReduceScatterFinish(buffer, x1, ...) -> y1, ..., end      the sums of this worker's values, whose shapes it reads, and an
                                                    empty vector
    GatherOwned(x1, x2, ..., when; owners, conditional) -> y1, y2, ...    each value from the worker that owns it; with
                                                    ``conditional``, only in steps with ``when``, a boolean scalar, true,
                                                    otherwise x
    SampleShare(x) -> y                             x times this worker's share of the batch's samples, for values that are
                                                    the same on every worker
    ShardCount(count, mean) -> count                the number of elements in the statistics of the layer of ``mean``;
                                                    ``count`` is the number in this worker's part
    ShardMean(mean, variance, weight) -> mean, variance       the averages [C] over the workers by weight, the number of
                                                    elements, if each worker has its own statistics
    AllReduceRows(indices, rows; table) -> indices, rows      the sum over the workers of a table's gradient kept as rows:
                                                    each row that any worker read, ascending. ``table``: the initializer
    AllGatherRows(indices1, rows1, indices2, ...) -> indices1, rows1, ...     the rows of all workers, any number from each,
                                                    in rank order
    LookUpRows(part1, indices1, part2, ...; tables, extents) -> rows1, ...    rows of tables spread over the workers: a worker
                                                    holds the rows whose index modulo the number of workers is its rank.
                                                    ``tables``: the initializers; ``extents``: their numbers of rows
    ScatterRows(indices1, rows1, indices2, ...) -> places1, rows1, ...        sends each row to the worker that holds it in the
                                                    table; a worker gets its rows in rank order, with their places in its part
    WorkerRank() -> rank                            the rank of this worker, an int64 scalar

Every worker has the same parameters, and a part of the batch of any size. The loss that a worker differentiates is its own sums
divided by the totals over all workers, so the workers' losses add up to the loss of the batch, and their gradients to its
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import onnx_ir as ir

from burnish.graph import Tensor, static_shape
from burnish.operators.registry import Operation
from burnish.operators.semantic import Operands, OutputType, SemanticOperator, like

Purpose = Literal["count", "figure", "gradient", "average", "moments", "sums", "samples", "rows"]
"""The purpose of a collective: divisors; reported figures; gradients of parameters; running statistics; statistics of a layer in
forward and backward; numbers of samples per worker; sums over the rows of spread tables.
"""


def _exchanged(operands: Operands) -> tuple[Tensor, ...]:
    """Return the operands without the number of samples (``counted``) and the condition (``conditional``)."""
    beside = (operands.attributes.get("counted") or 0) + (operands.attributes.get("conditional") or 0)
    tensors = [tensor for tensor in operands.tensors if tensor is not None]
    return tuple(tensors[: len(tensors) - beside])


def _like_exchanged(operands: Operands) -> list[OutputType]:
    return [OutputType.of(tensor) for tensor in _exchanged(operands)]


def _like_finished(operands: Operands) -> list[OutputType]:
    return [OutputType.of(tensor) for tensor in operands.tensors[1:] if tensor is not None]


def _gathered(operands: Operands) -> list[OutputType]:
    workers = operands.attributes.get("group") or operands.attributes["workers"]
    return [
        OutputType(tensor.dtype, ir.Shape([workers, *([] if tensor.shape is None else tensor.shape.dims)]))
        for tensor in _exchanged(operands)
    ]


def _any_rows(operands: Operands) -> list[OutputType]:
    """The dtypes of the operands, with a first extent known only at run time."""
    return [
        OutputType(tensor.dtype, None if tensor.shape is None else ir.Shape([None, *tensor.shape.dims[1:]]))
        for tensor in _exchanged(operands)
    ]


def _looked_up(operands: Operands) -> list[OutputType]:
    tensors = _exchanged(operands)
    return [
        OutputType(part.dtype, None if part.shape is None else ir.Shape([indices.dimension(0), *part.shape.dims[1:]]))
        for part, indices in zip(tensors[::2], tensors[1::2], strict=True)
    ]


def _buffer(operands: Operands) -> list[OutputType]:
    """A vector of all exchanged values; of unknown size if not all of them may be exchanged."""
    tensors = _exchanged(operands)
    extents = [static_shape(tensor.value) for tensor in tensors]
    whole = "owners" not in operands.attributes and not operands.attributes.get("conditional") and None not in extents
    size = sum(math.prod(shape or ()) for shape in extents) if whole else None
    return [OutputType(tensors[0].dtype, ir.Shape([size]))]


def all_reduce(tensors: tuple[Tensor, ...], purpose: Purpose, group: int = 0) -> tuple[Tensor, ...]:
    """Emit the sums over the workers of one or more values, in one exchange.

    Args:
        tensors: numbers, with the same dtypes and shapes on each worker.
        purpose: the purpose of the sums.
        group: sum over groups of this many consecutive ranks; 0: over all.
    """
    return ALL_REDUCE.emit(*tensors, purpose=purpose, group=group or None)


def all_gather(tensor: Tensor, workers: int, purpose: Purpose, group: int = 0) -> Tensor:
    """Emit the values of all workers, [workers, ...] in rank order; ``group`` as for ``all_reduce``."""
    return ALL_GATHER(tensor, purpose=purpose, group=group or None, workers=workers)


def all_reduce_rows(indices: Tensor, rows: Tensor, table: str) -> tuple[Tensor, Tensor]:
    """Emit the sum over the workers of a table's gradient.

    Args:
        indices: the rows that this worker's part of the batch read, int64 [n], ascending and unique.
        rows: the gradient of each, [n, ...].
        table: the initializer.
    """
    every, sums = ALL_REDUCE_ROWS.emit(indices, rows, table=table)
    return every, sums


def gather_owned(tensors: tuple[Tensor, ...], owners: Sequence[int], when: Tensor | None = None) -> tuple[Tensor, ...]:
    """Emit each tensor from its owner.

    Args:
        tensors: with static shapes; for tensors of other owners, any value of the same dtype and shape.
        owners: the rank for each.
        when: a boolean scalar, the same on all workers: if false, nothing is exchanged and each worker keeps its own values.
    """
    beside = () if when is None else (when,)
    return GATHER_OWNED.emit(*tensors, *beside, owners=list(owners), conditional=None if when is None else 1)


def all_reduce_gradient(op: Operation, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Each worker's part enters the sum on every worker, so its gradient is the sum of their gradients."""
    purpose, group = op.attribute("purpose"), op.attribute("group", 0)
    return tuple(None if dy is None else all_reduce((dy,), purpose, group)[0] for dy in cotangents)


def share_gradient(op: Operation, dy: Tensor) -> Tensor:
    return SAMPLE_SHARE(dy)


def shard_mean_gradient(
    op: Operation, d_mean: Tensor | None, d_variance: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None]:
    """Every worker reads the averages, and each worker's statistics are its share of them."""
    weight = op.required(2)
    share = weight / all_reduce((weight,), "count")[0]
    d_mean, d_variance = (
        None if dy is None else all_reduce((dy,), "moments")[0] * dy.builder.cast(share, dy.dtype) for dy in (d_mean, d_variance)
    )
    return d_mean, d_variance, None


def lower_to_operands(op: Operation) -> tuple[Tensor, ...]:
    """For a single worker, the result of an exchange is the operand."""
    return tuple(op.required(index) for index in range(len(op.outputs)))


ALL_REDUCE = SemanticOperator(
    "AllReduce", ("x...",), ("y...",), _like_exchanged, repeatable=False, gradient=all_reduce_gradient, lowering=lower_to_operands
)
ALL_GATHER = SemanticOperator("AllGather", ("x...",), ("y...",), _gathered, repeatable=False)
ALL_REDUCE_WHERE = SemanticOperator("AllReduceWhere", ("x", "when"), ("y",), like("x"), lowering=lower_to_operands)
PARTS_OF = SemanticOperator("PartsOf", ("x",), ("y",), like("x"), lowering=lower_to_operands)
ALL_REDUCE_START = SemanticOperator("AllReduceStart", ("x...",), ("buffer",), _buffer, repeatable=False)
ALL_REDUCE_FINISH = SemanticOperator(
    "AllReduceFinish", ("buffer", "x..."), ("y...",), _like_finished, shares_memory={"y...": "buffer"}, repeatable=False
)
REDUCE_SCATTER_START = SemanticOperator("ReduceScatterStart", ("x...",), ("buffer",), _buffer, repeatable=False)
REDUCE_SCATTER_FINISH = SemanticOperator(
    "ReduceScatterFinish",
    ("buffer", "x..."),
    ("y...",),
    lambda operands: [*_like_finished(operands), OutputType(operands["buffer"].dtype, ir.Shape([0]))],
    shares_memory={"y...": "buffer"},
    repeatable=False,
)
OWN_GRADIENTS = SemanticOperator(
    "OwnGradients", ("x...",), ("y...",), _like_exchanged, shares_memory={"y...": "x..."}, repeatable=False
)
GATHER_OWNED = SemanticOperator(
    "GatherOwned", ("x...",), ("y...",), _like_exchanged, shares_memory={"y...": "x..."}, repeatable=False
)
SAMPLE_SHARE = SemanticOperator("SampleShare", ("x",), ("y",), like("x"), gradient=share_gradient, lowering=lower_to_operands)
SHARD_COUNT = SemanticOperator("ShardCount", ("count", "mean"), ("total",), like("count"), lowering=lower_to_operands)
SHARD_MEAN = SemanticOperator(
    "ShardMean",
    ("mean", "variance", "weight"),
    ("mean", "variance"),
    like("mean", "variance"),
    gradient=shard_mean_gradient,
    lowering=lower_to_operands,
)
WORKER_RANK = SemanticOperator("WorkerRank", (), ("rank",), lambda operands: [OutputType(ir.DataType.INT64, ir.Shape([]))])
ALL_REDUCE_ROWS = SemanticOperator(
    "AllReduceRows", ("indices", "rows"), ("indices", "rows"), _any_rows, constants=("indices",), lowering=lower_to_operands
)
ALL_GATHER_ROWS = SemanticOperator("AllGatherRows", ("x...",), ("y...",), _any_rows, repeatable=False)
LOOK_UP_ROWS = SemanticOperator("LookUpRows", ("x...",), ("y...",), _looked_up, repeatable=False)
SCATTER_ROWS = SemanticOperator("ScatterRows", ("x...",), ("y...",), _any_rows, repeatable=False)
MARKS = frozenset({ALL_REDUCE, ALL_REDUCE_ROWS, ALL_REDUCE_WHERE, PARTS_OF, SAMPLE_SHARE, SHARD_COUNT, SHARD_MEAN})
"""The marks for several workers in a training graph; for a single worker, each is its operand."""
EXCHANGES = frozenset(
    {
        ALL_REDUCE,
        ALL_REDUCE_START,
        ALL_REDUCE_FINISH,
        REDUCE_SCATTER_START,
        REDUCE_SCATTER_FINISH,
        ALL_GATHER,
        ALL_GATHER_ROWS,
        GATHER_OWNED,
        LOOK_UP_ROWS,
        OWN_GRADIENTS,
        SCATTER_ROWS,
        WORKER_RANK,
    }
)
"""The operators in a graph for several workers; an engine without other workers does not need them."""

OPERATORS = sorted(MARKS | EXCHANGES, key=lambda operator: operator.name)
