"""The protocol for exchanges between workers, independent of how they are connected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from burnish.operators.collectives import EXCHANGES

COLLECTIVES = frozenset(operator.name for operator in EXCHANGES)
"""The semantic operators in a graph for several workers; an engine without a communicator lowers them."""

GRADIENTS = "gradients"
"""The channel of long exchanges, during which others continue."""


class Pending(Protocol):
    """An exchange in progress."""

    def wait(self) -> None:
        """Wait until the buffer holds the result."""
        ...


class SharedBuffer(Protocol):
    """A buffer that is exchanged in place in every step.

    Attributes:
        tensor: the numbers, a vector; do not access it during an exchange, and do not write it before ``settle``.
    """

    tensor: Any

    def all_reduce(self) -> Pending:
        """Start to replace the numbers by their sums over the workers."""
        ...

    def reduce_scatter(self, sizes: Sequence[int]) -> Pending:
        """Start to replace this worker's section of the numbers by its sum; the other sections become undefined.

        Args:
            sizes: sizes of the consecutive sections, by rank.
        """
        ...

    def settle(self) -> None:
        """Wait until no worker reads the numbers of the last exchange."""
        ...


class SharedRows(Protocol):
    """Bytes that each worker shows to all others in every step.

    Attributes:
        tensor: this worker's bytes, uint8; do not write them before ``settle``, nor between ``show`` and ``release``.
    """

    tensor: Any

    def show(self) -> None:
        """Start an exchange."""
        ...

    def rows(self) -> Sequence[Any]:
        """Wait for the workers' bytes and return them by rank; do not write them, and read them only before ``release``."""
        ...

    def release(self) -> None:
        """End the exchange: the rows are no longer read."""
        ...

    def settle(self) -> None:
        """Wait until no worker reads the bytes that were last shown."""
        ...


class Communicator(Protocol):
    """The connection from one worker to the others.

    Buffers are contiguous PyTorch tensors on the engine's device; a communicator with ``takes_arrays`` also takes numpy arrays.
    Every worker makes the same calls, with buffers of the same dtype and size, in the same order within a channel. ``group`` is
    the number of consecutive ranks that exchange with each other; 0: all.

    Attributes:
        rank: rank of this worker, from 0.
        size: number of workers.
    """

    rank: int
    size: int

    def all_reduce(self, buffer: Any, *, group: int = 0, channel: str = "") -> Pending:
        """Start to replace a buffer by its sum over the workers.

        Args:
            buffer: numbers; do not access them before the exchange is done.
            group: group size.
            channel: name of the channel; exchanges of different channels do not wait for each other.
        """
        ...

    def shared_buffer(self, dtype: Any, count: int, *, group: int = 0, channel: str = "") -> SharedBuffer | None:
        """Return a buffer to keep for ``count`` numbers that are given to ``all_reduce`` in every step.

        None if any other memory is just as good. Every worker asks for it at the same position among its exchanges.
        """
        ...

    def all_gather(self, buffer: Any, *, group: int = 0) -> Any:
        """Return the buffers of all workers, [workers, ...], in rank order."""
        ...

    def shared_rows(self, count: int, *, channel: str = "") -> SharedRows | None:
        """Return memory to keep for ``count`` bytes that are given to ``all_gather`` in every step; see ``shared_buffer``."""
        ...

    def all_to_all(
        self, buffer: Any, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[Any, Pending]:
        """Start to give the i-th part of a buffer to the i-th worker; ``group`` and ``channel`` as for ``all_reduce``.

        Args:
            buffer: [workers, ...], with a row for each worker; with ``sizes`` a vector.
            sizes: sizes of the consecutive parts; the same on all workers.

        Returns:
            The parts from each worker, [workers, ...] in rank order, and the exchange: do not access either before it is done.
        """
        ...

    def all_to_all_uneven(self, buffer: Any, sizes: Sequence[Sequence[int]]) -> Any:
        """Give the i-th part of a buffer to the i-th worker, and return the parts from each worker in rank order.

        Args:
            buffer: a vector of the consecutive parts.
            sizes: for each worker, the sizes of the parts that it gives to each; the same on all workers.
        """
        ...

    def reduce_scatter(self, buffer: Any, sizes: Sequence[int], *, channel: str = "") -> tuple[Any, Pending]:
        """Start to sum the i-th part of a buffer over the workers, for the i-th worker.

        Args:
            buffer: numbers, a vector; do not access it before the exchange is done.
            sizes: sizes of the consecutive parts; the same on all workers.
            channel: as for ``all_reduce``.

        Returns:
            The sums of this worker's part, valid once the exchange is done, and the exchange.
        """
        ...


def buffer_of(communicator: Communicator, array: np.ndarray) -> Any:
    """Return an array as a buffer for a communicator; it shares the array's memory."""
    if getattr(communicator, "takes_arrays", False):
        return array
    import torch

    return torch.from_numpy(array)


def array_of(buffer: Any) -> np.ndarray:
    """Return a buffer in CPU memory as an array, which shares it."""
    return np.asarray(buffer)
