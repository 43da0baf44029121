"""Collectives: what workers that train one model together exchange, as semantic operators of a training graph.

A training graph says where a value of the whole batch is needed that a worker has only its part of. Alone, the part is the whole,
and every operator here is lowered to its operand. A session of several workers keeps them (``burnish.distributed``).

    AllReduce(x1, x2, ...; purpose, group) -> y1, y2, ...   the sums over the workers, each of the dtype and shape of its operand
    AllGather(x1, x2, ...; purpose, group) -> y1, y2, ...   [workers, ...]: what each worker has, in the order of the ranks
    AllReduceWhere(x, when) -> y                   the sum over the workers in steps in which ``when``, a boolean scalar, is true;
                                                   else x
    PartsOf(x) -> y                                the sum over the workers where the gradients that x is computed of are those of
                                                   each worker's part of the batch; x where they are of the whole batch
    AllReduceStart(x1, x2, ...) -> buffer          begins an AllReduce, which AllReduceFinish(buffer, x1, ...) -> y1, ... ends
    ReduceScatterStart(x1, x2, ...; owners) -> buffer   begins to add up each value on the worker that owns it; the owners ascend
    ReduceScatterFinish(buffer, x1, ...) -> y1, ..., end    the sums of this worker's values, whose shapes it reads, and a vector
                                                   of nothing
    GatherOwned(x1, x2, ..., when; owners, conditional) -> y1, y2, ...   of each value, what the worker that owns it has; with
                                                   ``conditional`` in steps in which ``when``, a boolean scalar, is true, else x
    SampleShare(x) -> y                            x times the part of the batch's samples that this worker has
    ShardCount(count, mean) -> count               the number of elements that a layer's statistics are of
    ShardMean(mean, variance, weight) -> mean, variance     the averages over the workers by weight, where each has its own

Every worker has the same parameters, and a part of the batch, of any size. The loss that a worker differentiates is its own sums
divided by the totals of all, so that the sum of the workers' losses is the loss of the batch, and that of their gradients its
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from burnish.graph import BURNISH_DOMAIN, NEVER_REPEATED_METADATA, Tensor
from burnish.ops.registry import Operation, gradient, lowering

MARKS = frozenset({"AllReduce", "AllReduceWhere", "PartsOf", "SampleShare", "ShardCount", "ShardMean"})
"""What a training graph says of several workers; alone, each is its operand."""
Purpose = Literal["count", "figure", "gradient", "average", "moments", "sums", "samples"]
"""What a collective is for: what is divided by; what is reported; gradients of parameters; running statistics; statistics of a
layer in forward and backward; how many samples each worker has."""


def all_reduce(tensors: tuple[Tensor, ...], purpose: Purpose, group: int = 0) -> tuple[Tensor, ...]:
    """Emit the sums over the workers of one value or several, in one exchange.

    Args:
        tensors: numbers; each worker's are of the same dtypes and shapes.
        purpose: what for.
        group: add up over groups of this many consecutive ranks; 0: over all.
    """
    builder = tensors[0].builder
    results = builder.op("AllReduce", *tensors, domain=BURNISH_DOMAIN, outputs=len(tensors), purpose=purpose, group=group or None)
    results = results if isinstance(results, tuple) else (results,)
    for result, tensor in zip(results, tensors, strict=True):
        result.value.type, result.value.shape = tensor.value.type, tensor.value.shape
    _mark(results[0])
    return results


def all_gather(tensor: Tensor, workers: int, purpose: Purpose, group: int = 0) -> Tensor:
    """Emit what each worker has, [workers, ...] in the order of the ranks; ``group`` as for ``all_reduce``."""
    dims = [] if tensor.shape is None else list(tensor.shape.dims)
    gathered = tensor.builder.op(
        "AllGather",
        tensor,
        domain=BURNISH_DOMAIN,
        purpose=purpose,
        group=group or None,
        shape=[group or workers, *dims],
        dtype=tensor.dtype,
    )
    _mark(gathered)
    return gathered


def all_reduce_where(tensor: Tensor, when: Tensor, parameter: str) -> Tensor:
    """Emit the sum over the workers of a value, in the steps in which ``when``, a boolean scalar, is true; else the value.

    What the graph makes of it in other steps differs between workers, and must not get into what it returns. ``parameter`` says
    the gradient of which initializer the value is.
    """
    return tensor.builder.op("AllReduceWhere", tensor, when, domain=BURNISH_DOMAIN, like=tensor, parameter=parameter)


def parts_of(tensor: Tensor) -> Tensor:
    """Emit the sum over the workers of a figure of gradients, where each worker has those of its part alone when it is taken."""
    return tensor.builder.op("PartsOf", tensor, domain=BURNISH_DOMAIN, like=tensor)


def gather_owned(tensors: tuple[Tensor, ...], owners: Sequence[int], when: Tensor | None = None) -> tuple[Tensor, ...]:
    """Emit what the owner of each tensor has.

    Args:
        tensors: with static shapes; of what others own, anything of that dtype and shape.
        owners: the rank for each.
        when: a boolean scalar that is the same on all workers: where it is false, nothing is exchanged, and each worker keeps
            what it gave.
    """
    builder = tensors[0].builder
    beside = () if when is None else (when,)
    found = builder.op(
        "GatherOwned",
        *tensors,
        *beside,
        domain=BURNISH_DOMAIN,
        outputs=len(tensors),
        owners=list(owners),
        conditional=None if when is None else 1,
    )
    results = found if isinstance(found, tuple) else (found,)
    for result, tensor in zip(results, tensors, strict=True):
        result.value.type, result.value.shape = tensor.value.type, tensor.value.shape
    _mark(results[0])
    return results


def sample_share(tensor: Tensor) -> Tensor:
    """Emit a value times the part of the batch's samples that this worker has: for what is the same on every worker."""
    return tensor.builder.op("SampleShare", tensor, domain=BURNISH_DOMAIN, like=tensor)


def shard_count(count: Tensor, mean: Tensor) -> Tensor:
    """Emit how many elements the statistics are of that ``mean`` belongs to; ``count`` is that of this worker's part."""
    return count.builder.op("ShardCount", count, mean, domain=BURNISH_DOMAIN, like=count)


def shard_mean(mean: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Emit the average over the workers of statistics, [C] each, where each worker has its own.

    Args:
        mean, variance: of this worker's part.
        weight: the number of elements that they are of, a scalar.
    """
    averages = mean.builder.op("ShardMean", mean, variance, weight, domain=BURNISH_DOMAIN, outputs=2, like=mean)
    averages[1].value.type, averages[1].value.shape = variance.value.type, variance.value.shape
    return averages[0], averages[1]


@gradient("AllReduce", domain=BURNISH_DOMAIN)
def all_reduce_gradient(op: Operation, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Each worker's part enters the sum on every worker: its gradient is the sum of theirs."""
    purpose, group = op.attribute("purpose"), op.attribute("group", 0)
    return tuple(None if dy is None else all_reduce((dy,), purpose, group)[0] for dy in cotangents)


@gradient("SampleShare", domain=BURNISH_DOMAIN)
def sample_share_gradient(op: Operation, dy: Tensor) -> Tensor:
    return sample_share(dy)


@gradient("ShardMean", domain=BURNISH_DOMAIN)
def shard_mean_gradient(
    op: Operation, d_mean: Tensor | None, d_variance: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None]:
    """Every worker reads the averages, of which each worker's statistics are its share."""
    weight = op.required(2)
    share = weight / all_reduce((weight,), "count")[0]
    d_mean, d_variance = (
        None if dy is None else all_reduce((dy,), "moments")[0] * dy.builder.cast(share, dy.dtype) for dy in (d_mean, d_variance)
    )
    return d_mean, d_variance, None


@lowering("AllReduce")
def lower_all_reduce(op: Operation) -> tuple[Tensor, ...]:
    return tuple(op.required(index) for index in range(len(op.inputs)))


@lowering("AllReduceWhere")
@lowering("PartsOf")
@lowering("SampleShare")
@lowering("ShardCount")
def lower_share(op: Operation) -> Tensor:
    return op.required(0)


@lowering("ShardMean")
def lower_shard_mean(op: Operation) -> tuple[Tensor, Tensor]:
    return op.required(0), op.required(1)


def _mark(result: Tensor) -> None:
    producer = result.value.producer()
    assert producer is not None
    producer.metadata_props[NEVER_REPEATED_METADATA] = ""
