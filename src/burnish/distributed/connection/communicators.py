"""How an engine reaches the other workers of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from burnish.distributed.connection.ordered_sums import scattered
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.distributed.connection.shared_memory import SharedBuffer, SharedRows
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

    def shared_rows(self, count: int, *, channel: str = "") -> SharedRows | None:
        return self._group(0, channel).shared_rows(count, name=channel or "values")

    def all_to_all(
        self, buffer: torch.Tensor, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[torch.Tensor, Pending]:
        return self._group(group, channel).begin_all_to_all(buffer, sizes, name=channel or "values")

    def all_to_all_uneven(self, buffer: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._group(0, "").all_to_all_uneven(buffer, sizes)

    def reduce_scatter(self, buffer: torch.Tensor, sizes: Sequence[int], *, channel: str = "") -> tuple[torch.Tensor, Pending]:
        return scattered(self, buffer, sizes, channel=channel)

    def _group(self, size: int, channel: str) -> ProcessGroup:
        """The workers of an exchange; parts of the group are made where they are first asked for, by all at the same exchange."""
        key = (size, channel if channel == GRADIENTS else "")
        if key not in self._groups:
            self._groups[key] = self._groups[0, key[1]].split(size)
        return self._groups[key]
