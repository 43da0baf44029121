"""Workers that are threads, so that a test can see all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from burnish.distributed.connection.communicators import scattered
from burnish.distributed.connection.process_group import DONE
from burnish.engines.communicator import Pending


class ThreadCommunicator:
    """Workers that are threads of one process.

    ``ThreadCommunicator.group(4)`` returns those of four workers, one for each thread.
    """

    def __init__(self, rank: int, shared: _Shown):
        self.rank = rank
        self.size = shared.size
        self._shared = shared

    @classmethod
    def group(cls, size: int) -> list[ThreadCommunicator]:
        shared = _Shown(size)
        return [cls(rank, shared) for rank in range(size)]

    def all_reduce(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> Pending:
        def add_up(members: list[torch.Tensor]) -> torch.Tensor:
            total = members[0].clone()
            for member in members[1:]:
                total += member
            return total

        buffer.copy_(self._met(buffer, group, add_up))
        return DONE

    def all_gather(self, buffer: torch.Tensor, *, group: int = 0) -> torch.Tensor:
        return self._met(buffer, group, torch.stack)

    def all_to_all(
        self, buffer: torch.Tensor, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[torch.Tensor, Pending]:
        place = self.rank % (group or self.size)

        def own(given: torch.Tensor) -> torch.Tensor:
            return given[place] if sizes is None else given[sum(sizes[:place]) : sum(sizes[: place + 1])]

        return self._met(buffer, group, lambda members: torch.stack([own(member) for member in members])), DONE

    def all_to_all_uneven(self, buffer: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        assert len(buffer) == sum(sizes[self.rank])
        shown = self._shared.exchange(self.rank, buffer.clone())
        return torch.cat([torch.split(given, list(row))[self.rank] for given, row in zip(shown, sizes, strict=True)])

    def reduce_scatter(self, buffer: torch.Tensor, sizes: Sequence[int], *, channel: str = "") -> tuple[torch.Tensor, Pending]:
        return scattered(self, buffer, sizes, channel=channel)

    def shared_buffer(self, dtype: torch.dtype, count: int, *, group: int = 0, channel: str = "") -> None:
        return None

    def shared_rows(self, count: int, *, channel: str = "") -> None:
        return None

    def _met(self, buffer: torch.Tensor, group: int, combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        """Show the others a buffer, and combine what those of the group showed, in the order of their ranks."""
        shown = self._shared.exchange(self.rank, buffer.clone())
        width = group or self.size
        first = self.rank // width * width
        return combine(shown[first : first + width])

    def abort(self) -> None:
        """Let the others fail where they wait for this worker."""
        self._shared.barrier.abort()


class _Shown:
    """Where threads show each other a buffer."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size)
        self._shown: list[torch.Tensor | None] = [None] * size

    def exchange(self, rank: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        self._shown[rank] = buffer
        self.barrier.wait()
        seen = [shown for shown in self._shown if shown is not None]
        self.barrier.wait()
        return seen
