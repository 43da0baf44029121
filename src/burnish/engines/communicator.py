"""What an engine asks of the exchange between workers, so that it need not know how they are connected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from burnish.operators.collectives import EXCHANGES

COLLECTIVES = frozenset(operator.name for operator in EXCHANGES)
"""The semantic operators that a graph of several workers holds; an engine without a communicator lowers them."""

GRADIENTS = "gradients"
"""The channel of exchanges that last long, beside which others go on."""


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Wait until the buffer holds the result."""
        ...


class SharedBuffer(Protocol):
    """A buffer that is exchanged in place, in every step again.

    Attributes:
        tensor: the numbers, a vector; not to be touched while an exchange is under way, and not to be written before ``settle``.
    """

    tensor: Any

    def all_reduce(self) -> Pending:
        """Begin to replace the numbers by their sums over the workers."""
        ...

    def reduce_scatter(self, sizes: Sequence[int]) -> Pending:
        """Begin to replace this worker's section of the numbers by their sums; what becomes of the others is not said.

        Args:
            sizes: of the sections, which lie one behind the other, by rank.
        """
        ...

    def settle(self) -> None:
        """Wait until nobody reads the numbers of the last exchange any more."""
        ...


class SharedRows(Protocol):
    """Bytes that each worker shows to all others, in every step again.

    Attributes:
        tensor: this worker's, uint8; not to be written before ``settle``, nor between ``show`` and ``release``.
    """

    tensor: Any

    def show(self) -> None:
        """Begin an exchange."""
        ...

    def rows(self) -> Sequence[Any]:
        """Wait for what the workers show, and return it, by rank; not to be written, and read before ``release`` alone."""
        ...

    def release(self) -> None:
        """End the exchange: the rows are read no more."""
        ...

    def settle(self) -> None:
        """Wait until nobody reads what was shown last any more."""
        ...


class Communicator(Protocol):
    """The other workers, as seen from one of them.

    Buffers are contiguous PyTorch tensors, on the device that the engine runs on; of a communicator with ``takes_arrays``, numpy
    arrays too. Every worker makes the same calls, on buffers
    of the same dtype and size, in the same order within a channel. ``group`` is the number of consecutive ranks that exchange
    among themselves; 0: all.

    Attributes:
        rank: of this worker, from 0.
        size: how many workers there are.
    """

    rank: int
    size: int

    def all_reduce(self, buffer: Any, *, group: int = 0, channel: str = "") -> Pending:
        """Begin to replace a buffer by its sum over the workers.

        Args:
            buffer: numbers; not to be touched before the exchange is done.
            group: who adds up.
            channel: exchanges of one channel do not wait for those of another.
        """
        ...

    def shared_buffer(self, dtype: Any, count: int, *, group: int = 0, channel: str = "") -> SharedBuffer | None:
        """Return a buffer to keep, for ``count`` numbers that ``all_reduce`` would be given in every step.

        None where they may as well lie anywhere. Every worker asks for it at the same place among its exchanges.
        """
        ...

    def all_gather(self, buffer: Any, *, group: int = 0) -> Any:
        """Return the buffers of all workers, [workers, ...], in the order of their ranks."""
        ...

    def shared_rows(self, count: int, *, channel: str = "") -> SharedRows | None:
        """Return memory to keep, for ``count`` bytes that ``all_gather`` would be given in every step; as ``shared_buffer``."""
        ...

    def all_to_all(
        self, buffer: Any, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[Any, Pending]:
        """Begin to give the i-th part of a buffer to the i-th worker; ``group`` and ``channel`` as for ``all_reduce``.

        Args:
            buffer: [workers, ...], of which each worker gets a row; with ``sizes`` a vector.
            sizes: of the parts, one behind the other; the same on all workers.

        Returns:
            What each worker gave to this one, [workers, ...] in the order of their ranks, and the exchange: until it is done
            neither is to be touched.
        """
        ...

    def all_to_all_uneven(self, buffer: Any, sizes: Sequence[Sequence[int]]) -> Any:
        """Give the i-th part of a buffer to the i-th worker, and return what each worker gave to this one, in the order of ranks.

        Args:
            buffer: a vector of the parts, one behind the other.
            sizes: for each worker how much it gives to each; the same on all workers.
        """
        ...

    def reduce_scatter(self, buffer: Any, sizes: Sequence[int], *, channel: str = "") -> tuple[Any, Pending]:
        """Begin to add up the i-th part of a buffer over the workers, for the i-th of them.

        Args:
            buffer: numbers, a vector; not to be touched before the exchange is done.
            sizes: of the parts, one behind the other; the same on all workers.
            channel: as for ``all_reduce``.

        Returns:
            Where the sums of this worker's part are once the exchange is done, and the exchange.
        """
        ...


def buffer_of(communicator: Communicator, array: np.ndarray) -> Any:
    """Return an array as the buffer that a communicator takes; it shares the array's memory."""
    if getattr(communicator, "takes_arrays", False):
        return array
    import torch

    return torch.from_numpy(array)


def array_of(buffer: Any) -> np.ndarray:
    """Return a buffer in the processor's memory as an array, which shares it."""
    return np.asarray(buffer)
