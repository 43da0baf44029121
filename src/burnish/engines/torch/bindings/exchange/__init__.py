"""Exchanges with other workers (``burnish.engines.communicator``), and kernels for shared memory between workers of one machine.

All operands of an exchange are sent in one buffer, images with channels last, the layout of gradients of convolutions. Rows of
tables are sent as bytes, for all tables together.

In a distributed table, row ``r`` is on worker ``r % workers``, at place ``r // workers`` of its part, which balances the load
even if the most frequent rows have the lowest indices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from burnish.engines.communicator import GRADIENTS, Communicator, Pending, SharedBuffer, SharedRows
from burnish.engines.torch.native import declare_kernel
from burnish.engines.torch.translate.rules import Call, translates
from burnish.errors import EngineError
from burnish.graph import describe_node
from burnish.operators.collectives import (
    ALL_GATHER,
    ALL_GATHER_ROWS,
    ALL_REDUCE,
    ALL_REDUCE_FINISH,
    ALL_REDUCE_START,
    GATHER_OWNED,
    LOOK_UP_ROWS,
    OWN_GRADIENTS,
    REDUCE_SCATTER_FINISH,
    REDUCE_SCATTER_START,
    SCATTER_ROWS,
    WORKER_RANK,
)

declare_kernel(
    "shared_memory",
    "shared_give(Tensor marks, Tensor slots, Tensor value, int number, int operation) -> ()",
    "shared_take(Tensor[] marks, Tensor[] slots, Tensor(a!) result, int number, int operation, float seconds) -> int",
    "shared_show(Tensor marks, int number) -> ()",
    "shared_sum(Tensor[] marks, Tensor(a!)[] buffers, int rank, int number, float seconds) -> int",
    "shared_section(Tensor[] marks, Tensor(a!)[] buffers, int rank, int first, int last, int number, float seconds) -> int",
    "shared_await(Tensor[] marks, int number, float seconds) -> int",
    "shared_release(Tensor(a!) marks, int number) -> ()",
    "shared_settle(Tensor[] marks, int number, float seconds) -> int",
    "shared_leave(Tensor marks) -> ()",
)


ALIGNMENT = 64
"""The alignment of tensors that are sent as bytes."""
SMALL_BYTES = 2**18
"""The size in bytes up to which an exchange has no gather buffer of its own."""


class Exchange(torch.nn.Module):
    """Sums over the workers.

    Args:
        communicator: connection to the other workers.
        count: number of exchanged tensors. They may be followed by the number of this worker's samples, which sends zeros if it
            is 0; and, for ``AllReduceStart``, by a flag that enables the exchange.
        group: as for the communicator.
        channel: as for the communicator.
    """

    def __init__(self, communicator: Communicator, count: int, group: int, channel: str):
        super().__init__()
        self._communicator, self._count, self._group, self._channel = communicator, count, group, channel

    def start(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Pending]:
        """Start the exchange; return the buffer for the sums."""
        own = tensors[: self._count]
        dtype = own[0].dtype if len({tensor.dtype for tensor in own}) == 1 else torch.float64
        shared = self.shared_buffer(dtype, sum(tensor.numel() for tensor in own))
        if shared is not None:
            shared.settle()
        buffer = torch.cat([_flat(tensor).to(dtype) for tensor in own], out=None if shared is None else shared.tensor)
        if len(tensors) > self._count:
            buffer = _counting(buffer, tensors[self._count])
        return self.begin(buffer, shared, own)

    def begin(
        self, buffer: torch.Tensor, shared: SharedBuffer | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Pending]:
        """Start to exchange a buffer of consecutive tensors; return the buffer for the sums."""
        if shared is not None:
            return buffer, shared.all_reduce()
        return buffer, self._communicator.all_reduce(buffer, group=self._group, channel=self._channel)

    def shared_buffer(self, dtype: torch.dtype, count: int) -> SharedBuffer | None:
        """Return the buffer for the operands; None to allocate one for this step."""
        return None


class AllReduce(Exchange):
    """Exchanges tensors, and waits for the sums."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        buffer, pending = self.start(tensors)
        pending.wait()
        return _parted(buffer, tensors[: self._count])


class AllReduceStart(Exchange):
    """Starts to exchange tensors; only ``AllReduceFinish`` reads its results.

    Args:
        conditional: True if the last operand, a boolean scalar that is the same on every worker, enables the exchange.
    """

    def __init__(self, *arguments: Any, conditional: bool = False):
        super().__init__(*arguments)
        self._conditional = conditional
        self.pending: Pending | None = None
        self.is_left_out = False
        self._shared: SharedBuffer | None = None
        self._has_asked = False

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        self.is_left_out = self._conditional and not bool(tensors[-1])
        if self.is_left_out:
            return tensors[0].new_empty(0)
        buffer, self.pending = self.start(tensors[:-1] if self._conditional else tensors)
        return buffer

    def shared_buffer(self, dtype: torch.dtype, count: int) -> SharedBuffer | None:
        """Return a buffer that is kept for all steps: sizes of gradients do not change."""
        if not self._has_asked:
            self._has_asked = True
            self._shared = self._communicator.shared_buffer(dtype, count, group=self._group, channel=self._channel)
        return self._shared


class ReduceScatterStart(AllReduceStart):
    """Starts to sum tensors over the workers, each for its owner; only ``ReduceScatterFinish`` reads its results.

    Args:
        owners: rank of the owner of each tensor, in ascending order.
    """

    def __init__(self, *arguments: Any, owners: Sequence[int], conditional: bool = False):
        super().__init__(*arguments, conditional=conditional)
        self._owners = tuple(owners)

    def begin(
        self, buffer: torch.Tensor, shared: SharedBuffer | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Pending]:
        sizes = [0] * self._communicator.size
        for owner, tensor in zip(self._owners, tensors, strict=True):
            sizes[owner] += tensor.numel()
        first = sum(sizes[: self._communicator.rank])
        own = buffer[first : first + sizes[self._communicator.rank]]
        if shared is not None:
            return own, shared.reduce_scatter(sizes)
        return self._communicator.reduce_scatter(buffer, sizes, channel=self._channel)


class AllReduceFinish(torch.nn.Module):
    """Waits for the exchange of ``AllReduceStart``; without an exchange, returns the tensors unchanged.

    Args:
        started: the exchange.
    """

    def __init__(self, started: AllReduceStart):
        super().__init__()
        self._started = started

    def forward(self, buffer: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._started.is_left_out:
            return tensors
        assert self._started.pending is not None, "an exchange is begun before it is waited for"
        self._started.pending.wait()
        self._started.pending = None
        return _parted(buffer, tensors)


class ReduceScatterFinish(AllReduceFinish):
    """Waits for the exchange of ``ReduceScatterStart``: returns the sums of this worker's tensors, and an empty vector."""

    def forward(self, buffer: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*super().forward(buffer, *tensors), buffer.new_empty(0))


class OwnGradients(torch.nn.Module):
    """Gradients of this worker's samples: zeros if it has none.

    Args:
        count: number of gradients; they may be followed by the number of samples.
    """

    def __init__(self, count: int):
        super().__init__()
        self._count = count

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = tensors[: self._count]
        if len(tensors) == self._count:
            return gradients
        nothing = tensors[self._count] == 0
        if nothing.device.type != "cpu":
            return tuple(torch.where(nothing, 0, gradient) for gradient in gradients)
        return tuple(torch.zeros_like(gradient) for gradient in gradients) if bool(nothing) else gradients


class AllGather(torch.nn.Module):
    """The tensors of all workers, stacked.

    Args:
        communicator: connection to the other workers.
        count: number of tensors; they may be followed by the number of this worker's samples, as for ``Exchange``.
        group: as for the communicator.
    """

    def __init__(self, communicator: Communicator, count: int, group: int):
        super().__init__()
        self._communicator, self._count, self._group = communicator, count, group

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = tensors[: self._count]
        dtype = own[0].dtype if len({tensor.dtype for tensor in own}) == 1 else torch.float64
        buffer = torch.cat([_flat(tensor).to(dtype) for tensor in own])
        if len(tensors) > self._count:
            buffer = _counting(buffer, tensors[self._count])
        rows = self._communicator.all_gather(buffer, group=self._group)
        parts = torch.split(rows, [tensor.numel() for tensor in own], dim=1)
        return tuple(part.reshape(-1, *tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, own, strict=True))


class GatherOwned(torch.nn.Module):
    """The owners' copies of tensors of any dtypes, which are sent as bytes.

    Args:
        communicator: connection to the other workers.
        owners: rank of the owner of each tensor; the operands after these only enforce an order.
        conditional: True if the first of them, a boolean scalar that is the same on every worker, enables the exchange; without
            an exchange, each worker keeps its tensors.
    """

    def __init__(self, communicator: Communicator, owners: Sequence[int], conditional: bool = False):
        super().__init__()
        self._communicator, self._owners, self._conditional = communicator, tuple(owners), conditional
        self._shared: SharedRows | None = None
        self._has_asked = False

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = list(tensors[: len(self._owners)])
        if self._conditional and not bool(tensors[len(self._owners)]):
            return tuple(results)
        ends = [0] * self._communicator.size
        places = []
        for owner, tensor in zip(self._owners, results, strict=True):
            places.append(slice(ends[owner], ends[owner] + tensor.nbytes))
            ends[owner] += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        shared = self._shared_rows(max(ends), tensors[0].device)
        if shared is not None:
            shared.settle()
        rank = self._communicator.rank
        bytes_given = tensors[0].new_zeros(max(ends), dtype=torch.uint8) if shared is None else shared.tensor
        for owner, place, tensor in zip(self._owners, places, results, strict=True):
            if owner == rank:
                _shaped(bytes_given[place], tensor).copy_(tensor)
        if shared is None:
            rows = self._communicator.all_gather(bytes_given)
        else:
            shared.show()
            rows = shared.rows()
        for index, (owner, place) in enumerate(zip(self._owners, places, strict=True)):
            if owner != rank:
                # A view would keep the whole buffer, and some kernels sum in another order at its address.
                results[index] = _shaped(rows[owner][place], results[index]).clone()
        if shared is not None:
            shared.release()
        return tuple(results)

    def _shared_rows(self, count: int, device: torch.device) -> SharedRows | None:
        """Return memory that is kept for all steps, for larger exchanges on the CPU."""
        if not self._has_asked:
            self._has_asked = True
            if count > SMALL_BYTES and device.type == "cpu":
                self._shared = self._communicator.shared_rows(count)
        return self._shared


def _shaped(content: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return _parted(content.view(like.dtype), [like])[0]


def _counting(buffer: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    nothing = samples == 0
    if buffer.device.type != "cpu":
        return torch.where(nothing, 0, buffer)
    return buffer.zero_() if bool(nothing) else buffer


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return torch.flatten(tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor)


def _parted(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    results = []
    for part, tensor in zip(torch.split(buffer, [math.prod(tensor.shape) for tensor in tensors]), tensors, strict=True):
        if tensor.dim() == 4:
            first, channels, height, width = tensor.shape
            shaped = part.view(first, height, width, channels).permute(0, 3, 1, 2)
        else:
            shaped = part.view(tensor.shape)
        results.append(shaped.to(tensor.dtype))
    return tuple(results)


def communicator_of(op: Call) -> Communicator:
    found = op.communicator
    if found is None:
        raise EngineError(
            f"{describe_node(op.node)} exchanges values with other workers, and there are none: open the program with "
            "burnish.Session(program, parallel=burnish.DataParallel())"
        )
    return found


def _exchange(op: Call) -> tuple[Communicator, int, int, str]:
    beside = int(op.attribute("counted", 0)) + int(op.attribute("conditional", 0))
    channel = GRADIENTS if op.attribute("purpose") == "gradient" else "statistics"
    return communicator_of(op), len(op) - beside, int(op.attribute("group", 0)), channel


def _operands(op: Call) -> list[Any]:
    return [op.value(index) for index in range(len(op))]


def results_of(op: Call, exchange: torch.nn.Module) -> tuple[Any, ...]:
    """Call an exchange of all operands, which returns a list, and return its elements."""
    results = op.module(exchange, _operands(op))
    return tuple(results[index] for index in range(len(op.node.outputs)))


@translates(ALL_REDUCE)
def all_reduce(op: Call) -> Any:
    return results_of(op, AllReduce(*_exchange(op)))


@translates(ALL_REDUCE_START)
def all_reduce_start(op: Call) -> Any:
    started = AllReduceStart(*_exchange(op), conditional=bool(op.attribute("conditional", 0)))
    op.started[op.node.outputs[0]] = started
    return op.module(started, _operands(op))


@translates(ALL_REDUCE_FINISH)
def all_reduce_finish(op: Call) -> Any:
    started = op.started[op.value(0)]
    assert isinstance(started, AllReduceStart)
    return results_of(op, AllReduceFinish(started))


@translates(OWN_GRADIENTS)
def own_gradients(op: Call) -> Any:
    return results_of(op, OwnGradients(len(op) - int(op.attribute("counted", 0))))


@translates(ALL_GATHER)
def all_gather(op: Call) -> Any:
    communicator, count, group, _ = _exchange(op)
    return results_of(op, AllGather(communicator, count, group))


@translates(REDUCE_SCATTER_START)
def reduce_scatter_start(op: Call) -> Any:
    conditional = bool(op.attribute("conditional", 0))
    started = ReduceScatterStart(*_exchange(op), owners=op.attribute("owners"), conditional=conditional)
    op.started[op.node.outputs[0]] = started
    return op.module(started, _operands(op))


@translates(REDUCE_SCATTER_FINISH)
def reduce_scatter_finish(op: Call) -> Any:
    started = op.started[op.value(0)]
    assert isinstance(started, ReduceScatterStart)
    return results_of(op, ReduceScatterFinish(started))


@translates(GATHER_OWNED)
def gather_owned(op: Call) -> Any:
    gather = GatherOwned(communicator_of(op), op.attribute("owners"), bool(op.attribute("conditional", 0)))
    return results_of(op, gather)


@translates(WORKER_RANK)
def worker_rank(op: Call) -> Any:
    return torch.tensor(communicator_of(op).rank, dtype=torch.int64, device=op.device)


Counts = Sequence[Sequence[Sequence[int]]]
"""The numbers of rows to send: by sender, by tensor, by receiver."""


class AllGatherRows(torch.nn.Module):
    """The rows of all workers.

    Args:
        communicator: connection to the other workers.
        count: number of tensors to gather along their first axis. They may be followed by the number of this worker's samples: if
            it is 0, it sends no rows.
    """

    def __init__(self, communicator: Communicator, count: int):
        super().__init__()
        self._communicator, self._count = communicator, count

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = _given(tensors, self._count)
        counts = torch.tensor([len(tensor) for tensor in own], dtype=torch.int64, device=own[0].device)
        numbers = self._communicator.all_gather(counts).tolist()
        size = max(_packed_size(own, number) for number in numbers)
        buffer = own[0].new_empty(size, dtype=torch.uint8)
        _pack(own, buffer)
        rows = self._communicator.all_gather(buffer) if size else buffer.expand(len(numbers), 0)
        parts = [_unpacked(row, own, number) for row, number in zip(rows, numbers, strict=True)]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))


class LookUpRows(torch.nn.Module):
    """Lookups in distributed tables: indices are sent to the workers with the rows, which send the rows back.

    Args:
        communicator: connection to the other workers.
        tables: names of the initializers, for messages.
        extents: number of rows of each whole table.
    """

    def __init__(self, communicator: Communicator, tables: Sequence[str], extents: Sequence[int]):
        super().__init__()
        self._communicator, self._tables, self._extents = communicator, tuple(tables), tuple(extents)

    def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts, wanted = operands[::2], operands[1::2]
        for table, extent, indices in zip(self._tables, self._extents, wanted, strict=True):
            _check_indices(table, extent, indices)
        routes = [_Route(indices, self._communicator.size) for indices in wanted]
        counts = _all_counts(self._communicator, routes)
        asked = _exchanged(self._communicator, [route.places for route in routes], counts)
        found = [part.index_select(0, places) for part, places in zip(parts, asked, strict=True)]
        rows = _exchanged(self._communicator, found, _answering(counts))
        return tuple(route.restored(part) for route, part in zip(routes, rows, strict=True))


class ScatterRows(torch.nn.Module):
    """Sends rows to the workers that hold them; returns the received rows, with their places in the local part.

    Args:
        communicator: connection to the other workers.
        count: number of tensors, alternately indices and rows; they may be followed by the number of this worker's samples, as
            for ``AllGatherRows``.
    """

    def __init__(self, communicator: Communicator, count: int):
        super().__init__()
        self._communicator, self._count = communicator, count

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = _given(tensors, self._count)
        routes = [_Route(indices, self._communicator.size) for indices in own[::2]]
        counts = [[each for each in number for _ in range(2)] for number in _all_counts(self._communicator, routes)]
        pairs = [(route.places, rows.index_select(0, route.order)) for route, rows in zip(routes, own[1::2], strict=True)]
        return tuple(_exchanged(self._communicator, list(itertools.chain(*pairs)), counts))


class _Route:
    """The rows of a table that are exchanged with each worker.

    Attributes:
        order: positions of the indices, sorted by the worker that holds the row.
        places: the rows' places on that worker, in that order.
        counts: number of rows on each worker, [workers].
    """

    def __init__(self, indices: torch.Tensor, workers: int):
        holders = indices.remainder(workers)
        self.order = torch.argsort(holders, stable=True)
        self.places = indices.div(workers, rounding_mode="floor").index_select(0, self.order)
        self.counts = torch.bincount(holders, minlength=workers)

    def restored(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in the order of the indices, given rows in the order of the workers."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def _given(tensors: Sequence[torch.Tensor], count: int) -> Sequence[torch.Tensor]:
    """Return the rows that a worker sends: none if the operand after them is zero (no samples)."""
    own = tensors[:count]
    return [tensor[:0] for tensor in own] if len(tensors) > count and not bool(tensors[count]) else own


def _check_indices(table: str, extent: int, indices: torch.Tensor) -> None:
    if not len(indices):
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= extent:
        index = low if low < 0 else high
        raise EngineError(
            f"The table '{table}' is looked up at {index - extent if index < 0 else index}, and has {extent} rows: valid are "
            f"{-extent}..{extent - 1}. Number them as the model was made to read them (its vocabulary), or take a model with "
            "more rows"
        )


def _all_counts(communicator: Communicator, routes: Sequence[_Route]) -> list[list[list[int]]]:
    numbers: list[list[list[int]]] = communicator.all_gather(torch.stack([route.counts for route in routes])).tolist()
    return numbers


def _answering(counts: Counts) -> Counts:
    """Return the numbers of rows on the way back: the transpose."""
    return [[[row[holder] for row in table] for table in zip(*counts, strict=True)] for holder in range(len(counts))]


def _exchanged(communicator: Communicator, tensors: Sequence[torch.Tensor], counts: Counts) -> list[torch.Tensor]:
    """Send each worker its rows of each tensor (in receiver order), and return the received ones in rank order."""
    workers, rank = range(communicator.size), communicator.rank
    sizes = [[_packed_size(tensors, [table[to] for table in counts[giver]]) for to in workers] for giver in workers]
    buffer = tensors[0].new_empty(sum(sizes[rank]), dtype=torch.uint8)
    parts = [torch.split(tensor, list(table)) for tensor, table in zip(tensors, counts[rank], strict=True)]
    for message, each in zip(torch.split(buffer, sizes[rank]), zip(*parts, strict=True), strict=True):
        _pack(each, message)
    received = communicator.all_to_all_uneven(buffer, sizes)
    messages = torch.split(received, [row[rank] for row in sizes])
    gained = [
        _unpacked(message, tensors, [table[rank] for table in counts[giver]])
        for giver, message in zip(workers, messages, strict=True)
    ]
    return [torch.cat(each) for each in zip(*gained, strict=True)]


def _places(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> Iterator[slice]:
    start = 0
    for tensor, count in zip(tensors, counts, strict=True):
        end = start + count * math.prod(tensor.shape[1:]) * tensor.element_size()
        yield slice(start, end)
        start = -(-end // ALIGNMENT) * ALIGNMENT


def _packed_size(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> int:
    """Return the size of these numbers of rows in bytes: a multiple of ``ALIGNMENT``."""
    end = max((place.stop for place in _places(tensors, counts)), default=0)
    return -(-end // ALIGNMENT) * ALIGNMENT


def _pack(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    for tensor, place in zip(tensors, _places(tensors, [len(tensor) for tensor in tensors]), strict=True):
        buffer[place].view(tensor.dtype).copy_(tensor.reshape(-1))


def _unpacked(buffer: torch.Tensor, like: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Return the rows in a buffer of bytes, with these dtypes, widths and numbers of rows."""
    return [
        buffer[place].view(tensor.dtype).view(count, *tensor.shape[1:])
        for tensor, place, count in zip(like, _places(like, counts), counts, strict=True)
    ]


@translates(ALL_GATHER_ROWS)
def all_gather_rows(op: Call) -> Any:
    return results_of(op, AllGatherRows(communicator_of(op), len(op) - int(op.attribute("counted", 0))))


@translates(SCATTER_ROWS)
def scatter_rows(op: Call) -> Any:
    return results_of(op, ScatterRows(communicator_of(op), len(op) - int(op.attribute("counted", 0))))


@translates(LOOK_UP_ROWS)
def look_up_rows(op: Call) -> Any:
    return results_of(op, LookUpRows(communicator_of(op), op.attribute("tables"), op.attribute("extents")))
