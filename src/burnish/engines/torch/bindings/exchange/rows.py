"""Exchanges of rows of tables, of which each worker may have any number: they travel as bytes, those of all tables together.

Of a table that is spread, row ``r`` lies with worker ``r % workers``, at place ``r // workers`` of its part: neighbours lie with
different workers, also where the rows that most samples read have the lowest indices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from burnish.engines.communicator import Communicator
from burnish.engines.torch.bindings.exchange.translation import ALIGNMENT, communicator_of, results_of
from burnish.engines.torch.translate.rules import Call, translates
from burnish.errors import EngineError
from burnish.operators.collectives import ALL_GATHER_ROWS, LOOK_UP_ROWS, SCATTER_ROWS

Counts = Sequence[Sequence[Sequence[int]]]
"""How many rows travel: by the worker that gives them, by tensor, by the worker that gets them."""


class AllGatherRows(torch.nn.Module):
    """The rows of all workers.

    Args:
        communicator: to the others.
        count: how many tensors are gathered, along their first axis; behind them may come the number of this worker's samples:
            where that is 0, it gives no rows.
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
    """Rows of tables that are spread over the workers: indices go to who holds the rows, and these come back.

    Args:
        communicator: to the others.
        tables: the initializers, for messages.
        extents: how many rows each of the whole tables has.
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
    """Rows go to the workers that hold those of the table; what each gets, with the places in its part.

    Args:
        communicator: to the others.
        count: how many tensors there are, indices and rows by turns; behind them may come the number of this worker's samples, as
            of ``AllGatherRows``.
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
    """Which rows of a table are exchanged with whom.

    Args:
        indices: of the rows, int64 [n].
        workers: how many there are.

    Attributes:
        order: the positions of the indices by the worker that holds the rows.
        places: where the rows are with that worker, in that order.
        counts: how many each worker holds, [workers].
    """

    def __init__(self, indices: torch.Tensor, workers: int):
        holders = indices.remainder(workers)
        self.order = torch.argsort(holders, stable=True)
        self.places = indices.div(workers, rounding_mode="floor").index_select(0, self.order)
        self.counts = torch.bincount(holders, minlength=workers)

    def restored(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the order of the indices, given those in the order of the workers."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def _given(tensors: Sequence[torch.Tensor], count: int) -> Sequence[torch.Tensor]:
    """The rows that a worker gives: none where what is behind them says that it has no samples."""
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
    """How many rows travel back: who was given to gives as many."""
    return [[[row[holder] for row in table] for table in zip(*counts, strict=True)] for holder in range(len(counts))]


def _exchanged(communicator: Communicator, tensors: Sequence[torch.Tensor], counts: Counts) -> list[torch.Tensor]:
    """Give each worker its rows of each tensor, and return those that this one gets, in the order of the workers' ranks.

    Args:
        communicator: to the others.
        tensors: rows, in the order of the workers that get them.
        counts: of all workers.
    """
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
    """Where so many rows of each tensor lie as bytes."""
    start = 0
    for tensor, count in zip(tensors, counts, strict=True):
        end = start + count * math.prod(tensor.shape[1:]) * tensor.element_size()
        yield slice(start, end)
        start = -(-end // ALIGNMENT) * ALIGNMENT


def _packed_size(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> int:
    """How many bytes so many rows of each tensor take: a multiple of ``ALIGNMENT``."""
    end = max((place.stop for place in _places(tensors, counts)), default=0)
    return -(-end // ALIGNMENT) * ALIGNMENT


def _pack(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Put the rows of tensors into a buffer of bytes."""
    for tensor, place in zip(tensors, _places(tensors, [len(tensor) for tensor in tensors]), strict=True):
        buffer[place].view(tensor.dtype).copy_(tensor.reshape(-1))


def _unpacked(buffer: torch.Tensor, like: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """The rows in a buffer of bytes, so many of each of these dtypes and widths."""
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
