"""An exchange of ``torch.distributed`` that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.distributed.connection.process_group import ProcessGroup


class Work:
    """What is waited for. Until ``wait`` returned, its tensors are neither read nor written.

    Args:
        group: the workers; None for what is done already.
        work: as ``torch.distributed`` returned it.
        name: what is exchanged, for messages.
        on_cpu: whether the tensors are there.
    """

    def __init__(self, group: ProcessGroup | None = None, work: Any = None, name: str = "", on_cpu: bool = True):
        self._group, self._work, self._name, self._on_cpu = group, work, name, on_cpu

    def wait(self) -> None:
        """Wait until the exchange is done; on CUDA, until it stands in the current stream.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time.
        """
        if self._group is not None and self._work is not None:
            self._group.finish(self._work, self._name, self._on_cpu)
        self._work = None


DONE = Work()
