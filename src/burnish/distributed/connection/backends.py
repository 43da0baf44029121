"""Exchanges of ``torch.distributed`` among some workers: Gloo on CPUs, NCCL on GPUs, or the caller's group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from burnish.distributed.connection.shared_memory import as_bytes
from burnish.distributed.connection.store import torch_distributed
from burnish.errors import EngineError

if TYPE_CHECKING:
    import torch

NO_NCCL = "This PyTorch has no NCCL, by which GPUs exchange tensors: install a build for CUDA, or train on cpu"


@dataclass(frozen=True)
class Backends:
    """Process groups of ``torch.distributed`` that exchange contiguous tensors, on CPUs and on GPUs.

    A method begins an exchange and returns what to wait for, or None. ``abort`` ends the groups in ``owned``, which were made
    here.
    """

    cpu: Any
    gpu: Any
    owned: Sequence[Any]

    @classmethod
    def open(cls, store: Any, rank: int, size: int, device: str, limit: float) -> Backends:
        """Connect some workers, who call this together, for exchanges of up to ``limit`` seconds; raises RuntimeError without one
        of them.
        """
        distributed = torch_distributed()
        seconds, gpu = timedelta(seconds=limit), None
        if device != "cpu":
            check_nccl()
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = seconds
            gpu = distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl", store), rank, size, options)
        cpu = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), rank, size, seconds)
        return cls(cpu, gpu, [each for each in (cpu, gpu) if each is not None])

    @classmethod
    def of_group(cls, group: Any, store: Any, device: str, limit: float) -> Backends:
        has = _names_of(group)
        cpu = group if "cpu" in has else None
        gpu = group if has.get("cuda", "gloo") != "gloo" else None
        if cpu is not None and (device == "cpu" or gpu is not None):
            return cls(cpu, gpu, [])
        own = cls.open(store, group.rank(), group.size(), "cpu" if gpu is not None else device, limit)
        return cls(cpu or own.cpu, gpu or own.gpu, own.owned)

    @classmethod
    def within(cls, group: Any, members: Sequence[int], store: Any, device: str, limit: float) -> Backends | None:
        """Connect some workers of the caller's group by the backend registered for it, if it has one of its own."""
        if group is None or _names_of(group).get("cpu" if device == "cpu" else "cuda", "gloo") in ("gloo", "nccl", "mpi"):
            return None
        distributed = torch_distributed()
        ranks = distributed.get_process_group_ranks(group)
        part = distributed.new_group(
            [ranks[member] for member in members],
            timedelta(seconds=limit),
            distributed.distributed_c10d.get_backend_config(group),
            use_local_synchronization=True,
        )
        made = cls.of_group(part, store, device, limit)
        return replace(made, owned=[part, *made.owned])

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> Any:
        if not tensor.numel():
            return None
        distributed = torch_distributed()
        options = distributed.AllreduceOptions()
        options.reduceOp = getattr(distributed.ReduceOp, operation.upper())
        return self._of(tensor).allreduce([tensor], options)

    def all_gather(self, rows: torch.Tensor, tensor: torch.Tensor) -> Any:
        if not tensor.numel():
            return None
        return self._of(tensor).allgather([list(as_bytes(rows).view(len(rows), -1).unbind())], [as_bytes(tensor)])

    def all_to_all(self, received: torch.Tensor, gets: Sequence[int], given: torch.Tensor, gives: Sequence[int]) -> Any:
        width = given.itemsize
        sizes = [[count * width for count in counts] for counts in (gets, gives)]
        return self._of(given).alltoall_base(as_bytes(received), as_bytes(given), *sizes)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Any:
        if not tensor.numel():
            return None
        options = torch_distributed().BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._of(tensor).broadcast([as_bytes(tensor)], options)

    def abort(self) -> None:
        for each in self.owned:
            with suppress(RuntimeError):
                each.abort()

    def _of(self, tensor: torch.Tensor) -> Any:
        return self.cpu if tensor.device.type == "cpu" else self.gpu


def _names_of(group: Any) -> dict[str, str]:
    return dict(entry.split(":") for entry in torch_distributed().distributed_c10d.get_backend_config(group).split(","))


def adds_up(tensor: torch.Tensor) -> bool:
    """Whether backends add up this dtype; they gather any."""
    import torch

    return tensor.dtype not in (torch.int16, torch.bool)


def check_nccl() -> None:
    if not torch_distributed().is_nccl_available():
        raise EngineError(NO_NCCL)
