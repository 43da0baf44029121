"""Workers that reach each other by any library that adds up numpy arrays and gathers them: MPI, Horovod, one of your own.

Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from burnish.engines.communicator import array_of
from burnish.errors import ConfigurationError, EngineError, WorkerError
from burnish.installing import install_command
from burnish.settings import is_whole

Combine = Callable[[np.ndarray], np.ndarray]


class Done:
    """An exchange that was over when it was begun."""

    def wait(self) -> None:
        """Return at once."""


class ArrayCommunicator:
    """The other workers, reached by two functions of numpy arrays.

    ``burnish.DataParallel(communicator=ArrayCommunicator(...))``. With Horovod::

        ArrayCommunicator(
            hvd.rank(), hvd.size(), lambda array: hvd.allreduce(array, op=hvd.Sum), lambda array: hvd.allgather(array[None])
        )

    Every worker calls them in the same order, with arrays of one dtype and shape. The sums of all workers must be the same bits.

    Args:
        rank: of this worker, from 0.
        size: how many workers there are.
        all_reduce: returns the sum of an array over the workers.
        all_gather: returns the arrays of all workers, [workers, ...], in the order of their ranks.
        part: given a number of consecutive ranks, returns the communicator of those that this worker is among, for
            ``norm="sync:<n>"``. None: what goes to some of the workers is gathered from all, which takes more bytes.

    Raises:
        ConfigurationError: a rank that is none of the workers'.
    """

    takes_arrays = True

    def __init__(
        self,
        rank: int,
        size: int,
        all_reduce: Combine,
        all_gather: Combine,
        part: Callable[[int], ArrayCommunicator] | None = None,
    ):
        if not is_whole(rank) or not is_whole(size) or not 0 <= rank < size:
            raise ConfigurationError(f"rank={rank!r}, size={size!r}: ranks count from 0 to one below the number of workers")
        self.rank, self.size = rank, size
        self._sum, self._rows, self._make_part = all_reduce, all_gather, part
        self._parts: dict[int, ArrayCommunicator] = {}

    def all_reduce(self, buffer: Any, *, group: int = 0, channel: str = "") -> Done:
        array = array_of(buffer)
        if self._is_gathered(group):
            total, *rows = self._gathered(array, group)
            np.copyto(array, total)
            for row in rows:
                array += row
        else:
            np.copyto(array, self._checked(self._among(group)._sum(array.copy()), array.shape, array.dtype))
        return Done()

    def all_gather(self, buffer: Any, *, group: int = 0) -> Any:
        return _like(buffer, self._gathered(array_of(buffer), group))

    def all_to_all(
        self, buffer: Any, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[Any, Done]:
        place, rows = self.rank % (group or self.size), self._gathered(array_of(buffer), group)
        if sizes is None:
            return _like(buffer, np.ascontiguousarray(rows[:, place])), Done()
        begin = sum(sizes[:place])
        return _like(buffer, np.ascontiguousarray(rows[:, begin : begin + sizes[place]])), Done()

    def all_to_all_uneven(self, buffer: Any, sizes: Sequence[Sequence[int]]) -> Any:
        array = array_of(buffer)
        padded = np.zeros(max(sum(row) for row in sizes), array.dtype)
        padded[: array.size] = array
        rows = self._gathered(padded, 0)
        begins = [sum(row[: self.rank]) for row in sizes]
        parts = [rows[rank, begin : begin + sizes[rank][self.rank]] for rank, begin in enumerate(begins)]
        return _like(buffer, np.concatenate(parts))

    def reduce_scatter(self, buffer: Any, sizes: Sequence[int], *, channel: str = "") -> tuple[Any, Done]:
        self.all_reduce(buffer, channel=channel).wait()
        begin = sum(sizes[: self.rank])
        return buffer[begin : begin + sizes[self.rank]], Done()

    def shared_buffer(self, dtype: Any, count: int, *, group: int = 0, channel: str = "") -> None:
        """Return None: the numbers may lie anywhere."""

    def shared_rows(self, count: int, *, channel: str = "") -> None:
        """Return None: the bytes may lie anywhere."""

    def _is_gathered(self, group: int) -> bool:
        """Whether workers that exchange among themselves have no communicator of their own."""
        return group not in (0, self.size) and self._make_part is None

    def _among(self, group: int) -> ArrayCommunicator:
        """What the workers of a group are reached by."""
        if group in (0, self.size) or self._make_part is None:
            return self
        if group not in self._parts:
            self._parts[group] = self._make_part(group)
        return self._parts[group]

    def _gathered(self, array: np.ndarray, group: int) -> np.ndarray:
        """The arrays of the workers of a group. All groups come to an exchange at the same time, with arrays of one shape."""
        among = self._among(group)
        rows = self._checked(among._rows(array), (among.size, *array.shape), array.dtype)
        if not self._is_gathered(group):
            return rows
        first = self.rank // group * group
        return rows[first : first + group]

    def _checked(self, result: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = np.asarray(result)
        if array.shape != shape or array.dtype != dtype:
            raise WorkerError(
                f"The communicator returned {array.dtype} of shape {list(array.shape)}, and {dtype} of {list(shape)} was "
                "expected: all_reduce returns what it is given summed, all_gather [workers, ...]"
            )
        return array


def mpi(communicator: Any = None) -> ArrayCommunicator:
    """Return the workers of an MPI run, for ``burnish.DataParallel(communicator=burnish.distributed.mpi())``.

    Run with ``mpiexec -n 4 python script.py``. Needs mpi4py, and no PyTorch: train on ``engine="onnxruntime"``.

    Args:
        communicator: of mpi4py; None is ``MPI.COMM_WORLD``.

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


def _like(buffer: Any, array: np.ndarray) -> Any:
    """An array as what the buffer is: PyTorch's where that is."""
    if isinstance(buffer, np.ndarray):
        return array
    import torch

    return torch.from_numpy(array)
