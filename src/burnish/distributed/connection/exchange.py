"""Exchanges of tensors on CPUs between workers that have a connection each with each: what shared memory does not carry.

A thread for each group does its exchanges, one after the other, in the order in which all of its workers begin them; another one
sends, so that every worker sends and receives at once. Each message says which exchange it belongs to, of what kind it is and how
long, so that workers that come with different things are told.

A sum goes around a ring: ``2 (W - 1) / W`` of its bytes leave each worker. A small one goes to all, and each adds up.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from burnish.distributed.connection.sockets import end

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 16 * 2**10
"""Up to here a message goes to all workers, and into the system at once: there is always room for so much."""
PIECE_ELEMENTS = 2**15 - 1
"""How many elements are added at once: so few that PyTorch starts no threads beside those that compute."""
END_SECONDS = 5.0
_HEADER = struct.Struct("<QIQ")


class DifferentError(Exception):
    """Another worker has come to an exchange with something else."""


class Task:
    """An exchange that is under way."""

    def __init__(self, action: Callable[[], None]):
        self.action = action
        self.error: BaseException | None = None
        self._done = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Wait for at most ``seconds``; return whether it is done.

        Raises:
            OSError: a connection broke.
            DifferentError: another worker gives something else.
        """
        if not self._done.wait(seconds):
            return False
        if self.error is not None:
            raise self.error
        return True

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self._done.set()


class Exchange:
    """The connections of this worker with the others of a group.

    Args:
        rank: of this worker in the group.
        streams: by rank, of all others.
    """

    def __init__(self, rank: int, streams: Mapping[int, socket.socket]):
        self._rank, self._size = rank, len(streams) + 1
        self._streams = streams
        self._number = 0
        self._kind = 0
        self._broken: BaseException | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[tuple[Task, int, Any] | None] = queue.SimpleQueue()
        named = {"burnish-exchange": self._work, "burnish-send": self._send_all}
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in named.items()]
        for thread in self._threads:
            thread.start()

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> Task:
        """Begin to replace a contiguous tensor by its ``sum``, ``min`` or ``max`` over the workers."""
        if tensor.nbytes <= SMALL_BYTES:
            rows = [tensor.new_empty(tensor.shape) for _ in range(self._size)]
            return self._begin(lambda: self._reduce_small(tensor, rows, operation), f"{operation} {tensor.numel()}", tensor)
        return self._begin(lambda: self._reduce_in_ring(tensor.view(-1), operation), f"{operation} {tensor.numel()}", tensor)

    def all_gather(self, rows: Sequence[torch.Tensor], tensor: torch.Tensor) -> Task:
        """Begin to fill contiguous rows with the tensors of all workers."""
        row = tensor.contiguous()
        return self._begin(lambda: self._gather(rows, row), "gather", tensor)

    def all_to_all(self, received: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Task:
        """Begin to give each worker a tensor, and to get one from each; all are contiguous."""
        return self._begin(lambda: self._give_all(received, parts), "all-to-all", parts[0])

    def broadcast(self, tensor: torch.Tensor, source: int) -> Task:
        """Begin to replace a contiguous tensor by that of one rank."""
        return self._begin(lambda: self._broadcast(tensor, source), f"broadcast {source}", tensor)

    def close(self) -> None:
        """Close the connections; what is under way ends by an error.

        No thread is left when the interpreter ends: one that is within PyTorch then would abort the process.
        """
        for stream in self._streams.values():
            end(stream)
        # The one that sends ends last: the other waits for it.
        working, sending = self._threads
        self._tasks.put(None)
        working.join(END_SECONDS)
        self._outgoing.put(None)
        sending.join(END_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            for stream in self._streams.values():
                stream.close()

    def _begin(self, action: Callable[[], None], kind: str, tensor: torch.Tensor) -> Task:
        code = zlib.crc32(f"{kind} {tensor.dtype}".encode())

        def act() -> None:
            self._number, self._kind = self._number + 1, code
            action()

        task = Task(act)
        self._tasks.put(task)
        return task

    def _work(self) -> None:
        import torch

        with torch.inference_mode():
            while (task := self._tasks.get()) is not None:
                if self._broken is None:
                    try:
                        task.action()
                    except BaseException as error:
                        self._broken = error
                task.end(self._broken)

    def _reduce_small(self, tensor: torch.Tensor, rows: Sequence[torch.Tensor], operation: str) -> None:
        self._gather(rows, tensor)
        total = rows[0]
        for row in rows[1:]:
            _combine(total, row, operation)
        tensor.copy_(total)

    def _reduce_in_ring(self, vector: torch.Tensor, operation: str) -> None:
        sections, size = vector.tensor_split(self._size), self._size
        after, before = (self._rank + 1) % size, (self._rank - 1) % size
        for step in range(size - 1):
            sent = self._send(after, sections[(self._rank - step) % size])
            self._combine_received(before, sections[(self._rank - step - 1) % size], operation)
            _finish(sent)
        for step in range(size - 1):
            sent = self._send(after, sections[(self._rank + 1 - step) % size])
            self._receive(before, sections[(self._rank - step) % size])
            _finish(sent)

    def _gather(self, rows: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._give_all(rows, [tensor] * self._size)

    def _give_all(self, received: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        received[self._rank].copy_(parts[self._rank])
        others = range(1, self._size)
        sending = [self._send((self._rank + step) % self._size, parts[(self._rank + step) % self._size]) for step in others]
        for step in others:
            source = (self._rank - step) % self._size
            self._receive(source, received[source])
        for each in sending:
            _finish(each)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Along a binary tree, whose root is the source."""
        place = (self._rank - source) % self._size
        if place:
            self._receive(((place - 1) // 2 + source) % self._size, tensor)
        below = [child for child in (2 * place + 1, 2 * place + 2) if child < self._size]
        for sent in [self._send((child + source) % self._size, tensor) for child in below]:
            _finish(sent)

    def _send(self, rank: int, tensor: torch.Tensor) -> Task | None:
        """Send a tensor; what is returned, if anything, is to be waited for before the tensor is written to."""
        content = _bytes_of(tensor)
        parts: list[bytes | memoryview] = [_HEADER.pack(self._number, self._kind, len(content)), content]
        if len(content) <= SMALL_BYTES:
            _write(self._streams[rank], parts)
            return None
        task = Task(lambda: None)
        self._outgoing.put((task, rank, parts))
        return task

    def _send_all(self) -> None:
        while (entry := self._outgoing.get()) is not None:
            task, rank, parts = entry
            try:
                _write(self._streams[rank], parts)
                task.end()
            except OSError as error:
                task.end(error)

    def _receive_header(self, rank: int, count: int) -> None:
        header = bytearray(_HEADER.size)
        self._fill(rank, memoryview(header))
        if _HEADER.unpack(header) != (self._number, self._kind, count):
            raise DifferentError

    def _receive(self, rank: int, tensor: torch.Tensor) -> None:
        content = _bytes_of(tensor)
        self._receive_header(rank, len(content))
        self._fill(rank, content)

    def _combine_received(self, rank: int, vector: torch.Tensor, operation: str) -> None:
        """Combine a section with that of another worker, piece by piece as it comes."""
        self._receive_header(rank, vector.nbytes)
        room = vector.new_empty(min(PIECE_ELEMENTS, vector.numel()))
        for begin in range(0, vector.numel(), PIECE_ELEMENTS):
            section = vector[begin : begin + PIECE_ELEMENTS]
            piece = room[: section.numel()]
            self._fill(rank, _bytes_of(piece))
            _combine(section, piece, operation)

    def _fill(self, rank: int, content: memoryview) -> None:
        stream = self._streams[rank]
        while len(content):
            count = stream.recv_into(content, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the other end has closed the connection")
            content = content[count:]


def _finish(sent: Task | None) -> None:
    if sent is not None:
        while not sent.wait(60.0):
            pass


def _combine(total: torch.Tensor, other: torch.Tensor, operation: str) -> None:
    import torch

    if operation == "sum":
        total += other
    else:
        function = torch.minimum if operation == "min" else torch.maximum
        function(total, other, out=total)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _write(stream: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Write all of some bytes. By ``writev``, which puts the parts together and counts in the system's figures of a process."""
    remaining = [memoryview(part) for part in parts if len(part)]
    while remaining:
        count = os.writev(stream.fileno(), remaining)
        while remaining and count >= len(remaining[0]):
            count -= len(remaining.pop(0))
        if remaining:
            remaining[0] = remaining[0][count:]
