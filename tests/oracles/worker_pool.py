"""Worker processes that have met in a folder of their own, started once and given any number of tasks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 600
IMPORTED_ONCE = ["torch", "burnish.distributed.options", "burnish.engines.torch.engine", "burnish.training.trainer"]
"""What takes seconds to import: processes are copies of one that has."""


class WorkerPool:
    """Processes that run a function each, as the first so many workers of a group.

    Args:
        size: how many processes.
    """

    def __init__(self, size: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self._folder = tempfile.TemporaryDirectory(prefix="burnish-")
        self._ends, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder.name, theirs), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, workers: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(communicator, *arguments)`` on the first ``workers`` processes; return what they return.

        What a worker raises is returned in the place of its result.
        """
        for end in self._ends[:workers]:
            end.send((workers, function, arguments))
        results = []
        for rank, end in enumerate(self._ends[:workers]):
            assert end.poll(SECONDS), f"rank {rank} of {workers} gave no result in {SECONDS} s"
            results.append(end.recv())
        for result in results:
            if isinstance(result, _Failure):
                raise AssertionError(f"a worker failed:\n{result.text}")
        return results

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


class _Failure:
    def __init__(self, text: str):
        self.text = text


def _serve(rank: int, size: int, folder: str, end: Any) -> None:
    import torch

    from burnish.distributed import join
    from burnish.distributed.connection.communicators import GroupCommunicator
    from burnish.errors import BurnishError

    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), "BURNISH_MEETING": folder})
    everyone = join(timeout=SECONDS)
    communicators = {}
    for workers in range(1, size + 1):
        pair = [everyone.apart(workers) for _ in range(2)]
        if rank < workers:
            communicators[workers] = GroupCommunicator(*pair)
    while (task := end.recv()) is not None:
        workers, function, arguments = task
        try:
            end.send(function(communicators[workers], *arguments))
        except BurnishError as error:
            end.send(error)
        except BaseException:
            end.send(_Failure(traceback.format_exc()))
    os._exit(0)  # to leave the groups one by one would take each worker waiting for the others
