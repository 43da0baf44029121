"""Exchanges between workers of one machine through shared memory: small ones at once, larger ones piece by piece.

Each worker has a file in memory (``memfd_create``) that the others map; it disappears with the last process that maps it. Workers
offer their files through the run's store and use them if all can: on Linux, in the same namespaces, with the same user and the
engine's kernels. A random token proves that a file is the offered one. Counters in the files record who has written what
(``shared_memory.cpp``). A waiting worker checks regularly that the others are alive.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from burnish.distributed.connection.store import Location
from burnish.engines.communicator import Pending
from burnish.errors import EngineError, WorkerError
from burnish.settings import is_switched_off

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 2**18
"""Largest exchange that goes through places shared by all exchanges of a group."""
PIECE_BYTES = 2**20
SUM_BYTES = 4 * PIECE_BYTES
SWITCH = "BURNISH_SHARED_MEMORY"
OPERATIONS = ("sum", "min", "max", "gather")
LOOK_UP_SECONDS = 0.5
# Layout of a file: marks, token, data. Each piece of data has its own header.
_MARKS, _TOKEN, _HEADER, _PIECE_HEADER = 512, 32, 4096, 8
_DONE, _NOT_YET, _GONE, _DIFFERS = range(4)
# From fcntl.h: seals the size of the file, permanently.
_F_ADD_SEALS, _SEAL_SIZE = 1033, 0x1 | 0x2 | 0x4


class Waiting(Protocol):
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


class Work:
    """An exchange in progress. Do not touch its tensors until ``wait`` has returned."""

    def __init__(self, finish: Callable[[], None] | None = None):
        self._finish = finish

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
        self._finish = None


DONE = Work()


class Files:
    """A file of each worker, mapped by all; ``marks`` are their counters, and ``own`` this worker's."""

    def __init__(self, group: Waiting, maps: Sequence[mmap.mmap], processes: Processes):
        import torch

        self._group, self._maps, self._processes = group, maps, processes
        self.marks = [torch.frombuffer(each, dtype=torch.int64, count=_MARKS // 8) for each in maps]
        self.own = self.marks[group.rank]
        _open.add(self)

    @classmethod
    def open(cls, group: Waiting, size: int) -> Files | None:
        """Map files with room for ``size`` bytes. All call this together, and all get None if one cannot."""
        file, offer = _offered(size) if group.shares_memory else (None, None)
        try:
            offers = group.all_gather_json(offer, name="offers to share memory")
            is_one_place = len({None if each is None else each["system"] for each in offers}) == 1
            mapped = _mapped(offers, file, group.rank, size) if file is not None and is_one_place else None
            usable = group.all_gather_json(mapped is not None, name="whether memory is shared")
        finally:
            if file is not None:
                os.close(file)
        return cls(group, *mapped) if mapped is not None and all(usable) else None

    def tensors(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        import torch

        return [torch.frombuffer(each, dtype=dtype, count=count, offset=_HEADER) for each in self._maps]

    def finish(self, name: str, attempt: Callable[[float], int]) -> None:
        began = time.monotonic()
        while (outcome := attempt(LOOK_UP_SECONDS)) != _DONE:
            if outcome == _DIFFERS:
                raise self._group.at_odds(name)
            self._group.check()
            # A worker that has ended may have finished its part before.
            ended = self._processes.ended()
            if (outcome == _GONE or ended) and attempt(0.0) != _DONE:
                raise self._group.broken(name, "the process of another worker has ended", ended)
            if time.monotonic() > began + self._group.timeout:
                raise self._group.late(name, self._group.timeout)


class Processes:
    def __init__(self, numbers: Mapping[int, int]):
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        for rank, number in numbers.items():
            handle = os.pidfd_open(number)
            weakref.finalize(self, os.close, handle)
            self._ranks[handle] = rank
            self._poll.register(handle, select.POLLIN)

    def ended(self) -> list[int]:
        return [self._ranks[handle] for handle, _ in self._poll.poll(0)]


class SharedRows:
    """Numbers that each worker repeatedly shows to all others. ``tensor`` is this worker's, ``buffers`` those of all."""

    def __init__(self, group: Waiting, files: Files, dtype: torch.dtype, count: int, name: str):
        import torch

        self._group, self._rank, self._files, self.name = group, group.rank, files, name
        self.buffers = files.tensors(dtype, count)
        self.tensor = self.buffers[group.rank]
        self._number = self._settled = 0
        self._kernels = torch.ops.burnish

    def show(self) -> None:
        self._group.count(self.name)
        self._number += 1
        self._kernels.shared_show.default(self._files.own, self._number)

    def settle(self) -> None:
        """Wait until no other worker reads this one's numbers, so that they may be overwritten."""
        if self._settled < self._number:
            settle, marks = self._kernels.shared_settle.default, self._files.marks
            self._files.finish(self.name, lambda seconds: settle(marks, self._number, seconds))
            self._settled = self._number

    def rows(self) -> list[torch.Tensor]:
        """Wait for the workers' numbers and return them, read-only."""
        wait, marks = self._kernels.shared_await.default, self._files.marks
        self._files.finish(self.name, lambda seconds: wait(marks, self._number, seconds))
        return self.buffers

    def release(self) -> None:
        self._kernels.shared_release.default(self._files.own, self._number)


class SharedBuffer(SharedRows):
    """Numbers that are repeatedly replaced by their sums; a worker may write its own before an exchange and after ``settle``.

    Each worker adds up a part, in rank order. ``under_way`` are this group's buffers in exchange.
    """

    def __init__(self, group: Waiting, files: Files, dtype: torch.dtype, count: int, name: str, under_way: list[SharedBuffer]):
        super().__init__(group, files, dtype, count, name)
        self.what, self._under_way = name, under_way
        self._section: tuple[int, int] | None = None

    def all_reduce(self) -> SharedBuffer:
        return self._begin(None)

    def reduce_scatter(self, sizes: Sequence[int]) -> SharedBuffer:
        first = sum(sizes[: self._rank])
        return self._begin((first, first + sizes[self._rank]))

    def _begin(self, section: tuple[int, int] | None) -> SharedBuffer:
        self.settle()
        self._section = section
        self.name = f"{'all-reduce' if section is None else 'reduce-scatter'} of {self.what}"
        self.show()
        self._under_way.append(self)
        return self

    def wait(self) -> None:
        # Finish all buffers first, so that the others do not wait for this worker's sums.
        while self._under_way:
            buffer = self._under_way.pop(0)
            buffer._files.finish(buffer.name, buffer._attempt)
        if self._section is None:
            super().settle()

    def settle(self) -> None:
        self.wait()
        super().settle()

    def ends_at_once(self) -> bool:
        """End the exchange if all workers have reached it; return True if it has ended."""
        if self in self._under_way and self._attempt(0.0) == _DONE:
            self._under_way.remove(self)
        return self not in self._under_way

    def _attempt(self, seconds: float) -> int:
        marks, buffers, rank, number = self._files.marks, self.buffers, self._rank, self._number
        if self._section is None:
            return int(self._kernels.shared_sum.default(marks, buffers, rank, number, seconds))
        return int(self._kernels.shared_section.default(marks, buffers, rank, *self._section, number, seconds))


class Memory:
    """The exchanges of a group, of contiguous tensors. Methods that return nothing are blocking."""

    def __init__(self, group: Waiting, files: Files):
        import torch

        self._group, self._rank, self._files = group, group.rank, files
        self._places = files.tensors(torch.uint8, 2 * SMALL_BYTES)
        self._number = 0
        self._pending: Pending = DONE
        self._kernels = torch.ops.burnish
        self._added = {torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32}
        self._gathered = {*self._added, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bool}
        self._pieces: SharedRows | None = None
        self._sums: dict[torch.dtype, SharedBuffer | None] = {}
        self._under_way: list[SharedBuffer] = []

    @classmethod
    def open(cls, group: Waiting) -> Memory | None:
        files = Files.open(group, 2 * SMALL_BYTES)
        return None if files is None else cls(group, files)

    def all_reduce(self, tensor: torch.Tensor, operation: str, name: str) -> Pending:
        name = f"all-reduce of {name}"
        if tensor.dtype in self._added and _is_small(tensor):
            return self._begin(tensor, tensor, operation, name)
        import torch

        vector, workers = tensor.detach().view(-1), self._group.world_size
        # Detect workers with other arguments before adding anything up.
        none = torch.empty(0, dtype=torch.uint8)
        self._exchange(none, [0] * workers, [(0, none)] * workers, name, f"{operation} {tensor.dtype} {len(vector)}")
        if operation == "sum" and tensor.dtype in self._added:
            if tensor.dtype not in self._sums:
                self._sums[tensor.dtype] = self.shared_buffer(tensor.dtype, SUM_BYTES // tensor.itemsize, name, under_way=[])
            if (buffer := self._sums[tensor.dtype]) is not None:
                buffer.what = name
                with torch.inference_mode():
                    for piece in torch.split(vector, len(buffer.tensor)):
                        buffer.settle()
                        buffer.tensor[: len(piece)] = piece
                        buffer.all_reduce().wait()
                        piece.copy_(buffer.tensor[: len(piece)])
                return DONE
        for piece in torch.split(vector, PIECE_BYTES // tensor.itemsize):
            rows = piece.new_empty((workers, *piece.shape))
            self._gather_pieces(rows, piece, name)
            combine(rows, operation, piece)
        return DONE

    def all_gather(self, rows: torch.Tensor, tensor: torch.Tensor, name: str, kind: str = "all-gather") -> None:
        if tensor.dtype in self._gathered and _is_small(tensor):
            self._begin(tensor, rows, "gather", f"{kind} of {name}").wait()
        else:
            self._gather_pieces(rows, tensor, f"{kind} of {name}")

    def all_to_all(self, received: torch.Tensor, given: torch.Tensor, sizes: Sequence[Sequence[int]], name: str) -> None:
        import torch

        width = given.itemsize
        into = torch.split(as_bytes(received), [row[self._rank] * width for row in sizes])
        firsts = [sum(row[: self._rank]) * width for row in sizes]
        lengths = [sum(row) * width for row in sizes]
        wanted, kind = list(zip(firsts, into, strict=True)), f"all to all {given.dtype} {sizes}"
        self._exchange(as_bytes(given), lengths, wanted, f"all-to-all of {name}", kind)

    def broadcast(self, tensor: torch.Tensor, source: int, name: str) -> None:
        if tensor.dtype in self._gathered and _is_small(tensor):
            rows = tensor.new_empty((self._group.world_size, *tensor.shape))
            self.all_gather(rows, tensor, name, "broadcast")
            tensor.copy_(rows[source])
            return
        content, ranks = as_bytes(tensor), range(self._group.world_size)
        own, lengths = content if self._rank == source else content[:0], [tensor.nbytes * (rank == source) for rank in ranks]
        wanted = [(0, content if rank == source != self._rank else content[:0]) for rank in ranks]
        self._exchange(own, lengths, wanted, f"broadcast of {name}", f"broadcast {tensor.dtype}")

    def shared_buffer(
        self, dtype: torch.dtype, count: int, name: str, under_way: list[SharedBuffer] | None = None
    ) -> SharedBuffer | None:
        files = Files.open(self._group, count * dtype.itemsize) if dtype in self._added and count else None
        under_way = self._under_way if under_way is None else under_way
        return None if files is None else SharedBuffer(self._group, files, dtype, count, name, under_way)

    def shared_rows(self, count: int, name: str) -> SharedRows | None:
        import torch

        files = Files.open(self._group, count) if count else None
        return None if files is None else SharedRows(self._group, files, torch.uint8, count, f"all-gather of {name}")

    def _begin(self, tensor: torch.Tensor, result: torch.Tensor, operation: str, name: str) -> Pending:
        """Offer a small tensor; ``result`` is valid after the returned work's ``wait``."""
        self._group.count(name)
        self._pending.wait()
        self._number += 1
        number, code = self._number, OPERATIONS.index(operation)
        self._kernels.shared_give.default(self._files.own, self._places[self._rank], tensor, number, code)
        take, marks, places = self._kernels.shared_take.default, self._files.marks, self._places

        def finish() -> None:
            self._files.finish(name, lambda seconds: take(marks, places, result, number, code, seconds))

        self._pending = Work(finish)
        return self._pending

    def _gather_pieces(self, rows: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
        into = as_bytes(rows).view(len(rows), -1)
        self._exchange(as_bytes(tensor), [tensor.nbytes] * len(rows), [(0, row) for row in into], name, f"gather {tensor.dtype}")

    def _exchange(
        self, own: torch.Tensor, lengths: Sequence[int], wanted: Sequence[tuple[int, torch.Tensor]], name: str, kind: str
    ) -> None:
        """Show ``lengths`` bytes of each worker to all, and copy the ``wanted`` ones (offset, destination) by rank."""
        import torch

        self._pieces = self._pieces or self.shared_rows(_PIECE_HEADER + PIECE_BYTES, name)
        if (pieces := self._pieces) is None:
            raise EngineError(
                "The workers share memory for small exchanges, and there is none for larger ones: free memory, or set "
                f"{SWITCH}=off"
            )
        code = zlib.crc32(f"{kind} {list(lengths)}".encode())
        # The tensors may or may not be inference tensors; inference mode allows writing to both.
        with torch.inference_mode():
            for begin in range(0, max(1, *lengths), PIECE_BYTES):
                pieces.settle()
                pieces.name = name
                pieces.tensor[:_PIECE_HEADER].view(torch.int64).fill_(code)
                piece = own[begin : begin + PIECE_BYTES]
                pieces.tensor[_PIECE_HEADER : _PIECE_HEADER + len(piece)] = piece
                pieces.show()
                rows = pieces.rows()
                if any(row[:_PIECE_HEADER].view(torch.int64).item() != code for row in rows):
                    raise self._group.at_odds(name)
                for row, (first, into) in zip(rows, wanted, strict=True):
                    low, high = max(first, begin), min(first + len(into), begin + PIECE_BYTES)
                    if low < high:
                        into[low - first : high - first] = row[_PIECE_HEADER + low - begin : _PIECE_HEADER + high - begin]
                pieces.release()


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= SMALL_BYTES and tensor.is_contiguous()


def combine(rows: torch.Tensor, operation: str, into: torch.Tensor) -> None:
    """Write the ``sum``, ``min`` or ``max`` of rows, in order, to a tensor; the first row is overwritten."""
    import torch

    add: Any = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}[operation]
    with torch.inference_mode():
        for row in rows[1:]:
            add(rows[0], row, out=rows[0])
        into.detach().copy_(rows[0])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().view(-1).view(torch.uint8)


_open: weakref.WeakSet[Files] = weakref.WeakSet()


def leave() -> None:
    """Tell everyone who waits for this worker, in any group, that nothing more comes."""
    import torch

    for files in list(_open):
        torch.ops.burnish.shared_leave.default(files.own)
    _open.clear()


def prepare() -> bool:
    if is_switched_off(SWITCH) or not sys.platform.startswith("linux"):
        return False
    from burnish.engines.torch import native as kernels

    return kernels.available("shared_memory")


def _offered(size: int) -> tuple[int | None, dict[str, Any] | None]:
    """Return a file with room for ``size`` bytes and the facts that others need to map it, or None twice."""
    if not prepare():
        return None, None
    import fcntl

    file = None
    try:
        token = secrets.token_bytes(_TOKEN)
        file = os.memfd_create("burnish", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(file, 0o600)
        os.posix_fallocate(file, 0, _HEADER + size)  # fails now instead of at the first write to a missing page
        os.pwrite(file, token, _MARKS)
        fcntl.fcntl(file, _F_ADD_SEALS, _SEAL_SIZE)
        return file, {"system": Location.own().system, "process": os.getpid(), "file": file, "token": token.hex()}
    except (OSError, AttributeError):
        if file is not None:
            os.close(file)
        return None, None


def _mapped(offers: Sequence[Any], own_file: int, rank: int, size: int) -> tuple[list[mmap.mmap], Processes] | None:
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
