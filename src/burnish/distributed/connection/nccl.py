"""Exchanges between GPUs: NCCL, by ``torch.distributed``, whose processes find each other by the store of the run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from burnish.distributed.connection.rendezvous import Meeting, torch_distributed
from burnish.distributed.connection.watch import first_line
from burnish.errors import EngineError, WorkerError

if TYPE_CHECKING:
    import torch

INTERFACE = "NCCL_SOCKET_IFNAME"
_POLL_SECONDS = 0.01
# C++ asks these, and does not keep them alive.
_stores: list[Any] = []
# Groups that this process is of, beside that of all workers.
_groups = 0


class Nccl:
    """The GPUs of a group of workers.

    Args:
        group: of ``torch.distributed``.
        members: ranks in the run.
        limit: seconds that an exchange may take.
    """

    def __init__(self, group: Any, members: Sequence[int], limit: float):
        self.group, self._members, self._limit = group, members, limit

    @classmethod
    def open(cls, meeting: Meeting, device: str, limit: float) -> Nccl:
        """Connect the GPUs of all workers of a run.

        Raises:
            EngineError: this PyTorch has no NCCL.
            WorkerError: they do not reach each other.
        """
        import torch

        global _groups
        distributed, place = torch_distributed(), meeting.place
        if not distributed.is_nccl_available():
            raise EngineError(
                "This PyTorch has no NCCL, by which GPUs exchange tensors: install a build for CUDA, or train on cpu"
            )
        torch.cuda.set_device(device)
        if place.folder:
            os.environ.setdefault(INTERFACE, "lo")
        _groups = 0
        try:
            store = torch_store(meeting, limit)
            distributed.init_process_group(
                "nccl", store=store, rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=limit)
            )
        except RuntimeError as error:
            raise WorkerError(
                f"The workers have met at {place.address}, but the GPU of rank {place.rank} cannot connect with another: "
                f"{first_line(error)}. Name the network interface that they reach each other by in {INTERFACE}, and open the "
                "ports between the machines"
            ) from error
        return cls(distributed.group.WORLD, range(place.world_size), limit)

    def apart(self, members: Sequence[int], made: int) -> Nccl:
        """Connect the GPUs of some of the workers; all of them call this together.

        PyTorch names such a group by its ranks and the number of groups that its process is of: where these differ, workers wait
        for each other under different names. So who is of fewer than another makes groups of itself alone first.

        Args:
            members: their ranks in the run.
            made: the largest ``groups_made`` of them.

        Raises:
            RuntimeError: one has not come, or is not reached.
        """
        global _groups
        distributed, timeout = torch_distributed(), timedelta(seconds=self._limit)
        while _groups < made:
            distributed.new_group([distributed.get_rank()], timeout=timeout, use_local_synchronization=True)
            _groups += 1
        group = distributed.new_group(list(members), timeout=timeout, use_local_synchronization=True)
        _groups += 1
        return Nccl(group, members, self._limit)

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> Any:
        """Begin to replace a tensor by its ``sum``, ``min`` or ``max`` over the workers."""
        distributed = torch_distributed()
        kind = getattr(distributed.ReduceOp, operation.upper())
        return distributed.all_reduce(tensor, kind, group=self.group, async_op=True)

    def all_gather(self, rows: Sequence[torch.Tensor], tensor: torch.Tensor) -> Any:
        """Begin to fill rows with the tensors of all workers."""
        return torch_distributed().all_gather(list(rows), tensor, group=self.group, async_op=True)

    def all_to_all(self, received: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Any:
        """Begin to give each worker a tensor, and to get one from each."""
        return torch_distributed().all_to_all(list(received), list(parts), group=self.group, async_op=True)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Any:
        """Begin to replace a tensor by that of one rank."""
        return torch_distributed().broadcast(tensor, self._members[source], group=self.group, async_op=True)

    def close(self, broken: bool) -> None:
        """Close the connections of this process with the others; where ``broken``, what is under way ends, and nobody waits."""
        distributed = torch_distributed()
        with suppress(RuntimeError):
            if broken:
                distributed.distributed_c10d._abort_process_group()
            else:
                distributed.destroy_process_group()


def groups_made() -> int:
    """Return of how many groups of ``torch.distributed`` this process is, beside that of all workers."""
    return _groups


def torch_store(meeting: Meeting, seconds: float) -> Any:
    """Return the store of a meeting as ``torch.distributed`` asks for one: texts for bytes, and waits that end.

    Args:
        meeting: of the workers.
        seconds: how long a key may take to be there.
    """
    store = meeting.open_store()

    class TorchStore(torch_distributed().Store):  # type: ignore[misc]
        """The keys of ``torch.distributed`` in the store of the run."""

        def set(self, key: str, value: bytes | str) -> None:
            store.set(f"torch/{key}", value if isinstance(value, str) else value.decode("latin-1"))

        def get(self, key: str) -> bytes:
            self.wait([key])
            return (store.get(f"torch/{key}") or "").encode("latin-1")

        def add(self, key: str, amount: int) -> int:
            return store.add(f"torch/{key}", amount)

        def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
            texts = [each if isinstance(each, str) else each.decode("latin-1") for each in (expected, desired)]
            return (store.compare_set(f"torch/{key}", *texts) or "").encode("latin-1")

        def check(self, keys: list[str]) -> bool:
            return all(store.get(f"torch/{key}") is not None for key in keys)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            until = time.monotonic() + (seconds if timeout is None else timeout.total_seconds())
            while not self.check(keys):
                if time.monotonic() > until:
                    raise RuntimeError(f"no worker has set {', '.join(keys)} in time")
                time.sleep(_POLL_SECONDS)

        def delete_key(self, key: str) -> bool:
            return False

        def clone(self) -> Any:
            return torch_store(meeting, seconds)

    _stores.append(TorchStore())
    return _stores[-1]
