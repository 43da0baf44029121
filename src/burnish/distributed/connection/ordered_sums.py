"""Sums over the workers in the order of their ranks, of numbers that may travel in fewer bits than they are added in.

A library that adds up while it passes numbers on is free in the order of its sums, and adds in the dtype that travels. Here every
worker gets a part of the buffer from all others, adds it up, and gives the sums of its part to all: as many bytes as a ring
takes, ``2 (W - 1) / W`` of the buffer, and each element is ``((x0 + x1) + x2) + ...`` on whichever worker adds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burnish.distributed.connection.encodings import Encoding
from burnish.engines.communicator import GRADIENTS, Communicator, Pending, SharedBuffer

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
        """One of the communicator's, which are added up in the order of the ranks; none for what is compressed."""
        if self._compression is not None and channel == GRADIENTS and dtype.is_floating_point:
            return None
        return self._communicator.shared_buffer(dtype, count, group=group, channel=channel)

    def all_gather(self, buffer: torch.Tensor, *, group: int = 0) -> torch.Tensor:
        gathered: torch.Tensor = self._communicator.all_gather(buffer, group=group)
        return gathered

    def all_to_all(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> tuple[Any, Pending]:
        return self._communicator.all_to_all(buffer, group=group, channel=channel)


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
        import torch

        self._communicator, self._buffer, self._encoding, self._group = communicator, buffer, encoding, group
        width = -(-buffer.numel() // workers)
        parts = torch.nn.functional.pad(buffer, (0, width * workers - buffer.numel())).view(workers, width)
        self._rows, self._pending = communicator.all_to_all(encoding.encoded(parts), group=group, channel=channel)

    def wait(self) -> None:
        self._pending.wait()
        wide = _wide(self._buffer)
        own = added_up(self._encoding.decoded(self._rows, wide))
        sums = self._communicator.all_gather(self._encoding.encoded(own.unsqueeze(0))[0], group=self._group)
        self._buffer.copy_(self._encoding.decoded(sums, wide).flatten()[: self._buffer.numel()])


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
