"""Communicators, through which an engine reaches the other workers; also sums in rank order, and 16-bit gradients.

For an ordered sum each worker gets a part of the buffer from all others, adds it up in rank order, and sends the result to all:
``2 (W - 1) / W`` of the buffer is sent, as in a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.distributed.connection.process_group import SMALL_BYTES, Machines, ProcessGroup
from burnish.distributed.connection.shared_memory import DONE, Work
from burnish.engines.communicator import GRADIENTS, Communicator, Pending, SharedBuffer, SharedRows, array_of
from burnish.errors import ConfigurationError, EngineError, WorkerError
from burnish.installing import install_command
from burnish.registry import Registry
from burnish.validation import is_whole

if TYPE_CHECKING:
    import torch

TOP_EXPONENT = 15
"""A float16 row is scaled to have its largest element in [2^14, 2^15), so that none overflows, even by rounding."""
EXPONENTS = (-100, 128)
"""Bounds of that scaling: the factor itself must be a float32."""


class GroupCommunicator:
    """The workers of a group, with a second connection for ``gradients``, so that statistics of layers do not wait for them."""

    def __init__(self, group: ProcessGroup, gradients: ProcessGroup | None = None):
        self.rank, self.size = group.rank, group.world_size
        self._groups = {(0, ""): group, (0, GRADIENTS): gradients or group.twin()}

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
            return _section(buffer, sizes, self.rank), self.all_reduce(buffer, channel=channel)
        return scattered(self, buffer, sizes, channel=channel)

    def machines(self, group: int, channel: str) -> Machines | None:
        return self._group(group, channel).machines

    def _group(self, size: int, channel: str) -> ProcessGroup:
        key = (size, channel if channel == GRADIENTS else "")
        if key not in self._groups:
            self._groups[key] = self._groups[0, key[1]].split(size)
        return self._groups[key]


class Encoding:
    """The form in which rows of numbers are sent, [rows, n] ``encoded`` as [rows, m]; the base class leaves them unchanged."""

    def encoded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def decoded(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return wire.to(dtype)


class BFloat16(Encoding):
    """Rounded to bfloat16: the range of float32, and a relative error of up to 2^-8."""

    def encoded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.bfloat16()


class Float16(Encoding):
    """Rounded to float16, with a power of two per row that is sent with it.

    The relative error is up to 2^-11 for numbers of at least 2^-29 times the row's largest; smaller ones have an error of up to
    2^-39 times the largest. NaN and infinities are preserved.
    """

    def encoded(self, rows: torch.Tensor) -> torch.Tensor:
        import torch

        largest = rows.abs().amax(dim=1, keepdim=True)
        exponents = torch.where(largest.isfinite(), largest, 0).double().frexp().exponent.clamp(*EXPONENTS)
        return torch.cat([rows.ldexp(TOP_EXPONENT - exponents).half(), exponents.half()], dim=1)

    def decoded(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return wire[:, :-1].to(dtype).ldexp(wire[:, -1:].int() - TOP_EXPONENT)


COMPRESSIONS: Registry[Encoding] = Registry("compression", {"bfloat16": BFloat16, "float16": Float16}, bare=True)


class OrderedSums:
    """A communicator that sums in rank order: everything if ``deterministic``, otherwise only compressed gradients."""

    def __init__(self, communicator: Communicator, *, deterministic: bool = True, compression: Encoding | None = None):
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator, self._deterministic, self._compression = communicator, deterministic, compression
        self.all_gather, self.shared_rows = communicator.all_gather, communicator.shared_rows
        self.all_to_all, self.all_to_all_uneven = communicator.all_to_all, communicator.all_to_all_uneven

    def all_reduce(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> Pending:
        import torch

        compression = self._compression_of(buffer.dtype, channel)
        workers = group or self.size
        if workers == 1 or (compression is None and not self._deterministic):
            return self._communicator.all_reduce(buffer, group=group, channel=channel)
        encoding = compression or Encoding()
        if not self._deterministic and (machines := self._machines(group, channel)) is not None:
            machines.inside.all_reduce(buffer, name=GRADIENTS)
            if machines.between is not None:
                between = OrderedSums(GroupCommunicator(machines.between, machines.between), compression=encoding)
                between.all_reduce(buffer, channel=GRADIENTS).wait()
            machines.inside.broadcast(buffer, name=GRADIENTS)
            return DONE
        if buffer.nbytes <= SMALL_BYTES:
            rows = self.all_gather(encoding.encoded(buffer.unsqueeze(0))[0], group=group)
            buffer.copy_(_sum_of(encoding.decoded(rows, _wide(buffer))))
            return DONE
        width = -(-buffer.numel() // workers)
        padded = torch.nn.functional.pad(buffer, (0, width * workers - buffer.numel()))
        own, pending = scattered(self._communicator, padded, [width] * workers, compression, group=group, channel=channel)

        def finish() -> None:
            pending.wait()
            sums = self.all_gather(encoding.encoded(own.unsqueeze(0))[0], group=group)
            buffer.copy_(encoding.decoded(sums, _wide(buffer)).flatten()[: buffer.numel()])

        return Work(finish)

    def shared_buffer(self, dtype: torch.dtype, count: int, *, group: int = 0, channel: str = "") -> SharedBuffer | None:
        if self._compression_of(dtype, channel) is not None or self._machines(group, channel) is not None:
            return None
        return self._communicator.shared_buffer(dtype, count, group=group, channel=channel)

    def reduce_scatter(self, buffer: torch.Tensor, sizes: Sequence[int], *, channel: str = "") -> tuple[torch.Tensor, Pending]:
        return scattered(self._communicator, buffer, sizes, self._compression_of(buffer.dtype, channel), channel=channel)

    def _compression_of(self, dtype: torch.dtype, channel: str) -> Encoding | None:
        return self._compression if channel == GRADIENTS and dtype.is_floating_point else None

    def _machines(self, group: int, channel: str) -> Machines | None:
        return self._communicator.machines(group, channel) if isinstance(self._communicator, GroupCommunicator) else None


def scattered(
    communicator: Communicator, buffer: torch.Tensor, sizes: Sequence[int], encoding: Encoding | None = None, **among: Any
) -> tuple[torch.Tensor, Pending]:
    import torch

    own, wire, widths = _section(buffer, sizes, communicator.rank % len(sizes)), buffer, list(sizes)
    if encoding is not None:
        parts = [encoding.encoded(part.unsqueeze(0))[0] for part in torch.split(buffer, widths) if part.numel()]
        wire, lengths = torch.cat(parts), iter(map(len, parts))
        widths = [next(lengths) if size else 0 for size in sizes]
    rows, pending = communicator.all_to_all(wire, sizes=widths, **among)

    def finish() -> None:
        pending.wait()
        if own.numel():
            own.copy_(_sum_of((encoding or Encoding()).decoded(rows, _wide(own))))

    return own, Work(finish)


def _section(buffer: Any, sizes: Sequence[int], rank: int) -> Any:
    first = sum(sizes[:rank])
    return buffer[first : first + sizes[rank]]


def _sum_of(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _wide(buffer: torch.Tensor) -> torch.dtype:
    import torch

    return torch.float32 if buffer.is_floating_point() and buffer.element_size() < 4 else buffer.dtype


class ArrayCommunicator:
    """The other workers, reached by two functions of numpy arrays (MPI, Horovod, your own library), without PyTorch.

    ``burnish.DataParallel(communicator=ArrayCommunicator(...))``. With Horovod::

        ArrayCommunicator(
            hvd.rank(), hvd.size(), lambda array: hvd.allreduce(array, op=hvd.Sum), lambda array: hvd.allgather(array[None])
        )

    Every worker calls them in the same order, with arrays of the same dtype and shape. A sum must have the same bits on all
    workers.

    Args:
        rank: rank of this worker, from 0.
        size: number of workers.
        all_reduce: returns the sum of an array over the workers.
        all_gather: returns the arrays of all workers, [workers, ...], in rank order.
        part: given a number of consecutive ranks, returns the communicator of the part with this worker, for ``norm="sync:<n>"``.
            None: all workers take part in exchanges of some, which sends more bytes.

    Raises:
        ConfigurationError: the rank is not a worker's.
    """

    takes_arrays = True

    def __init__(
        self,
        rank: int,
        size: int,
        all_reduce: Callable[[np.ndarray], np.ndarray],
        all_gather: Callable[[np.ndarray], np.ndarray],
        part: Callable[[int], ArrayCommunicator] | None = None,
    ):
        if not is_whole(rank) or not is_whole(size) or not 0 <= rank < size:
            raise ConfigurationError(f"rank={rank!r}, size={size!r}: ranks count from 0 to one below the number of workers")
        self.rank, self.size = rank, size
        self._sum, self._rows = all_reduce, all_gather
        self._part = None if part is None else functools.cache(part)

    def all_reduce(self, buffer: Any, *, group: int = 0, channel: str = "") -> Pending:
        array = array_of(buffer)
        if (among := self._among(group)).size != (group or self.size):
            total, *rows = self._gathered(array, group)
            np.copyto(array, total)
            for row in rows:
                array += row
        else:
            np.copyto(array, self._checked(among._sum(array.copy()), array.shape, array.dtype))
        return DONE

    def all_gather(self, buffer: Any, *, group: int = 0) -> Any:
        return _like(buffer, self._gathered(array_of(buffer), group))

    def all_to_all(
        self, buffer: Any, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[Any, Pending]:
        place, rows = self.rank % (group or self.size), self._gathered(array_of(buffer), group)
        own = rows[:, place] if sizes is None else np.stack([_section(row, sizes, place) for row in rows])
        return _like(buffer, np.ascontiguousarray(own)), DONE

    def all_to_all_uneven(self, buffer: Any, sizes: Sequence[Sequence[int]]) -> Any:
        array = array_of(buffer)
        padded = np.zeros(max(sum(row) for row in sizes), array.dtype)
        padded[: array.size] = array
        rows = self._gathered(padded, 0)
        return _like(buffer, np.concatenate([_section(row, widths, self.rank) for row, widths in zip(rows, sizes, strict=True)]))

    def reduce_scatter(self, buffer: Any, sizes: Sequence[int], *, channel: str = "") -> tuple[Any, Pending]:
        return _section(buffer, sizes, self.rank), self.all_reduce(buffer, channel=channel)

    def shared_buffer(self, dtype: Any, count: int, *, group: int = 0, channel: str = "") -> None:
        """Return None, like ``shared_rows``: the numbers need no shared memory."""

    def shared_rows(self, count: int, *, channel: str = "") -> None: ...

    def _among(self, group: int) -> ArrayCommunicator:
        return self if group in (0, self.size) or self._part is None else self._part(group)

    def _gathered(self, array: np.ndarray, group: int) -> np.ndarray:
        among = self._among(group)
        rows = self._checked(among._rows(array), (among.size, *array.shape), array.dtype)
        first = 0 if among.size == (group or self.size) else self.rank // group * group
        return rows[first : first + (group or self.size)]

    def _checked(self, result: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = np.asarray(result)
        if array.shape != shape or array.dtype != dtype:
            raise WorkerError(
                f"The communicator returned {array.dtype} of shape {list(array.shape)}, and {dtype} of {list(shape)} was "
                "expected: all_reduce returns what it is given summed, all_gather [workers, ...]"
            )
        return array


def _like(buffer: Any, array: np.ndarray) -> Any:
    if isinstance(buffer, np.ndarray):
        return array
    import torch

    return torch.from_numpy(array)


def mpi(communicator: Any = None) -> ArrayCommunicator:
    """Return the workers of an MPI run, for ``burnish.DataParallel(communicator=burnish.distributed.mpi())``.

    Run with ``mpiexec -n 4 python script.py``. This needs mpi4py but no PyTorch: train with ``engine="onnxruntime"``.

    Args:
        communicator: a communicator of mpi4py; None is ``MPI.COMM_WORLD``.

    Raises:
        EngineError: mpi4py is not installed, or finds no MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EngineError(f"MPI cannot be used here ({error}): {install_command('mpi4py')}, and an MPI such as mpich") from error
    comm = MPI.COMM_WORLD if communicator is None else communicator

    def all_reduce(array: np.ndarray) -> np.ndarray:
        total = np.empty_like(array)
        comm.Allreduce(array, total, op=MPI.SUM)
        return total

    def all_gather(array: np.ndarray) -> np.ndarray:
        rows = np.empty((comm.Get_size(), *array.shape), array.dtype)
        comm.Allgather(np.ascontiguousarray(array), rows)
        return rows

    def part(group: int) -> ArrayCommunicator:
        return mpi(comm.Split(comm.Get_rank() // group, comm.Get_rank()))

    return ArrayCommunicator(comm.Get_rank(), comm.Get_size(), all_reduce, all_gather, part)
