"""``burnish train --workers``: starts, stops and restarts the workers of a machine, and reports their end.

Each gets its rank in the environment, like torchrun, and the place to meet the others: on one machine a new private folder, on
several machines a port of the first. The launcher itself does not listen.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from burnish.cli.console import errors
from burnish.distributed.connection import environment
from burnish.errors import ConfigurationError, WorkerError, comes_again
from burnish.settings import is_natural_text

if TYPE_CHECKING:
    from burnish.engines import Engine
    from burnish.norms import NormPolicy

INTERRUPTED, TERMINATED = 130, 143
"""Exit statuses of a process stopped by Ctrl-C or SIGTERM, after it has saved its run."""
REFUSED = 2
"""Exit status of a worker with an invalid command line."""
COMES_AGAIN = 78
"""Exit status of a worker that would fail the same way at every start: EX_CONFIG of sysexits.h."""
LAUNCHED = "BURNISH_LAUNCHED"
"""Environment variable of workers whose launcher understands that status."""
LIFE_LINE = "BURNISH_LIFE_LINE"
"""Environment variable of workers: a file descriptor that closes when their launcher ends."""
RUN_FOLDER = "BURNISH_RUN_FOLDER"
"""Environment variable of workers: the folder of their run."""
RUN_ID = "BURNISH_RUN_ID"
"""Environment variable of workers: the name of their launch."""
# A worker that is asked to stop finishes its step and saves; workers of a failed run are killed.
SHUTDOWN_SECONDS, AGAIN_SECONDS = 120.0, 5.0
LOOK_UP_SECONDS = 0.1
STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
PORT = 29500


@dataclass(frozen=True)
class Machines:
    """The machines of a run, and the index of this one.

    Attributes:
        count: number of machines.
        rank: index of this one, from 0.
        address: address of the first machine.
        port: port of the first machine, where all workers meet.
    """

    count: int = 1
    rank: int = 0
    address: str = ""
    port: int = PORT

    @classmethod
    def of_options(cls, count: int, rank: int | None, address: str | None, port: int | None) -> Machines:
        """Return the machines from the options of a command.

        Raises:
            typer.BadParameter: the options contradict each other, or one is missing.
        """
        if count == 1:
            options = {"--node-rank": rank, "--master-address": address, "--master-port": port}
            for option in [option for option, value in options.items() if value is not None]:
                raise typer.BadParameter(f"{option} is for workers on several machines: give their number too (--nodes)")
            return cls()
        if rank is None or address is None:
            missing = "--node-rank" if rank is None else "--master-address"
            raise typer.BadParameter(
                f"--nodes {count}: {missing} is missing: give every machine its own --node-rank, from 0 to {count - 1}, and all "
                "the address of the first as --master-address"
            )
        if rank >= count:
            raise typer.BadParameter(f"--node-rank {rank} is not below --nodes {count}: machines count from 0")
        return cls(count, rank, address, PORT if port is None else port)


def is_worker() -> bool:
    return environment.is_worker()


def other_rank() -> str | None:
    """Return the rank of this process if it is a worker other than the first."""
    rank = environment.written()[1]
    return rank if rank != "0" else None


def is_first_of_machine() -> bool:
    """True if this process prints for the workers of its machine."""
    rank = other_rank()
    return rank is None or environment.written()[2] == "0"


def has_joined() -> bool:
    """True if this process is a worker that has joined the others."""
    joining = sys.modules.get("burnish.distributed.connection.joining")
    return joining is not None and joining.has_joined()


def exit_status(error: Exception) -> int:
    """Return the exit status of an error, which tells a launcher if restarting the worker can help."""
    return COMES_AGAIN if is_worker() and LAUNCHED in os.environ and comes_again(error) else 1


def run_id() -> str:
    """Return the name of the launch of this process, shared with its restarts; empty if there is none."""
    name = os.environ.get(RUN_ID, "") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def is_restart() -> bool:
    """True if the launcher has restarted the workers."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def command_line(arguments: Sequence[str]) -> str:
    """Return the command line of burnish with these arguments."""
    return shlex.join(["burnish", *arguments])


def resuming(command: str, folder: Path) -> str:
    """Return the command line that resumes the run in a folder, with its options."""
    return command_line([command, "--resume", str(folder)])


def claimed_folder() -> Path | None:
    """Return the run folder claimed by the launcher of this worker, or None."""
    folder = os.environ.get(RUN_FOLDER, "") if is_worker() else ""
    return Path(folder) if folder else None


def check_count(workers: int) -> None:
    """Raise ConfigurationError if a launcher has started another number of workers than the command requests."""
    started = os.environ.get("LOCAL_WORLD_SIZE", environment.written()[0])
    if started != str(workers):
        raise ConfigurationError(
            f"--workers {workers}, and a launcher has started {started} on this machine: leave --workers out, or the launcher"
        )


def check_together(
    workers: int, engine: str | Engine, norm: str | NormPolicy | Mapping[str, str | NormPolicy], at_every_step: bool = True
) -> None:
    """Raise errors that every worker would raise, before any starts.

    Args:
        workers: number of workers.
        engine: name of an engine.
        norm: as in ``burnish.compile``.
        at_every_step: True if workers exchange at every step; otherwise each steps separately between rounds, on any engine.

    Raises:
        EngineError: PyTorch is missing, or the engine is not available or cannot exchange values with other workers.
        ConfigurationError: the size of a worker group does not divide their number, or a policy is unknown.
    """
    from burnish.distributed.batch_normalization import check_group
    from burnish.distributed.connection.store import check_torch
    from burnish.distributed.options import check_engine
    from burnish.engines import get
    from burnish.norms import get as policy

    check_torch()
    if not at_every_step:
        return
    for name in norm.values() if isinstance(norm, Mapping) else (norm,):
        check_group(policy(name), workers)
    # PyTorch's engine can exchange values, and importing it would take longer than anything else in the launcher.
    if engine not in ("auto", "torch"):
        check_engine(get(engine))


def launch(command_name: str, arguments: Sequence[str], folder: Path, workers: int, restarts: int, machines: Machines) -> None:
    """Run a command of burnish in several processes of this machine, and wait for them.

    Args:
        command_name: ``train``.
        arguments: arguments of the command for each worker.
        folder: folder of the run.
        workers: number of workers on this machine.
        restarts: times to restart all workers when one fails, unless it would fail each time.
        machines: machines of the run, each with its own launcher.

    Raises:
        WorkerError: a worker was killed.
        typer.Exit: the workers failed, and have printed the reason.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = {
        **{name: text for name, text in os.environ.items() if name != environment.FOLDER},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // workers))),
        # Broken connections are reported as errors; the library's traces add less.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "WORLD_SIZE": str(workers * machines.count),
        "LOCAL_WORLD_SIZE": str(workers),
        LAUNCHED: "1",
        RUN_ID: uuid.uuid4().hex,
        RUN_FOLDER: str(folder),
    }
    resume = resuming(command_name, folder)
    if machines.count > 1:
        common |= {"MASTER_ADDR": machines.address, "MASTER_PORT": str(machines.port)}
    command = [sys.executable, "-m", "burnish", *arguments]
    first = workers * machines.rank
    for left in reversed(range(restarts + 1)):
        with _place_to_meet(machines) as place:
            failed = _run(command, [{**common, **place, **_ranks(first, local)} for local in range(workers)], resume)
        if failed is None:
            return
        local, process = failed
        if process.returncode in (REFUSED, COMES_AGAIN, INTERRUPTED, TERMINATED):
            raise typer.Exit(1 if process.returncode == COMES_AGAIN else process.returncode)
        if not left:
            raise _ended(first + local, process, resume)


@contextmanager
def _place_to_meet(machines: Machines) -> Iterator[dict[str, str]]:
    """Yield the variables that tell workers where to meet. On one machine it is a new folder, removed at the end."""
    if machines.count > 1:
        yield {}
        return
    folder = tempfile.mkdtemp(prefix="burnish-")
    try:
        yield {environment.FOLDER: folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ranks(first: int, local: int) -> dict[str, str]:
    return {"RANK": str(first + local), "LOCAL_RANK": str(local)}


def _run(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], resume: str
) -> tuple[int, subprocess.Popen[bytes]] | None:
    """Start a worker in each environment and wait until all have succeeded; return the first that fails, with its index.

    Raises:
        typer.Exit: this process was asked to stop, and has stopped the workers.
    """
    workers: list[subprocess.Popen[bytes]] = []
    with _stops_noted() as stops, _life_line() as (fds, noted):
        try:
            for environment in environments:
                own = {**environment, **noted}
                workers.append(subprocess.Popen(command, env=own, pass_fds=fds, start_new_session=os.name == "posix"))
            while not stops:
                running = [worker for worker in workers if worker.poll() is None]
                # If several have ended by now, one that was killed is the cause.
                failed = [(local, worker) for local, worker in enumerate(workers) if worker.returncode]
                if failed:
                    first = min(failed, key=lambda entry: entry[1].returncode > 0)
                    if first[1].returncode in (INTERRUPTED, TERMINATED):  # it got a signal itself: all end after the same step
                        _end(workers, stops, SHUTDOWN_SECONDS)
                    return first
                if not running:
                    return None
                time.sleep(LOOK_UP_SECONDS)
            stop = stops[0]
            _end(workers, stops, SHUTDOWN_SECONDS)
        finally:
            _end(workers, [], 0)
    if stop == signal.SIGINT or (stop == signal.SIGTERM and workers[0].returncode == TERMINATED):
        raise typer.Exit(128 + int(stop))  # the first worker has printed where the state is
    what = f"Stopped by {signal.Signals(stop).name}, and the workers too. Go on from the last checkpoint:"
    for line in (what, f"  {resume}"):
        errors().print(line, style="yellow")
    raise typer.Exit(128 + int(stop))


@contextmanager
def _life_line() -> Iterator[tuple[tuple[int, ...], dict[str, str]]]:
    """Yield a pipe that breaks when this process ends in any way: inherited descriptors, and the variable that names them."""
    if os.name != "posix":
        yield (), {}
        return
    inherited, own = os.pipe()
    try:
        yield (inherited,), {LIFE_LINE: str(inherited)}
    finally:
        os.close(inherited)
        os.close(own)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except (OSError, OverflowError):
        return False


def end_with_launcher() -> None:
    """Make this worker finish its step, save and end when its launcher is gone, for example killed for its memory.

    Otherwise it could write to the folder of a run that has been resumed in the meantime.

    Raises:
        ConfigurationError: the variable that names the pipe was set from outside.
    """
    inherited = os.environ.pop(LIFE_LINE, "")
    if not inherited:
        return
    if not is_natural_text(inherited) or not _is_pipe(int(inherited)):
        raise ConfigurationError(
            f"{LIFE_LINE} is {inherited!r} in the environment, and burnish train --workers alone sets it: unset it"
        )

    def wait() -> None:
        with suppress(OSError):
            os.read(int(inherited), 1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SHUTDOWN_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="burnish-launcher", daemon=True).start()


@contextmanager
def _stops_noted() -> Iterator[list[int]]:
    """Collect stop signals for this process in a list, without stopping."""
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: noted.append(number)) for number in STOPS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(workers: Sequence[subprocess.Popen[bytes]], signals: list[int], seconds: float) -> None:
    """Pass signals on to workers, wait for their end, and kill the remaining ones after so many seconds.

    After a second signal they have five seconds.
    """
    until = time.monotonic() + seconds
    sent = 0
    while running := [worker for worker in workers if worker.poll() is None]:
        if sent < len(signals) and sent:
            until = min(until, time.monotonic() + AGAIN_SECONDS)
        late = time.monotonic() > until
        for number in [signal.SIGKILL] if late else signals[sent:]:
            for worker in running:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, number)
        sent = len(signals)
        time.sleep(LOOK_UP_SECONDS / 2)


def _ended(rank: int, process: subprocess.Popen[bytes], resume: str) -> Exception:
    if process.returncode >= 0:
        return typer.Exit(process.returncode)
    name = signal.Signals(-process.returncode).name
    memory = " The system does so when memory runs out: then take fewer workers or a smaller batch." if name == "SIGKILL" else ""
    return WorkerError(
        f"Rank {rank} (process {process.pid}) was ended by {name}, and the others were stopped.{memory} What was trained since "
        f"the last checkpoint is lost; go on from it, with as many workers as you like: {resume}"
    )
