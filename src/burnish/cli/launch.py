"""``burnish train --workers``: starts the workers of a machine, stops and restarts them, and says how they ended.

Each gets its rank in the environment, as torchrun would set it, and where to meet the others: on one machine in a new folder that
nobody else can enter, on several at a port of the first. Nothing listens here.
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
"""The statuses of a process that Ctrl-C or SIGTERM has stopped, after it has saved its run."""
REFUSED = 2
"""The status of a worker whose command line is refused."""
COMES_AGAIN = 78
"""The status of a worker that would fail alike at every start: EX_CONFIG of sysexits.h."""
LAUNCHED = "BURNISH_LAUNCHED"
"""In the environment of workers whose launcher reads that status."""
LIFE_LINE = "BURNISH_LIFE_LINE"
"""In the environment of workers: the file descriptor that closes when their launcher is gone."""
RUN_FOLDER = "BURNISH_RUN_FOLDER"
"""In the environment of workers: the folder of their run."""
RUN_ID = "BURNISH_RUN_ID"
"""In the environment of workers: the name of their launch."""
# A worker that is asked to stop finishes its step and saves; one whose run has failed is ended.
SHUTDOWN_SECONDS, AGAIN_SECONDS = 120.0, 5.0
LOOK_UP_SECONDS = 0.1
STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
PORT = 29500


@dataclass(frozen=True)
class Machines:
    """The machines of a run, and which of them this is.

    Attributes:
        count: how many there are.
        rank: of this one, from 0.
        address: by which the others reach the first one.
        port: of the first one, where all workers meet.
    """

    count: int = 1
    rank: int = 0
    address: str = ""
    port: int = PORT

    @classmethod
    def of_options(cls, count: int, rank: int | None, address: str | None, port: int | None) -> Machines:
        """Return what the options of a command say.

        Raises:
            typer.BadParameter: they contradict each other, or one is missing.
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
    """Whether a launcher has started this process."""
    return environment.is_worker()


def other_rank() -> str | None:
    """Return the rank of this process if it is a worker, and not the first one."""
    rank = environment.written()[1]
    return rank if rank != "0" else None


def is_first_of_machine() -> bool:
    """Whether this process speaks for the workers of its machine."""
    rank = other_rank()
    return rank is None or environment.written()[2] == "0"


def has_joined() -> bool:
    """Whether this process has joined the other workers of its run; false where it is no worker."""
    joining = sys.modules.get("burnish.distributed.connection.joining")
    return joining is not None and joining.has_joined()


def exit_status(error: Exception) -> int:
    """Return the status with which an error ends this process: it tells a launcher whether to start the worker again."""
    return COMES_AGAIN if is_worker() and LAUNCHED in os.environ and comes_again(error) else 1


def run_id() -> str:
    """Return the name of the launch that this process belongs to, which its restarts share; empty where it has none."""
    name = os.environ.get(RUN_ID, "") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def is_restart() -> bool:
    """Whether the launcher has started the workers before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def command_line(arguments: Sequence[str]) -> str:
    """Return the command line of burnish with these arguments."""
    return shlex.join(["burnish", *arguments])


def resuming(command: str, folder: Path) -> str:
    """Return the command line that goes on with the run in a folder, which keeps its options."""
    return command_line([command, "--resume", str(folder)])


def claimed_folder() -> Path | None:
    """Return the folder that the launcher of this worker has claimed for its run; None if there is none."""
    folder = os.environ.get(RUN_FOLDER, "") if is_worker() else ""
    return Path(folder) if folder else None


def check_count(workers: int) -> None:
    """Raise ConfigurationError where a launcher has started more or fewer workers than the command says."""
    started = os.environ.get("LOCAL_WORLD_SIZE", environment.written()[0])
    if started != str(workers):
        raise ConfigurationError(
            f"--workers {workers}, and a launcher has started {started} on this machine: leave --workers out, or the launcher"
        )


def check_together(
    workers: int, engine: str | Engine, norm: str | NormPolicy | Mapping[str, str | NormPolicy], at_every_step: bool = True
) -> None:
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
    # PyTorch's can exchange values, and importing it would take the launcher longer than all else.
    if engine not in ("auto", "torch"):
        check_engine(get(engine))


def launch(command_name: str, arguments: Sequence[str], folder: Path, workers: int, restarts: int, machines: Machines) -> None:
    """Run a command of burnish in several processes of this machine, and wait for them.

    Args:
        command_name: ``train``.
        arguments: of the command, as each worker gets them.
        folder: of the run.
        workers: how many of this machine.
        restarts: how often to start all of them again when one fails otherwise than it would each time.
        machines: on which the run is; each has a launcher of its own.

    Raises:
        WorkerError: a worker was killed.
        typer.Exit: the workers ended otherwise than by success; they have said why.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = {
        **{name: text for name, text in os.environ.items() if name != environment.FOLDER},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // workers))),
        # Connections that break are reported as errors; the library's traces of them say less.
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
    """Yield what tells workers where they meet. On one machine it is a new folder, which is removed when they have ended."""
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
    """Start a worker in each environment and wait until all have succeeded; returns the first that fails, and its place.

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
                # Of several that have ended by now, one that was killed is the reason.
                failed = [(local, worker) for local, worker in enumerate(workers) if worker.returncode]
                if failed:
                    first = min(failed, key=lambda entry: entry[1].returncode > 0)
                    if first[1].returncode in (INTERRUPTED, TERMINATED):  # by a signal to itself: all end after the same step
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
        raise typer.Exit(128 + int(stop))  # the first worker has said where the state is
    what = f"Stopped by {signal.Signals(stop).name}, and the workers too. Go on from the last checkpoint:"
    for line in (what, f"  {resume}"):
        errors().print(line, style="yellow")
    raise typer.Exit(128 + int(stop))


@contextmanager
def _life_line() -> Iterator[tuple[tuple[int, ...], dict[str, str]]]:
    """Yield a pipe that breaks when this process ends, however that is: what workers inherit of it, and what names it to them."""
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
    """Let this worker finish its step, save and end when its launcher is gone, such as killed for the memory that it took.

    A worker that went on would write to the folder of a run that has been resumed in the meantime.

    Raises:
        ConfigurationError: the variable that names the pipe was set by somebody else.
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
    """Collect the signals that ask this process to stop in a list, and let it go on."""
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: noted.append(number)) for number in STOPS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(workers: Sequence[subprocess.Popen[bytes]], signals: list[int], seconds: float) -> None:
    """Pass signals on to workers as they come, wait until they have ended, and kill those that are left after so many seconds.

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
