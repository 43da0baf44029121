"""How an engine reaches the other workers: those of a process group, or threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from burnish.distributed.process_group import DONE, ProcessGroup
from burnish.distributed.shared_memory import SharedBuffer
from burnish.engines.communicator import GRADIENTS, Pending

if TYPE_CHECKING:
    import torch


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

    def all_to_all(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> tuple[torch.Tensor, Pending]:
        return self._group(group, channel).begin_all_to_all(buffer, name=channel or "values")

    def _group(self, size: int, channel: str) -> ProcessGroup:
        """The workers of an exchange; parts of the group are made where they are first asked for, by all at the same exchange."""
        key = (size, channel if channel == GRADIENTS else "")
        if key not in self._groups:
            self._groups[key] = self._groups[0, key[1]].split(size)
        return self._groups[key]


class ThreadCommunicator:
    """Workers that are threads of one process: for tests, and to try what several workers would do.

    ``ThreadCommunicator.group(4)`` returns those of four workers, one for each thread.
    """

    def __init__(self, rank: int, shared: _Meeting):
        self.rank = rank
        self.size = shared.size
        self._shared = shared

    @classmethod
    def group(cls, size: int) -> list[ThreadCommunicator]:
        shared = _Meeting(size)
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
        import torch

        return self._met(buffer, group, torch.stack)

    def all_to_all(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> tuple[torch.Tensor, Pending]:
        import torch

        place = self.rank % (group or self.size)
        return self._met(buffer, group, lambda members: torch.stack([member[place] for member in members])), DONE

    def shared_buffer(self, dtype: torch.dtype, count: int, *, group: int = 0, channel: str = "") -> None:
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


class _Meeting:
    """Where threads meet to show each other a buffer."""

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
