"""How an engine reaches the other workers of a process group, and sums that are taken in the order of their ranks.

A library that adds up while it passes numbers on is free in the order of its sums, and adds in the dtype that travels. For an
ordered sum every worker gets a part of the buffer from all others, adds it up, and gives the sums of its part to all: as many
bytes as a ring takes, ``2 (W - 1) / W`` of the buffer. Each element is ``((x0 + x1) + x2) + ...`` on whichever worker adds it.
Numbers may travel in fewer bits than they are added in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from burnish.distributed.connection.encodings import Encoding
from burnish.distributed.connection.machines import Machines
from burnish.distributed.connection.process_group import DONE, ProcessGroup
from burnish.engines.communicator import GRADIENTS, Communicator, Pending, SharedBuffer, SharedRows

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 32 * 2**10
"""A buffer up to here goes to all workers as a whole: one exchange in place of two, where latency is what an exchange costs."""


class GroupCommunicator:
    """The workers of a group; all of them make one at the same time.

    Args:
        group: the workers.
        gradients: the same workers, for exchanges of gradients: a layer's statistics do not wait for those. None makes one.
    """

    def __init__(self, group: ProcessGroup, gradients: ProcessGroup | None = None):
        self.rank, self.size = group.rank, group.world_size
        self._groups = {(0, ""): group, (0, GRADIENTS): group.twin() if gradients is None else gradients}

    def all_reduce(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> Pending:
        return self._group(group, channel).begin_all_reduce(buffer, name=channel or "values")

    def all_gather(self, buffer: torch.Tensor, *, group: int = 0) -> torch.Tensor:
        return self._group(group, "").all_gather_rows(buffer)

    def shared_buffer(self, dtype: torch.dtype, count: int, *, group: int = 0, channel: str = "") -> SharedBuffer | None:
        return self._group(group, channel).shared_buffer(dtype, count, name=channel or "values")

    def shared_rows(self, count: int, *, channel: str = "") -> SharedRows | None:
        return self._group(0, channel).shared_rows(count, name=channel or "values")

    def all_to_all(
        self, buffer: torch.Tensor, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[torch.Tensor, Pending]:
        return self._group(group, channel).begin_all_to_all(buffer, sizes, name=channel or "values")

    def all_to_all_uneven(self, buffer: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._group(0, "").all_to_all_uneven(buffer, sizes)

    def reduce_scatter(self, buffer: torch.Tensor, sizes: Sequence[int], *, channel: str = "") -> tuple[torch.Tensor, Pending]:
        if self.machines(0, channel) is not None:
            first = sum(sizes[: self.rank])
            return buffer[first : first + sizes[self.rank]], self.all_reduce(buffer, channel=channel)
        return scattered(self, buffer, sizes, channel=channel)

    def machines(self, group: int, channel: str) -> Machines[ProcessGroup] | None:
        """The workers of an exchange by machine, if they exchange within each of several machines first."""
        return self._group(group, channel).machines

    def _group(self, size: int, channel: str) -> ProcessGroup:
        """The workers of an exchange; parts of the group are made where they are first asked for, by all at the same exchange."""
        key = (size, channel if channel == GRADIENTS else "")
        if key not in self._groups:
            self._groups[key] = self._groups[0, key[1]].split(size)
        return self._groups[key]


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
        if not self._deterministic and (machines := self._machines(group, channel)) is not None:
            return _sum_of_machines(machines, buffer, encoding)
        if buffer.numel() * buffer.element_size() <= SMALL_BYTES:
            return _Gathered(self._communicator, buffer, encoding, group)
        return _Parted(self._communicator, buffer, encoding, group, workers, channel)

    def shared_buffer(self, dtype: torch.dtype, count: int, *, group: int = 0, channel: str = "") -> SharedBuffer | None:
        """One of the communicator's, if it is added up in the order of the ranks; None for what is compressed."""
        is_compressed = self._compression is not None and channel == GRADIENTS and dtype.is_floating_point
        if is_compressed or self._machines(group, channel) is not None:
            return None
        return self._communicator.shared_buffer(dtype, count, group=group, channel=channel)

    def _machines(self, group: int, channel: str) -> Machines[ProcessGroup] | None:
        return self._communicator.machines(group, channel) if isinstance(self._communicator, GroupCommunicator) else None

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


def _sum_of_machines(machines: Machines[ProcessGroup], buffer: torch.Tensor, encoding: Encoding) -> Pending:
    """Add up within each machine as it is, and encoded between them."""
    machines.inside.all_reduce(buffer, name=GRADIENTS)
    if machines.between is not None:
        between = GroupCommunicator(machines.between, machines.between)
        OrderedSums(between, compression=encoding).all_reduce(buffer, channel=GRADIENTS).wait()
    machines.inside.broadcast(buffer, name=GRADIENTS)
    return DONE


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
