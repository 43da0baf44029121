"""An exchange of ``torch.distributed`` that is under way."""

from __future__ import annotations

from collections.abc import Callable


class Work:
    """What is waited for. Until ``wait`` returned, its tensors are neither read nor written.

    Args:
        finish: waits for it; None for what is done already.
    """

    def __init__(self, finish: Callable[[], None] | None = None):
        self._finish = finish

    def wait(self) -> None:
        """Wait until the exchange is done; on CUDA, until it stands in the current stream.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time.
        """
        if self._finish is not None:
            self._finish()
        self._finish = None


DONE = Work()
