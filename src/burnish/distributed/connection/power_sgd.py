"""Gradients that travel as products of narrow matrices: PowerSGD.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019. The
gradient of a weight is a matrix M, [n, m], of which each worker r has a part M_r with M their sum. With Q, [m, rank], of the step
before::

    P = orthonormal columns of the sum of M_r Q                        one exchange of n rank numbers
    Q = sum of Q_r = M_r^T P                                           one of m rank
    what all workers take for M:  P Q^T
    what each adds to its part in the next step:  M_r - P Q_r^T        the error feedback, whose sum is M - P Q^T

It is one step of a power iteration, and Q goes on from step to step. Vectors, and matrices that this would not make half as
large, travel as they are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.distributed.runners.distributed_state import SpreadRunner
from burnish.engines import ProgramRunner
from burnish.engines.communicator import GRADIENTS, Communicator, Pending, SharedBuffer, SharedRows

if TYPE_CHECKING:
    import torch

SMALLER = 2
"""A matrix is compressed where that makes it this many times smaller."""


@dataclass
class _Matrix:
    """A gradient in a buffer, and what is known of it.

    Attributes:
        place: where it lies in the buffer.
        rows, columns: n and m.
        basis: Q, [m, rank].
        error: what this worker adds to its part in the next step, [n, m]; None before the first.
    """

    place: slice
    rows: int
    columns: int
    basis: torch.Tensor
    error: torch.Tensor | None = None

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.place].view(self.rows, self.columns)


@dataclass
class _Bucket:
    """What travels together: matrices that are compressed, and places of the buffer that are not."""

    matrices: list[_Matrix] = field(default_factory=list)
    whole: list[slice] = field(default_factory=list)

    def counts(self) -> tuple[int, int]:
        """How many numbers travel in the first exchange and in the second."""
        products = sum(matrix.rows * matrix.basis.shape[1] for matrix in self.matrices)
        return sum(place.stop - place.start for place in self.whole) + products, sum(
            matrix.basis.numel() for matrix in self.matrices
        )


class _Wire:
    """Numbers of a bucket that are added up in every step: in memory that the workers share, where they share some.

    Args:
        communicator: to the others, which are asked for memory when this is made.
        like: of the dtype of the numbers.
        count: how many there are.
    """

    def __init__(self, communicator: Communicator, like: torch.Tensor, count: int):
        self._communicator = communicator
        is_on_cpu = like.device.type == "cpu"
        self._shared = communicator.shared_buffer(like.dtype, count, channel=GRADIENTS) if is_on_cpu and count else None

    def summed(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Pending]:
        """Begin to add up vectors, which come one after the other; where the sums will be."""
        import torch

        if self._shared is None:
            wire = torch.cat(list(parts))
            return wire, self._communicator.all_reduce(wire, channel=GRADIENTS)
        self._shared.settle()
        torch.cat(list(parts), out=self._shared.tensor)
        return self._shared.tensor, self._shared.all_reduce()


class PowerSGD:
    """A communicator whose sums of gradients are approximations of low rank.

    All workers make the same of a sum, where their processors compute the same. What it keeps of each worker is not in the
    state of the run.

    Args:
        communicator: to the others.
        rank: of the approximations.
    """

    def __init__(self, communicator: Communicator, rank: int):
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator, self._rank = communicator, rank
        self._buckets: dict[Hashable, _Bucket] = {}
        self._wires: dict[Hashable, tuple[_Wire, _Wire]] = {}

    def all_reduce(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> Pending:
        return self._communicator.all_reduce(buffer, group=group, channel=channel)

    def all_gather(self, buffer: torch.Tensor, *, group: int = 0) -> torch.Tensor:
        gathered: torch.Tensor = self._communicator.all_gather(buffer, group=group)
        return gathered

    def all_to_all(
        self, buffer: torch.Tensor, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[Any, Pending]:
        return self._communicator.all_to_all(buffer, sizes=sizes, group=group, channel=channel)

    def all_to_all_uneven(self, buffer: torch.Tensor, sizes: Sequence[Sequence[int]]) -> Any:
        return self._communicator.all_to_all_uneven(buffer, sizes)

    def reduce_scatter(self, buffer: torch.Tensor, sizes: Sequence[int], *, channel: str = "") -> tuple[Any, Pending]:
        return self._communicator.reduce_scatter(buffer, sizes, channel=channel)

    def shared_buffer(self, dtype: torch.dtype, count: int, *, group: int = 0, channel: str = "") -> SharedBuffer | None:
        """One of the communicator's; none for gradients, of which not the sums are made."""
        if channel == GRADIENTS:
            return None
        return self._communicator.shared_buffer(dtype, count, group=group, channel=channel)

    def shared_rows(self, count: int, *, channel: str = "") -> SharedRows | None:
        return self._communicator.shared_rows(count, channel=channel)

    def all_reduce_gradients(self, buffer: torch.Tensor, shapes: Sequence[Sequence[int]], bucket: Hashable) -> Pending:
        """Begin to replace a buffer by about its sum over the workers.

        Args:
            buffer: floating-point; not to be touched before the exchange is done.
            shapes: of the tensors that lie in it one after the other.
            bucket: what tells it from others: the same at each step.
        """
        if bucket not in self._buckets:
            self._buckets[bucket] = self._planned(buffer, shapes, len(self._buckets))
        planned = self._buckets[bucket]
        if bucket not in self._wires:
            counts = planned.counts()
            self._wires[bucket] = (_Wire(self._communicator, buffer, counts[0]), _Wire(self._communicator, buffer, counts[1]))
        return _Approximated(*self._wires[bucket], buffer, planned)

    def forget(self) -> None:
        """Begin anew, with no errors to feed back: in a state that these steps did not lead to."""
        self._buckets.clear()

    def _planned(self, buffer: torch.Tensor, shapes: Sequence[Sequence[int]], number: int) -> _Bucket:
        import torch

        # The same on every worker.
        generator = torch.Generator().manual_seed(number)
        bucket, start = _Bucket(), 0
        for shape in shapes:
            place = slice(start, start + math.prod(shape))
            start = place.stop
            rows = shape[0] if len(shape) > 1 else 1
            columns = math.prod(shape) // rows if rows else 0
            rank = min(self._rank, rows, columns)
            if len(shape) > 1 and SMALLER * rank * (rows + columns) <= rows * columns > 0:
                basis = torch.randn(columns, rank, generator=generator, dtype=torch.float64).to(buffer)
                bucket.matrices.append(_Matrix(place, rows, columns, basis))
            else:
                bucket.whole.append(place)
        return bucket


class _Approximated:
    """A sum under way: making it begins the first of two exchanges."""

    def __init__(self, first: _Wire, second: _Wire, buffer: torch.Tensor, bucket: _Bucket):
        self._second, self._buffer, self._bucket = second, buffer, bucket
        for matrix in bucket.matrices:
            if matrix.error is not None:
                matrix.of(buffer).add_(matrix.error)
        products = [matrix.of(buffer) @ matrix.basis for matrix in bucket.matrices]
        self._sizes = [place.stop - place.start for place in bucket.whole] + [product.numel() for product in products]
        parts = [*(buffer[place] for place in bucket.whole), *(product.flatten() for product in products)]
        self._wire, self._pending = first.summed(parts)

    def wait(self) -> None:
        import torch

        self._pending.wait()
        parts = torch.split(self._wire, self._sizes)
        whole, products = parts[: len(self._bucket.whole)], parts[len(self._bucket.whole) :]
        for place, part in zip(self._bucket.whole, whole, strict=True):
            self._buffer[place] = part
        if not products:
            return
        if not all(bool(torch.isfinite(product).all()) for product in products):
            # All workers find the same. Errors and bases stay: what is not finite would never leave them.
            for matrix in self._bucket.matrices:
                self._buffer[matrix.place] = math.nan
            return
        bases = [
            torch.linalg.qr(product.view(matrix.rows, -1)).Q
            for matrix, product in zip(self._bucket.matrices, products, strict=True)
        ]
        projections = [matrix.of(self._buffer).T @ basis for matrix, basis in zip(self._bucket.matrices, bases, strict=True)]
        wire, pending = self._second.summed([part.flatten() for part in projections])
        pending.wait()
        sums = torch.split(wire, [part.numel() for part in projections])
        for matrix, basis, part, total in zip(self._bucket.matrices, bases, projections, sums, strict=True):
            view = matrix.of(self._buffer)
            matrix.error = view - basis @ part.T
            matrix.basis = total.view(part.shape).clone()
            torch.mm(basis, matrix.basis.T, out=view)


class ForgettingRunner(SpreadRunner):
    """A runner whose communicator forgets the errors of gradients where another state is loaded.

    Args:
        runner: of this worker.
        communicator: the one that it exchanges gradients by.
    """

    def __init__(self, runner: ProgramRunner, communicator: PowerSGD):
        super().__init__(runner, communicator)
        self._compressed = communicator

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state(state)
        self._compressed.forget()
