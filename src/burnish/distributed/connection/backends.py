"""The exchanges of ``torch.distributed`` among some workers: by Gloo on CPUs, by NCCL on GPUs, or in a group of the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from burnish.errors import EngineError

if TYPE_CHECKING:
    import torch

NO_NCCL = "This PyTorch has no NCCL, by which GPUs exchange tensors: install a build for CUDA, or train on cpu"


class Backends:
    """What some workers exchange by.

    Every method begins an exchange, and returns what is waited for; None if there is nothing to wait for. Tensors are contiguous.

    Args:
        cpu: a process group of ``torch.distributed``, for tensors on CPUs.
        gpu: the same for GPUs; None for workers on CPUs.
        owned: those of them that were made here, and end by ``close``.
    """

    def __init__(self, cpu: Any, gpu: Any, owned: Sequence[Any]):
        self._cpu, self._gpu, self._owned = cpu, gpu, owned

    @classmethod
    def open(cls, store: Any, rank: int, size: int, device: str, limit: float) -> Backends:
        """Connect some workers; all of them call this together.

        Args:
            store: of ``torch.distributed``, with keys that no other group writes.
            rank, size: in this group.
            device: where tensors are exchanged.
            limit: seconds that an exchange may take.

        Raises:
            EngineError: this PyTorch has no NCCL.
            RuntimeError: one has not come, or is not reached.
        """
        import torch.distributed as distributed
        from torch._C._distributed_c10d import PrefixStore

        seconds = timedelta(seconds=limit)
        gpu = None
        if device != "cpu":
            check_nccl()
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = seconds
            gpu = distributed.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
        cpu = distributed.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, seconds)
        return cls(cpu, gpu, [each for each in (cpu, gpu) if each is not None])

    @classmethod
    def of_group(cls, group: Any, store: Any, device: str, limit: float) -> Backends:
        """Take the backends that a group of ``torch.distributed`` has, and make those that it lacks."""
        has = _names_of(group)
        cpu = group if "cpu" in has else None
        gpu = group if has.get("cuda", "gloo") != "gloo" else None
        if cpu is not None and (device == "cpu" or gpu is not None):
            return cls(cpu, gpu, [])
        own = cls.open(store, group.rank(), group.size(), "cpu" if gpu is not None else device, limit)
        return cls(cpu or own._cpu, gpu or own._gpu, own._owned)

    @classmethod
    def within(cls, group: Any, members: Sequence[int], store: Any, device: str, limit: float) -> Backends | None:
        """Connect some workers of a group of ``torch.distributed`` by the backend that was registered for it.

        They call this together. None, on all of them, if there is no such group, or it has a backend of PyTorch's own, which
        ``open`` makes for them alone.

        Args:
            group: of the caller's, or None. What is made of it here ends with the caller's groups.
            members: ranks in it.
            store, device, limit: as for ``open``.

        Raises:
            RuntimeError: one has not come, or is not reached.
        """
        if group is None or _names_of(group).get("cpu" if device == "cpu" else "cuda", "gloo") in ("gloo", "nccl", "mpi"):
            return None
        import torch.distributed as distributed

        ranks = distributed.get_process_group_ranks(group)
        part = distributed.new_group(
            [ranks[member] for member in members],
            timedelta(seconds=limit),
            distributed.distributed_c10d.get_backend_config(group),
            use_local_synchronization=True,
        )
        made = cls.of_group(part, store, device, limit)
        return cls(made._cpu, made._gpu, [part, *made._owned])

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> Any:
        """Begin to replace a tensor by its ``sum``, ``min`` or ``max`` over the workers."""
        if not tensor.numel():
            return None
        import torch.distributed as distributed

        options = distributed.AllreduceOptions()
        options.reduceOp = getattr(distributed.ReduceOp, operation.upper())
        return self._of(tensor).allreduce([tensor], options)

    def all_gather(self, rows: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Begin to fill rows, [workers, ...], with the tensors of all workers."""
        if not tensor.numel():
            return None
        return self._of(tensor).allgather([list(_bytes(rows).view(len(rows), -1).unbind())], [_bytes(tensor)])

    def all_to_all(self, received: torch.Tensor, gets: Sequence[int], given: torch.Tensor, gives: Sequence[int]) -> Any:
        """Begin to give each worker so many elements of a vector, and to get as many as it gives from each."""
        width = given.itemsize
        sizes = [[count * width for count in counts] for counts in (gets, gives)]
        return self._of(given).alltoall_base(_bytes(received), _bytes(given), *sizes)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Any:
        """Begin to replace a tensor by that of one rank."""
        if not tensor.numel():
            return None
        import torch.distributed as distributed

        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._of(tensor).broadcast([_bytes(tensor)], options)

    def abort(self) -> None:
        """End what is under way by an error, on this worker."""
        for each in self._owned:
            with suppress(RuntimeError):
                each.abort()

    def _of(self, tensor: torch.Tensor) -> Any:
        return self._cpu if tensor.device.type == "cpu" else self._gpu


def _names_of(group: Any) -> dict[str, str]:
    """The backends of a group of ``torch.distributed``, by kind of device."""
    import torch.distributed as distributed

    return dict(entry.split(":") for entry in distributed.distributed_c10d.get_backend_config(group).split(","))


def adds_up(tensor: torch.Tensor) -> bool:
    """Whether backends add up numbers of this dtype; they gather any."""
    import torch

    return tensor.dtype not in (torch.int16, torch.bool)


def check_nccl() -> None:
    """Raise EngineError if this PyTorch has no NCCL."""
    import torch.distributed as distributed

    if not distributed.is_nccl_available():
        raise EngineError(NO_NCCL)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, which lie in its memory: a backend need not know the dtype of what it passes on."""
    import torch

    return tensor.detach().view(-1).view(torch.uint8)
