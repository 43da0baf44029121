"""Workers for tests: processes that run one function each, and meet at a port of the loopback as torchrun's do.

They are forked from a server that has imported PyTorch once, as that takes longer than what most tests do.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "burnish.compiler.link", "burnish.distributed.options", "burnish.training.trainer"]
)


@dataclass
class Outcome:
    """What became of a worker.

    Attributes:
        value: what its function returned; None where it did not.
        error: type and text of the error that it raised, as ``WorkerError: ...``.
        exit_code: of the process; negative for a signal.
    """

    value: Any
    error: str | None
    exit_code: int | None


class Workers:
    """Starts ``world_size`` processes that run ``function(rank, *arguments)``; a function of a module, with picklable arguments.

    Args:
        environment: further variables for all of them.
    """

    def __init__(self, function: Callable, world_size: int, *arguments: Any, environment: Mapping[str, str] | None = None):
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
        }
        self.processes, self._pipes = [], []
        for rank in range(world_size):
            variables = {**address, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", **(environment or {})}
            pipe, remote = _context.Pipe(duplex=False)
            process = _context.Process(target=_work, args=(remote, variables, function, rank, arguments), daemon=True)
            process.start()
            remote.close()
            self.processes.append(process)
            self._pipes.append(pipe)

    def message(self, rank: int, seconds: float = 600) -> Any:
        """Return the next thing that a worker sent by ``tell``."""
        assert self._pipes[rank].poll(seconds), f"rank {rank} said nothing in {seconds} s"
        kind, value = self._pipes[rank].recv()
        assert kind == "told", value
        return value

    def outcomes(self, seconds: float = 600) -> list[Outcome]:
        """Wait for all of them to end."""
        found = []
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            value = error = None
            try:
                while pipe.poll(seconds):
                    kind, content = pipe.recv()
                    value, error = (content, error) if kind == "value" else (value, content if kind == "error" else error)
            except EOFError:
                pass
            process.join(seconds)
            assert process.exitcode is not None, f"a worker is still running after {seconds} s"
            found.append(Outcome(value, error, process.exitcode))
        return found

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def run(function: Callable, world_size: int, *arguments: Any, environment: Mapping[str, str] | None = None) -> list[Any]:
    """Return what ``function(rank, *arguments)`` returned in each of ``world_size`` workers; fails where one raised."""
    with Workers(function, world_size, *arguments, environment=environment) as workers:
        outcomes = workers.outcomes()
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, f"rank {rank}: {outcome.error or outcome.exit_code}"
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
    return [outcome.value for outcome in outcomes]


def tell(value: Any) -> None:
    """In a worker: send something to the test."""
    assert _pipe is not None
    _pipe.send(("told", value))


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_pipe: Connection | None = None


def _work(pipe: Connection, variables: Mapping[str, str], function: Callable, rank: int, arguments: tuple) -> None:
    global _pipe
    _pipe = pipe
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(("value", function(rank, *arguments)))
    except BaseException as error:
        from burnish.errors import BurnishError

        known = isinstance(error, BurnishError)
        pipe.send(("error", f"{type(error).__name__}: {error}" if known else traceback.format_exc()))
