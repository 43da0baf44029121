"""Sums over the workers in the order of their ranks, of numbers that may travel in fewer bits than they are added in.

A library that adds up while it passes numbers on is free in the order of its sums, and adds in the dtype that travels. Here every
worker gets a part of the buffer from all others, adds it up, and gives the sums of its part to all: as many bytes as a ring
takes, ``2 (W - 1) / W`` of the buffer, and each element is ``((x0 + x1) + x2) + ...`` on whichever worker adds it. Where each
worker wants the sums of its part alone, the second half is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from burnish.distributed.connection.encodings import Encoding
from burnish.engines.communicator import GRADIENTS, Communicator, Pending, SharedBuffer, SharedRows

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 32 * 2**10
"""A buffer up to here goes to all workers as a whole: one exchange in place of two, where latency is what an exchange costs."""


class OrderedSums:
    """A communicator whose sums are taken in the order of the ranks.

    Args:
        communicator: to the others.
        deterministic: take all sums so; else those alone that are compressed.
        compression: how gradients travel; None leaves them as they are.
    """

    def __init__(self, communicator: Communicator, *, deterministic: bool = True, compression: Encoding | None = None):
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator, self._deterministic, self._compression = communicator, deterministic, compression

    def all_reduce(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> Pending:
        compression = self._compression if channel == GRADIENTS and buffer.is_floating_point() else None
        workers = group or self.size
        if workers == 1 or (compression is None and not self._deterministic):
            return self._communicator.all_reduce(buffer, group=group, channel=channel)
        encoding = compression or Encoding()
        if buffer.numel() * buffer.element_size() <= SMALL_BYTES:
            return _Gathered(self._communicator, buffer, encoding, group)
        return _Parted(self._communicator, buffer, encoding, group, workers, channel)

    def shared_buffer(self, dtype: torch.dtype, count: int, *, group: int = 0, channel: str = "") -> SharedBuffer | None:
        """One of the communicator's, which are added up in the order of the ranks; of what is compressed one that encodes."""
        compression = self._compression if channel == GRADIENTS and dtype.is_floating_point else None
        if compression is None:
            return self._communicator.shared_buffer(dtype, count, group=group, channel=channel)
        if group not in (0, self.size) or count * dtype.itemsize <= SMALL_BYTES:
            return None
        return EncodedBuffer.open(self._communicator, dtype, count, compression, channel)

    def shared_rows(self, count: int, *, channel: str = "") -> SharedRows | None:
        return self._communicator.shared_rows(count, channel=channel)

    def all_gather(self, buffer: torch.Tensor, *, group: int = 0) -> torch.Tensor:
        gathered: torch.Tensor = self._communicator.all_gather(buffer, group=group)
        return gathered

    def all_to_all(
        self, buffer: torch.Tensor, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[Any, Pending]:
        return self._communicator.all_to_all(buffer, sizes=sizes, group=group, channel=channel)

    def all_to_all_uneven(self, buffer: torch.Tensor, sizes: Sequence[Sequence[int]]) -> Any:
        return self._communicator.all_to_all_uneven(buffer, sizes)

    def reduce_scatter(self, buffer: torch.Tensor, sizes: Sequence[int], *, channel: str = "") -> tuple[torch.Tensor, Pending]:
        compression = self._compression if channel == GRADIENTS and buffer.is_floating_point() else None
        return scattered(self._communicator, buffer, sizes, compression or Encoding(), channel=channel)


class _Gathered:
    """A sum whose terms every worker gets."""

    def __init__(self, communicator: Communicator, buffer: torch.Tensor, encoding: Encoding, group: int):
        rows = communicator.all_gather(encoding.encoded(buffer.unsqueeze(0))[0], group=group)
        buffer.copy_(added_up(encoding.decoded(rows, _wide(buffer))))

    def wait(self) -> None:
        pass


class _Parted:
    """A sum of which every worker adds up a part; the parts are under way to them when this is made."""

    def __init__(
        self, communicator: Communicator, buffer: torch.Tensor, encoding: Encoding, group: int, workers: int, channel: str
    ):
        self._communicator, self._buffer, self._encoding, self._group = communicator, buffer, encoding, group
        rows = encoding.encoded(_parts(buffer, workers))
        self._rows, self._pending = communicator.all_to_all(rows, group=group, channel=channel)

    def wait(self) -> None:
        self._pending.wait()
        wide = _wide(self._buffer)
        part = added_up(self._encoding.decoded(self._rows, wide))
        sums = self._communicator.all_gather(self._encoding.encoded(part.unsqueeze(0))[0], group=self._group)
        self._buffer.copy_(self._encoding.decoded(sums, wide).flatten()[: self._buffer.numel()])


def scattered(
    communicator: Communicator,
    buffer: torch.Tensor,
    sizes: Sequence[int],
    encoding: Encoding | None = None,
    *,
    channel: str = "",
) -> tuple[torch.Tensor, Pending]:
    """Begin to add up parts of a buffer, each on its worker: ``Communicator.reduce_scatter`` by an exchange of all with all."""
    first = sum(sizes[: communicator.rank])
    part = buffer[first : first + sizes[communicator.rank]]
    return part, _Scattered(communicator, buffer, part, sizes, encoding or Encoding(), channel)


class _Scattered:
    """Sums of which every worker wants its part alone; the parts are under way to them when this is made.

    Args:
        part: this worker's of the buffer, where its sums go.
    """

    def __init__(
        self,
        communicator: Communicator,
        buffer: torch.Tensor,
        part: torch.Tensor,
        sizes: Sequence[int],
        encoding: Encoding,
        channel: str,
    ):
        self._own, self._encoding = part, encoding
        wire, widths = _wire(buffer, sizes, encoding)
        self._rows, self._pending = communicator.all_to_all(wire, sizes=widths, channel=channel)

    def wait(self) -> None:
        self._pending.wait()
        if self._own.numel():
            self._own.copy_(added_up(self._encoding.decoded(self._rows, _wide(self._own))))


class EncodedBuffer:
    """Numbers of this worker that are exchanged through memory which the workers share, in the form in which they travel.

    Args:
        terms: what the workers give: for each of them its part of this worker's numbers, one after the other.
        sums: of each worker's part.
        rank, workers: of this worker, and how many there are.
        dtype, count: of the numbers.
        encoding: how they travel.
    """

    def __init__(
        self,
        terms: SharedRows,
        sums: SharedRows,
        rank: int,
        workers: int,
        dtype: torch.dtype,
        count: int,
        encoding: Encoding,
    ):
        import torch

        self.tensor = torch.empty(count, dtype=dtype)
        self._terms, self._sums, self._rank, self._workers, self._encoding = terms, sums, rank, workers, encoding
        self._place = slice(0, 0)
        self._section: slice | None = None
        self._wire_dtype = dtype
        self._is_under_way = False

    @classmethod
    def open(
        cls, communicator: Communicator, dtype: torch.dtype, count: int, encoding: Encoding, channel: str
    ) -> EncodedBuffer | None:
        """Return a buffer; None, on all workers, where they share no memory."""
        import torch

        rows = encoding.encoded(_parts(torch.zeros(count, dtype=dtype), communicator.size))
        terms = communicator.shared_rows(rows.nbytes, channel=channel)
        sums = None if terms is None else communicator.shared_rows(rows[0].nbytes, channel=channel)
        if terms is None or sums is None:
            return None
        return cls(terms, sums, communicator.rank, communicator.size, dtype, count, encoding)

    def all_reduce(self) -> EncodedBuffer:
        width = -(-self.tensor.numel() // self._workers)
        self._section = None
        return self._begin(self._encoding.encoded(_parts(self.tensor, self._workers)).flatten(), [width] * self._workers)

    def reduce_scatter(self, sizes: Sequence[int]) -> EncodedBuffer:
        first = sum(sizes[: self._rank])
        self._section = slice(first, first + sizes[self._rank])
        wire, _ = _wire(self.tensor, sizes, self._encoding)
        return self._begin(wire, sizes)

    def _begin(self, wire: torch.Tensor, sizes: Sequence[int]) -> EncodedBuffer:
        self.wait()
        self._terms.settle()
        widths = [self._encoding.width(size) * wire.itemsize for size in sizes]
        first = sum(widths[: self._rank])
        self._place, self._wire_dtype = slice(first, first + widths[self._rank]), wire.dtype
        self._terms.tensor[: wire.nbytes].view(wire.dtype).copy_(wire)
        self._terms.show()
        self._is_under_way = True
        return self

    def settle(self) -> None:
        self.wait()

    def wait(self) -> None:
        if not self._is_under_way:
            return
        self._is_under_way = False
        import torch

        wide = _wide(self.tensor)
        rows = torch.stack([row[self._place].view(self._wire_dtype) for row in self._terms.rows()])
        self._terms.release()
        if self._section is not None:
            part = self.tensor[self._section]
            if part.numel():
                part.copy_(added_up(self._encoding.decoded(rows, wide)))
            return
        part = self._encoding.encoded(added_up(self._encoding.decoded(rows, wide)).unsqueeze(0))[0]
        self._sums.settle()
        self._sums.tensor.view(part.dtype).copy_(part)
        self._sums.show()
        sums = torch.stack([row.view(part.dtype) for row in self._sums.rows()])
        self._sums.release()
        self.tensor.copy_(self._encoding.decoded(sums, wide).flatten()[: self.tensor.numel()])


def _parts(buffer: torch.Tensor, workers: int) -> torch.Tensor:
    """The parts of a buffer that each worker adds up, [workers, width], with zeros at the end of the last."""
    import torch

    width = -(-buffer.numel() // workers)
    return torch.nn.functional.pad(buffer, (0, width * workers - buffer.numel())).view(workers, width)


def _wire(buffer: torch.Tensor, sizes: Sequence[int], encoding: Encoding) -> tuple[torch.Tensor, list[int]]:
    """What travels of parts of a buffer, one after the other, and how many elements of each."""
    import torch

    if type(encoding) is Encoding:
        return buffer, list(sizes)
    parts = torch.split(buffer, list(sizes))
    return torch.cat([encoding.encoded(part.unsqueeze(0))[0] for part in parts if part.numel()]), [
        encoding.width(size) for size in sizes
    ]


def added_up(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows, from the first to the last."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _wide(buffer: torch.Tensor) -> torch.dtype:
    """The dtype that numbers are added in: their own, of half precision float32."""
    import torch

    return torch.float32 if buffer.is_floating_point() and buffer.element_size() < 4 else buffer.dtype
