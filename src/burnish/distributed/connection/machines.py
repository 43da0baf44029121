"""Exchanges of workers on several machines: within each machine through memory, and once between the machines.

The first worker of each machine exchanges for all of it. A sum is taken in the order of the ranks on each machine, and then over
the machines: it has the same bits again for the same layout of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from burnish.distributed.connection.memory import Memory
from burnish.distributed.connection.shared_memory import SharedBuffer, SharedRows
from burnish.engines.communicator import Pending

if TYPE_CHECKING:
    import torch


class Exchanging(Protocol):
    """What is asked of the groups of which machines are made: ``ProcessGroup``."""

    world_size: int
    memory: Memory | None

    def begin_all_reduce(self, tensor: torch.Tensor, operation: str = ..., *, name: str = ...) -> Pending: ...
    def all_gather_rows(self, tensor: torch.Tensor, *, name: str = ...) -> torch.Tensor: ...
    def broadcast(self, tensor: torch.Tensor, source: int = ..., *, name: str = ...) -> torch.Tensor: ...


Group = TypeVar("Group", bound=Exchanging)


class Machines(Generic[Group]):
    """The workers of a group, by machine.

    Args:
        ranks: of each machine, ascending.
        inside: the workers of this machine, who share memory.
        between: the first workers of all machines, for one of them; None for other workers.

    Attributes:
        under_way: buffers that are being exchanged, in the order in which that began.
    """

    def __init__(self, ranks: Sequence[Sequence[int]], inside: Group, between: Group | None):
        self._ranks, self.inside, self.between = ranks, inside, between
        self.under_way: list[MachinesBuffer] = []

    def all_reduce(self, tensor: torch.Tensor, operation: str, name: str) -> None:
        """Replace a tensor by its ``sum``, ``min`` or ``max`` over all workers."""
        self.inside.begin_all_reduce(tensor, operation, name=name).wait()
        if self.between is not None:
            self.between.begin_all_reduce(tensor, operation, name=name).wait()
        self.inside.broadcast(tensor, name=name)

    def all_gather(self, rows: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
        """Fill rows, [workers, ...], with the tensors of all workers."""
        own = self.inside.all_gather_rows(tensor, name=name)
        if self.between is not None:
            most = max(map(len, self._ranks))
            padded = tensor.new_empty((most, *tensor.shape))
            padded[: len(own)] = own
            for ranks, found in zip(self._ranks, self.between.all_gather_rows(padded, name=name), strict=True):
                rows[list(ranks)] = found[: len(ranks)]
        self.inside.broadcast(rows, name=name)

    def shared_buffer(self, dtype: torch.dtype, count: int, name: str) -> MachinesBuffer | None:
        """Return numbers that are exchanged again and again; None if this machine has no memory to share for them."""
        import torch

        memory = self.inside.memory
        if memory is None:
            return MachinesBuffer(self, torch.empty(count, dtype=dtype), None, None, name)
        terms = memory.shared_buffer(dtype, count, name)
        handed = None if terms is None else memory.shared_rows(1, name)
        return None if terms is None or handed is None else MachinesBuffer(self, terms.tensor, terms, handed, name)


class MachinesBuffer:
    """Numbers of which each worker has its own, and that are replaced by their sums over all machines, again and again.

    The first worker of each machine adds up what its machine's workers have. It begins to exchange the sum as soon as a later
    exchange begins and finds it complete: the network works while gradients are computed.

    Args:
        machines: the workers.
        tensor: the numbers of this worker, a vector.
        terms: the numbers of all workers of this machine; None for a worker alone on it.
        handed: shown by the first worker when its terms are the sums over all machines; None with ``terms``.
        name: what is exchanged, for messages.
    """

    def __init__(
        self, machines: Machines[Any], tensor: torch.Tensor, terms: SharedBuffer | None, handed: SharedRows | None, name: str
    ):
        self.tensor = tensor
        self._between, self._others, self._under_way = machines.between, machines.inside.world_size - 1, machines.under_way
        self._terms, self._handed, self._what = terms, handed, name
        self._sent: Pending | None = None

    def all_reduce(self) -> MachinesBuffer:
        """Begin to replace the numbers by their sums; ``wait`` ends it."""
        self.settle()
        if self._terms is not None:
            self._terms.reduce_scatter([len(self.tensor), *[0] * self._others])
        self._under_way.append(self)
        for each in self._under_way:
            if not each._send_at_once():
                break
        return self

    def reduce_scatter(self, sizes: Sequence[int]) -> MachinesBuffer:
        """As ``all_reduce``: nothing is said of the sections of others."""
        return self.all_reduce()

    def wait(self) -> None:
        """Wait until ``tensor`` has the sums.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time.
        """
        if self not in self._under_way:
            return
        # All of them before the first is waited for: others find what they wait for.
        for each in self._under_way:
            each._send()
        while self._under_way:
            self._under_way.pop(0)._take()

    def settle(self) -> None:
        """Wait until no other worker reads this one's numbers any more; before they are written again."""
        self.wait()
        if self._terms is not None and self._handed is not None:
            self._terms.settle()
            self._handed.settle()

    def _send_at_once(self) -> bool:
        """Send the sum of this machine to the others if it is complete; returns whether it is under way."""
        if self._sent is None and self._between is not None and (self._terms is None or self._terms.ends_at_once()):
            self._send()
        return self._sent is not None

    def _send(self) -> None:
        if self._sent is not None:
            return
        if self._terms is not None:
            self._terms.wait()
        if self._between is not None:
            self._sent = self._between.begin_all_reduce(self.tensor, name=self._what)

    def _take(self) -> None:
        if self._sent is not None:
            self._sent.wait()
            self._sent = None
        if self._terms is not None and self._handed is not None:
            self._handed.show()
            if self._between is None:
                self._handed.rows()  # which the first worker shows when it has the sums
                self.tensor.copy_(self._terms.of(0))
            self._handed.release()
