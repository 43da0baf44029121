"""Exchanges of any size through memory that workers share: small ones at once, larger ones piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from burnish.distributed.connection.shared_memory import SWITCH, Files, Lane, SharedBuffer, SharedRows, Taken, Waiting
from burnish.errors import EngineError

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 2**20
_HEADER = 8


class Memory:
    """Exchanges of a group. Those that do not return something to wait for are done when their method returns.

    Args:
        group: the workers.
        lane: for small exchanges.
    """

    def __init__(self, group: Waiting, lane: Lane):
        self._group, self._lane = group, lane
        self._made: Pieces | None = None
        self._under_way: list[SharedBuffer] = []

    @classmethod
    def open(cls, group: Waiting) -> Memory | None:
        """Return that of a group; None, on all workers, if they cannot share memory."""
        lane = Lane.open(group)
        return None if lane is None else cls(group, lane)

    def all_reduce(self, tensor: torch.Tensor, operation: str, name: str) -> Taken | None:
        """Begin to replace a tensor by its ``sum``, ``min`` or ``max`` over the workers; None if it is done already."""
        if not self._lane.takes(tensor, operation):
            self._pieces.all_reduce(tensor, operation, name, self._lane.added)
            return None
        self._group.count(name)
        return self._lane.begin(tensor, tensor, operation, name)

    def all_gather(self, rows: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
        """Fill rows, [workers, ...], with the tensors of all workers."""
        if self._lane.takes(tensor, "gather"):
            self._group.count(name)
            self._lane.begin(tensor, rows, "gather", name).wait()
        else:
            self._pieces.all_gather(rows, tensor, name)

    def all_to_all(self, received: torch.Tensor, given: torch.Tensor, sizes: Sequence[Sequence[int]], name: str) -> None:
        """Give each worker a part of a vector, and take those that are for this one; as ``Pieces``."""
        self._pieces.all_to_all(received, given, sizes, name)

    def broadcast(self, tensor: torch.Tensor, source: int, name: str) -> None:
        """Replace a tensor by that of one rank."""
        if self._lane.takes(tensor, "gather"):
            rows = tensor.new_empty((self._group.world_size, *tensor.shape))
            self.all_gather(rows, tensor, name)
            tensor.copy_(rows[source])
        else:
            self._pieces.broadcast(tensor, source, name)

    def shared_buffer(self, dtype: torch.dtype, count: int, name: str) -> SharedBuffer | None:
        """Return numbers that are exchanged again and again; None if numbers of this dtype are not added up here."""
        if dtype not in self._lane.added or not count:
            return None
        files = Files.open(self._group, count * dtype.itemsize)
        return None if files is None else SharedBuffer(self._group, files, dtype, count, name, self._under_way)

    def shared_rows(self, count: int, name: str) -> SharedRows | None:
        """Return bytes that are shown to all workers again and again."""
        import torch

        files = Files.open(self._group, count) if count else None
        return None if files is None else SharedRows(self._group, files, torch.uint8, count, f"all-gather of {name}")

    @property
    def _pieces(self) -> Pieces:
        self._made = self._made or Pieces.open(self._group)
        if self._made is None:
            raise EngineError(
                "The workers share memory for small exchanges, and there is none for larger ones: free memory, or set "
                f"{SWITCH}=off"
            )
        return self._made


class Pieces(SharedRows):
    """Exchanges of a group, one after the other; each is done when its method returns.

    Args:
        group: the workers.
        files: with room for a header and a piece.
    """

    def __init__(self, group: Waiting, files: Files):
        import torch

        super().__init__(group, files, torch.uint8, _HEADER + PIECE_BYTES, "")
        self._sums: dict[torch.dtype, SharedBuffer | None] = {}

    @classmethod
    def open(cls, group: Waiting) -> Pieces | None:
        """Return those of a group; None, on all workers, if they cannot share memory."""
        files = Files.open(group, _HEADER + PIECE_BYTES)
        return None if files is None else cls(group, files)

    def all_gather(self, rows: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
        """Fill rows, [workers, ...], with the tensors of all workers."""
        into = _bytes(rows).view(len(rows), -1)
        self._exchange(_bytes(tensor), [tensor.nbytes] * len(rows), [(0, row) for row in into], name, f"gather {tensor.dtype}")

    def all_to_all(self, received: torch.Tensor, given: torch.Tensor, sizes: Sequence[Sequence[int]], name: str) -> None:
        """Give each worker a part of a vector, and take those that are for this one.

        Args:
            received: where they go, one after the other, by rank.
            given: the parts, one after the other, by rank.
            sizes: for each worker how many elements it gives to each.
            name: what is exchanged, for messages.
        """
        import torch

        width = given.itemsize
        into = torch.split(_bytes(received), [row[self._rank] * width for row in sizes])
        firsts = [sum(row[: self._rank]) * width for row in sizes]
        lengths = [sum(row) * width for row in sizes]
        self._exchange(_bytes(given), lengths, list(zip(firsts, into, strict=True)), name, f"all to all {given.dtype} {sizes}")

    def broadcast(self, tensor: torch.Tensor, source: int, name: str) -> None:
        """Replace a tensor by that of one rank."""
        content, ranks = _bytes(tensor), range(len(self._buffers))
        lengths = [tensor.nbytes if rank == source else 0 for rank in ranks]
        wanted = [(0, content if rank == source != self._rank else content[:0]) for rank in ranks]
        self._exchange(content if self._rank == source else content[:0], lengths, wanted, name, f"broadcast {tensor.dtype}")

    def all_reduce(self, tensor: torch.Tensor, operation: str, name: str, summed: Collection[torch.dtype]) -> None:
        """Replace a tensor by its ``sum``, ``min`` or ``max`` over the workers, taken in the order of the ranks.

        Args:
            tensor: numbers.
            operation: which of them.
            name: what is exchanged, for messages.
            summed: the dtypes of which there are shared buffers.
        """
        import torch

        vector, none, workers = tensor.detach().view(-1), torch.empty(0, dtype=torch.uint8), len(self._buffers)
        # Workers that have come with other things are found out before anything is added up.
        self._exchange(none, [0] * workers, [(0, none)] * workers, name, f"{operation} {tensor.dtype} {len(vector)}")
        if operation == "sum" and tensor.dtype in summed:
            if tensor.dtype not in self._sums:
                files = Files.open(self._group, 4 * PIECE_BYTES)
                count = 4 * PIECE_BYTES // tensor.itemsize
                made = None if files is None else SharedBuffer(self._group, files, tensor.dtype, count, name, [])
                self._sums[tensor.dtype] = made
            if (buffer := self._sums[tensor.dtype]) is not None:
                with torch.inference_mode():
                    buffer.add_up(vector, name)
                return
        for piece in torch.split(vector, PIECE_BYTES // tensor.itemsize):
            rows = piece.new_empty((workers, *piece.shape))
            self.all_gather(rows, piece, name)
            combine(rows, operation, piece)

    def _exchange(
        self, own: torch.Tensor, lengths: Sequence[int], wanted: Sequence[tuple[int, torch.Tensor]], name: str, kind: str
    ) -> None:
        """Show bytes to all workers, and copy some of theirs.

        Args:
            own: of this worker.
            lengths: how many each of them shows.
            wanted: of each of them, where what this worker wants begins, and where it goes.
            name: what is exchanged, for messages.
            kind: what all workers must be about alike.
        """
        import torch

        code = zlib.crc32(f"{kind} {list(lengths)}".encode())
        # What an engine made under inference is written to here, and so is what it did not.
        with torch.inference_mode():
            for begin in range(0, max(1, *lengths), PIECE_BYTES):
                self.settle()
                self._name = name
                self.tensor[:_HEADER].view(torch.int64).fill_(code)
                piece = own[begin : begin + PIECE_BYTES]
                self.tensor[_HEADER : _HEADER + len(piece)] = piece
                self.show()
                rows = self.rows()
                if any(row[:_HEADER].view(torch.int64).item() != code for row in rows):
                    raise self._group.at_odds(name)
                for row, (first, into) in zip(rows, wanted, strict=True):
                    low, high = max(first, begin), min(first + len(into), begin + PIECE_BYTES)
                    if low < high:
                        into[low - first : high - first] = row[_HEADER + low - begin : _HEADER + high - begin]
                self.release()


def combine(rows: torch.Tensor, operation: str, into: torch.Tensor) -> None:
    """Write the ``sum``, ``min`` or ``max`` of rows, taken from the first to the last, to a tensor; the first row is not kept."""
    import torch

    with torch.inference_mode():
        total = rows[0]
        for row in rows[1:]:
            if operation == "sum":
                total += row
            else:
                (torch.minimum if operation == "min" else torch.maximum)(total, row, out=total)
        into.detach().copy_(total)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().view(-1).view(torch.uint8)
