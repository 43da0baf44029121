"""Exchanges between the workers of one machine through memory: nothing is copied into the system, and no thread computes beside.

Every worker of a group has a file in memory (``memfd_create``), which the others map too. It has no name in any folder, and is
gone with the last process that maps it, however that ends. Workers offer each other their files by what they have already (the
store of the run at first), and use them only where all of them can: on Linux, in one network namespace, as one user, with the
engine's kernels. A container that cannot see another's processes does not get at their files, and a random token in each says
that the file is the one that was offered.

Counters in the files say who has written what (``shared_memory.cpp`` of the PyTorch engine). A worker that waits looks up now
and then, as in any exchange: at what the watch knows, and whether the processes that it waits for still run.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from burnish.errors import WorkerError
from burnish.settings import is_switched_off

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 2**18
"""Up to this size, what a worker gives to an exchange goes through places that all exchanges of a group share."""
SWITCH = "BURNISH_SHARED_MEMORY"
OPERATIONS = ("sum", "min", "max", "gather")
LOOK_UP_SECONDS = 0.5
# Of a file: marks, then a token, then what is exchanged.
_MARKS, _TOKEN, _HEADER = 512, 32, 4096
_DONE, _NOT_YET, _GONE, _DIFFERS = range(4)
# From fcntl.h: the file neither grows nor shrinks, and that stays so.
_F_ADD_SEALS, _SEAL_SIZE = 1033, 0x1 | 0x2 | 0x4


class Waiting(Protocol):
    """What an exchange asks of the group that it belongs to: ``ProcessGroup``."""

    rank: int
    world_size: int
    timeout: float
    shares_memory: bool

    def check(self) -> None: ...
    def count(self, name: str) -> None: ...
    def late(self, name: str, limit: float) -> WorkerError: ...
    def broken(self, name: str, reason: str, ended: Sequence[int] = ...) -> WorkerError: ...
    def at_odds(self, name: str) -> WorkerError: ...
    def all_gather_json(self, value: Any, *, name: str = ...) -> list[Any]: ...


class Files:
    """A file of each worker of a group, mapped by all of them.

    Attributes:
        marks: those of each worker, int64.
        own: this worker's.
    """

    def __init__(self, group: Waiting, maps: Sequence[mmap.mmap], processes: Processes):
        import torch

        self._group, self._maps, self._processes = group, maps, processes
        self.marks = [torch.frombuffer(each, dtype=torch.int64, count=_MARKS // 8) for each in maps]
        self.own = self.marks[group.rank]
        _open.add(self)

    @classmethod
    def open(cls, group: Waiting, size: int) -> Files | None:
        """Map files with room for ``size`` bytes; called by all workers together.

        None, on all of them, where one of them cannot.
        """
        file, offer = _offered(size) if group.shares_memory else (None, None)
        try:
            offers = group.all_gather_json(offer, name="offers to share memory")
            mapped = None if file is None or not _are_of_one_place(offers) else _mapped(offers, file, group.rank, size)
            usable = group.all_gather_json(mapped is not None, name="whether memory is shared")
        finally:
            if file is not None:
                os.close(file)
        return cls(group, *mapped) if mapped is not None and all(usable) else None

    def tensors(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Return what each worker's file has room for, as numbers."""
        import torch

        return [torch.frombuffer(each, dtype=dtype, count=count, offset=_HEADER) for each in self._maps]

    def finish(self, name: str, attempt: Callable[[float], int]) -> None:
        """Try something that may take the given seconds, until it is done.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time, or gives something else.
        """
        began = time.monotonic()
        while (outcome := attempt(LOOK_UP_SECONDS)) != _DONE:
            if outcome == _DIFFERS:
                raise self._group.at_odds(name)
            self._group.check()
            # Who has ended may have done its part before.
            ended = self._processes.ended()
            if (outcome == _GONE or ended) and attempt(0.0) != _DONE:
                raise self._group.broken(name, "the process of another worker has ended", ended)
            if time.monotonic() > began + self._group.timeout:
                raise self._group.late(name, self._group.timeout)


class Processes:
    """The processes of other workers: which of them still run.

    Args:
        numbers: of the processes, by rank.
    """

    def __init__(self, numbers: Mapping[int, int]):
        self._ranks: dict[int, int] = {}
        self._handles: list[int] = []
        self._finalizer = weakref.finalize(self, _close, self._handles)
        self._poll = select.poll()
        for rank, number in numbers.items():
            self._handles.append(os.pidfd_open(number))
            self._ranks[self._handles[-1]] = rank
            self._poll.register(self._handles[-1], select.POLLIN)

    def ended(self) -> list[int]:
        """The ranks of those that have ended."""
        return [self._ranks[handle] for handle, _ in self._poll.poll(0)]


class Lane:
    """Exchanges of small values, one after the other: each worker gives its own, and takes what all gave.

    An exchange is taken at the latest when the next one begins. So two places for each worker are enough: who gives to an
    exchange has taken from the one before, to which every other gave after it had taken from the one before that.

    Args:
        group: the workers.
        files: with room for two places.

    Attributes:
        added: the dtypes of numbers that can be added up here.
    """

    def __init__(self, group: Waiting, files: Files):
        import torch

        self._rank, self._files = group.rank, files
        self._slots = files.tensors(torch.uint8, 2 * SMALL_BYTES)
        self._number = 0
        self._pending: Taken | None = None
        self._kernels = torch.ops.burnish
        self.added = {torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32}
        self._gathered = {torch.uint8, torch.int8, torch.int16, torch.float16, torch.bool}

    @classmethod
    def open(cls, group: Waiting) -> Lane | None:
        """Return the lane of a group; None, on all workers, where they cannot share memory."""
        files = Files.open(group, 2 * SMALL_BYTES)
        return None if files is None else cls(group, files)

    def takes(self, tensor: torch.Tensor, operation: str) -> bool:
        """Whether an exchange goes this way: the same on all workers, who give tensors of one size and dtype."""
        fits = tensor.nbytes <= SMALL_BYTES and tensor.is_contiguous()
        return fits and (self.adds_up(tensor.dtype) or (operation == "gather" and tensor.dtype in self._gathered))

    def adds_up(self, dtype: torch.dtype) -> bool:
        """Whether numbers of this dtype can be added up here."""
        return dtype in self.added

    def begin(self, tensor: torch.Tensor, result: torch.Tensor, operation: str, name: str) -> Taken:
        """Give a tensor; what comes of it is in ``result`` when what is returned has been waited for.

        Args:
            tensor: what this worker gives.
            result: for ``gather`` [workers, ...]; else of the shape of ``tensor``, and may be that.
            operation: one of ``OPERATIONS``.
            name: what is exchanged, for messages.
        """
        if self._pending is not None:
            self._pending.wait()
        self._number += 1
        code = OPERATIONS.index(operation)
        self._kernels.shared_give.default(self._files.own, self._slots[self._rank], tensor, self._number, code)
        self._pending = Taken(self, result, self._number, code, name)
        return self._pending

    def take(self, taken: Taken) -> None:
        """Wait for an exchange that was begun, and let its result be there."""
        take, marks, slots = self._kernels.shared_take.default, self._files.marks, self._slots
        self._pending = None
        self._files.finish(taken.name, lambda seconds: take(marks, slots, taken.result, taken.number, taken.operation, seconds))


class Taken:
    """An exchange of a lane, under way."""

    def __init__(self, lane: Lane, result: torch.Tensor, number: int, operation: int, name: str):
        self.result, self.number, self.operation, self.name = result, number, operation, name
        self._lane: Lane | None = lane

    def wait(self) -> None:
        """Wait until the result is there.

        Raises:
            WorkerError: a worker is gone, has not come to it in time, or gave something else.
        """
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.take(self)


class _Shared:
    """Memory of each worker that the others read and write, in one exchange after the other.

    Args:
        group: the workers.
        files: with room for what is exchanged.
        dtype, count: of the numbers of each worker.
        name: what is exchanged, for messages.

    Attributes:
        tensor: the numbers of this worker.
    """

    def __init__(self, group: Waiting, files: Files, dtype: torch.dtype, count: int, name: str):
        import torch

        self._group, self._rank, self._files, self._name = group, group.rank, files, name
        self._buffers = files.tensors(dtype, count)
        self.tensor = self._buffers[group.rank]
        self._number = 0
        self._settled = 0
        self._kernels = torch.ops.burnish

    def settle(self) -> None:
        """Wait until no other worker reads or writes this one's numbers any more; before they are written anew.

        Raises:
            WorkerError: a worker is gone, or has not come to the exchange in time.
        """
        if self._settled < self._number:
            settle, marks = self._kernels.shared_settle.default, self._files.marks
            self._files.finish(self._name, lambda seconds: settle(marks, self._number, seconds))
            self._settled = self._number

    def _show(self) -> None:
        """Let the others know that the numbers are there."""
        self._group.count(self._name)
        self._number += 1
        self._kernels.shared_show.default(self._files.own, self._number)


class SharedBuffer(_Shared):
    """Numbers of which each worker has its own, and that are replaced by their sums, again and again.

    Each worker adds up a part of them, in the order of the ranks, and writes the sums of its part to all, or keeps them
    (``reduce_scatter``). What a worker has in its buffer is its own until it begins an exchange, and again when that is settled.

    Args:
        group, files, dtype, count, name: as of any shared memory.
        under_way: the buffers of this group that are being exchanged.
    """

    def __init__(self, group: Waiting, files: Files, dtype: torch.dtype, count: int, name: str, under_way: list[SharedBuffer]):
        super().__init__(group, files, dtype, count, name)
        self._what, self._under_way = name, under_way
        self._section: tuple[int, int] | None = None

    def all_reduce(self) -> SharedBuffer:
        """Begin to replace the numbers by their sums; ``wait`` ends it."""
        return self._begin(None)

    def reduce_scatter(self, sizes: Sequence[int]) -> SharedBuffer:
        """Begin to replace this worker's section of the numbers by their sums; ``wait`` ends it. Other sections stay.

        Args:
            sizes: of the sections, which lie one after the other, by rank.
        """
        first = sum(sizes[: self._rank])
        return self._begin((first, first + sizes[self._rank]))

    def add_up(self, vector: torch.Tensor, name: str) -> None:
        """Replace a vector of any length, of this dtype, by its sum over the workers."""
        self._what = name
        import torch

        for piece in torch.split(vector, len(self.tensor)):
            self.settle()
            self.tensor[: len(piece)] = piece
            self.all_reduce().wait()
            piece.copy_(self.tensor[: len(piece)])

    def _begin(self, section: tuple[int, int] | None) -> SharedBuffer:
        self.settle()
        self._section = section
        self._name = f"{'all-reduce' if section is None else 'reduce-scatter'} of {self._what}"
        self._show()
        self._under_way.append(self)
        return self

    def wait(self) -> None:
        """Wait until ``tensor`` has the sums.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time.
        """
        # Of all buffers first: the others then find the sums that they wait for.
        while self._under_way:
            self._under_way.pop(0)._add_up()
        if self._section is None:
            super().settle()

    def settle(self) -> None:
        self.wait()
        super().settle()

    def ends_at_once(self) -> bool:
        """End the exchange if all workers have come to it; returns whether it has ended."""
        if self in self._under_way and self._attempt(0.0) == _DONE:
            self._under_way.remove(self)
        return self not in self._under_way

    def of(self, rank: int) -> torch.Tensor:
        """The numbers of another worker."""
        return self._buffers[rank]

    def _add_up(self) -> None:
        self._files.finish(self._name, self._attempt)

    def _attempt(self, seconds: float) -> int:
        marks, buffers, rank, number = self._files.marks, self._buffers, self._rank, self._number
        if self._section is None:
            return int(self._kernels.shared_sum.default(marks, buffers, rank, number, seconds))
        return int(self._kernels.shared_section.default(marks, buffers, rank, *self._section, number, seconds))


class SharedRows(_Shared):
    """Bytes that each worker shows to all others, again and again: ``show``, ``rows``, ``release``."""

    def show(self) -> None:
        """Begin an exchange: the others may read ``tensor`` now."""
        self._show()

    def rows(self) -> list[torch.Tensor]:
        """Wait for what the workers show, and return it, by rank; to be read, and left as it is.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time.
        """
        wait, marks = self._kernels.shared_await.default, self._files.marks
        self._files.finish(self._name, lambda seconds: wait(marks, self._number, seconds))
        return self._buffers

    def release(self) -> None:
        """End an exchange: the rows are read no more, and the others may write over them."""
        self._kernels.shared_release.default(self._files.own, self._number)


def leave() -> None:
    """Tell whoever waits for this worker, in whatever group, that nothing more comes from it."""
    import torch

    for files in list(_open):
        torch.ops.burnish.shared_leave.default(files.own)
    _open.clear()


_open: weakref.WeakSet[Files] = weakref.WeakSet()


def prepare() -> bool:
    """Have the kernels built and loaded that this worker shares memory by; returns whether it can."""
    if is_switched_off(SWITCH) or not sys.platform.startswith("linux"):
        return False
    from burnish.engines.torch.native import kernels

    return kernels.available("shared_memory")


def _offered(size: int) -> tuple[int | None, dict[str, Any] | None]:
    """A file with room for ``size`` bytes, and what others need to know to map it; None where this worker shares no memory."""
    if not prepare():
        return None, None
    import fcntl

    file = None
    try:
        token = secrets.token_bytes(_TOKEN)
        file = os.memfd_create("burnish", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(file, 0o600)
        os.posix_fallocate(file, 0, _HEADER + size)  # now, rather than at the first write to a page that is not to be had
        os.pwrite(file, token, _MARKS)
        fcntl.fcntl(file, _F_ADD_SEALS, _SEAL_SIZE)
        return file, {
            "system": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            # Containers of one machine, and namespaces that stand in for machines, are taken for machines.
            "network": os.stat("/proc/self/ns/net").st_ino,
            "process": os.getpid(),
            "file": file,
            "token": token.hex(),
        }
    except (OSError, AttributeError):
        if file is not None:
            os.close(file)
        return None, None


def _are_of_one_place(offers: Sequence[dict[str, Any] | None]) -> bool:
    """Whether all workers offer memory, and run under one system in one network namespace."""
    places = {None if offer is None else (offer["system"], offer["network"]) for offer in offers}
    return len(places) == 1 and None not in places


def _mapped(offers: Sequence[Any], own_file: int, rank: int, size: int) -> tuple[list[mmap.mmap], Processes] | None:
    """The files that are offered, and who offers them; None where one is not to be had."""
    maps = []
    try:
        processes = Processes({other: offer["process"] for other, offer in enumerate(offers) if other != rank})
        for other, offer in enumerate(offers):
            path = f"/proc/{offer['process']}/fd/{offer['file']}"
            file = own_file if other == rank else os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                status = os.fstat(file)
                if status.st_size != _HEADER + size or status.st_uid != os.geteuid():
                    return None
                maps.append(mmap.mmap(file, status.st_size))
            finally:
                if other != rank:
                    os.close(file)
            if maps[-1][_MARKS : _MARKS + _TOKEN] != bytes.fromhex(offer["token"]):
                return None
    except (OSError, AttributeError):
        return None
    return maps, processes


def _close(handles: list[int]) -> None:
    for handle in handles:
        with suppress(OSError):
            os.close(handle)
