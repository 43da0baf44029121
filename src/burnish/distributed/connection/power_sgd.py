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

from burnish.distributed.runners.spread import SpreadRunner
from burnish.engines import ProgramRunner
from burnish.engines.communicator import GRADIENTS, Communicator, Pending
from burnish.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

NAME = "powersgd"
RANK = 2
"""What the authors train ResNet-18 with."""
SMALLER = 2
"""A matrix is compressed where that makes it this many times smaller."""


def rank_of(compression: str | None) -> int | None:
    """Return the rank that ``powersgd`` or ``powersgd:<rank>`` asks for; None for any other compression.

    Raises:
        ConfigurationError: the rank is no whole number of at least 1.
    """
    name, colon, text = (compression or "").partition(":")
    if name != NAME:
        return None
    if not colon:
        return RANK
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigurationError(
            f"DataParallel: compression={compression!r}: the rank behind the colon is a whole number of 1 or more, such as "
            f"'{NAME}:{RANK}'"
        )
    return int(text)


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

    def all_reduce(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> Pending:
        return self._communicator.all_reduce(buffer, group=group, channel=channel)

    def all_gather(self, buffer: torch.Tensor, *, group: int = 0) -> torch.Tensor:
        gathered: torch.Tensor = self._communicator.all_gather(buffer, group=group)
        return gathered

    def all_to_all(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> tuple[Any, Pending]:
        return self._communicator.all_to_all(buffer, group=group, channel=channel)

    def shared_buffer(self, dtype: torch.dtype, count: int, *, group: int = 0, channel: str = "") -> None:
        return None  # what it makes of a buffer are not its sums

    def all_reduce_gradients(self, buffer: torch.Tensor, shapes: Sequence[Sequence[int]], bucket: Hashable) -> Pending:
        """Begin to replace a buffer by about its sum over the workers.

        Args:
            buffer: floating-point; not to be touched before the exchange is done.
            shapes: of the tensors that lie in it one behind the other.
            bucket: what tells it from others: the same at each step.
        """
        if bucket not in self._buckets:
            self._buckets[bucket] = self._planned(buffer, shapes, len(self._buckets))
        planned = self._buckets[bucket]
        if not planned.matrices:
            return self.all_reduce(buffer, channel=GRADIENTS)
        return _Approximated(self._communicator, buffer, planned)

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
    """A sum under way, of which the first of two exchanges has begun when this is made."""

    def __init__(self, communicator: Communicator, buffer: torch.Tensor, bucket: _Bucket):
        import torch

        self._communicator, self._buffer, self._bucket = communicator, buffer, bucket
        for matrix in bucket.matrices:
            if matrix.error is not None:
                matrix.of(buffer).add_(matrix.error)
        products = [matrix.of(buffer) @ matrix.basis for matrix in bucket.matrices]
        self._sizes = [place.stop - place.start for place in bucket.whole] + [product.numel() for product in products]
        self._wire = torch.cat([*(buffer[place] for place in bucket.whole), *(product.flatten() for product in products)])
        self._pending = communicator.all_reduce(self._wire, channel=GRADIENTS)

    def wait(self) -> None:
        import torch

        self._pending.wait()
        parts = torch.split(self._wire, self._sizes)
        whole, products = parts[: len(self._bucket.whole)], parts[len(self._bucket.whole) :]
        for place, part in zip(self._bucket.whole, whole, strict=True):
            self._buffer[place] = part
        if not all(bool(torch.isfinite(product).all()) for product in products):
            # All workers find the same. Errors and bases stay: what is not finite would never leave them.
            for matrix in self._bucket.matrices:
                self._buffer[matrix.place] = math.nan
            return
        bases = [
            torch.linalg.qr(product.view(matrix.rows, -1)).Q
            for matrix, product in zip(self._bucket.matrices, products, strict=True)
        ]
        own = [matrix.of(self._buffer).T @ basis for matrix, basis in zip(self._bucket.matrices, bases, strict=True)]
        wire = torch.cat([part.flatten() for part in own])
        self._communicator.all_reduce(wire, channel=GRADIENTS).wait()
        sums = torch.split(wire, [part.numel() for part in own])
        for matrix, basis, part, total in zip(self._bucket.matrices, bases, own, sums, strict=True):
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
