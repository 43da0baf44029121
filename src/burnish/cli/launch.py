"""``burnish train --workers``: starts the workers of one machine by what ``torchrun`` is made of, and says how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from burnish.cli.console import errors
from burnish.errors import BurnishError, ConfigurationError, WorkerError, comes_again

INTERRUPTED = 130
REFUSED = 2
"""By what a worker ends whose command line is refused."""
COMES_AGAIN = 78
"""By what a worker ends that would end so at every start: EX_CONFIG of sysexits.h."""
LAUNCHED = "BURNISH_LAUNCHED"
"""In the environment of workers whose launcher reads that status."""
# A worker that is asked to stop finishes its step and saves.
SHUTDOWN_SECONDS = "120"


def is_worker() -> bool:
    """Whether a launcher has started this process."""
    return "WORLD_SIZE" in os.environ


def other_rank() -> str | None:
    """Return the rank of this process where it is a worker, and not the first one."""
    return os.environ.get("RANK") if is_worker() and os.environ.get("RANK", "0") != "0" else None


def exit_status(error: BurnishError) -> int:
    """Return by what status an error ends this process: a worker tells its launcher whether to start it again."""
    return COMES_AGAIN if is_worker() and LAUNCHED in os.environ and comes_again(error) else 1


def run_id() -> str:
    """Return the name of the launch that this process belongs to, which its restarts share; empty where it has none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def is_restart() -> bool:
    """Whether the launcher has started the workers before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def check_count(workers: int) -> None:
    """Raise ConfigurationError where a launcher has started another number of workers than the command says."""
    started = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", ""))
    if started != str(workers):
        raise ConfigurationError(
            f"--workers {workers}, and torchrun has started {started} on this machine: leave --workers out, or torchrun"
        )


def check_together(workers: int, engine: str, norm: str | Mapping[str, str], at_every_step: bool = True) -> None:
    """Refuse, before any worker starts, what each of them would refuse.

    Args:
        workers: how many there are to be.
        engine: the name of one.
        norm: as ``burnish.compile`` takes it.
        at_every_step: whether workers exchange at every step; else each steps alone between rounds, on any engine.

    Raises:
        EngineError: PyTorch is missing, or the engine cannot exchange values with other workers, or is not there.
        ConfigurationError: a group of workers whose size does not divide their number, or no policy.
    """
    from burnish.distributed.connection.rendezvous import torch_distributed
    from burnish.distributed.graphs.synchronization import check_group
    from burnish.distributed.options import check_engine
    from burnish.engines import get
    from burnish.norm_policies import get as policy

    torch_distributed()
    if not at_every_step:
        return
    for name in (norm,) if isinstance(norm, str) else norm.values():
        check_group(policy(name), workers)
    if engine != "auto":
        check_engine(get(engine))


def launch(arguments: Sequence[str], workers: int, restarts: int, resume: str) -> None:
    """Run a command of burnish in several processes of this machine, and wait for them.

    Args:
        arguments: of the command, as each worker gets them.
        workers: how many.
        restarts: how often to start all of them again when one fails otherwise than it would each time.
        resume: the command line that goes on from the last checkpoint.

    Raises:
        WorkerError: a worker was killed.
        typer.Exit: the workers ended otherwise than by success; they have said why.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What the launcher logs of workers that fail, they say themselves, or it is said below.
    logging.disable(logging.ERROR)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    os.environ[LAUNCHED] = "1"
    # Connections that break are reported as errors; the library's traces of them say less.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    name = uuid.uuid4().hex
    try:
        for left in reversed(range(restarts + 1)):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=workers,
                run_id=name,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                monitor_interval=0.1,
                local_addr="localhost",
            )
            try:
                elastic_launch(config, sys.executable)("-m", "burnish", *arguments)
                return
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
            if failure.exitcode in (REFUSED, COMES_AGAIN):
                raise typer.Exit(REFUSED if failure.exitcode == REFUSED else 1)
            if not left:
                raise _ended(rank, failure, resume)
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            raise typer.Exit(INTERRUPTED) from None  # the first worker has said where the state is
        text = f"Stopped by {signal.Signals(stop.sigval).name}, and the workers too. Go on from the last checkpoint:\n  {resume}"
        errors().print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(128 + int(stop.sigval)) from None


def _ended(rank: int, failure: Any, resume: str) -> Exception:
    if failure.exitcode >= 0:
        return typer.Exit(failure.exitcode)
    name = signal.Signals(-failure.exitcode).name
    memory = " The system does so when memory runs out: then take fewer workers or a smaller batch." if name == "SIGKILL" else ""
    return WorkerError(
        f"Rank {rank} (process {failure.pid}) was ended by {name}, and the others were stopped.{memory} What was trained since "
        f"the last checkpoint is lost; go on from it, with as many workers as you like:\n  {resume}"
    )
