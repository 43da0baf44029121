"""This process's place among the workers, from the variables of torchrun, Open MPI, MPICH or Slurm."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from burnish.errors import ConfigurationError
from burnish.installing import install_command
from burnish.settings import is_natural_text

FOLDER = "BURNISH_MEETING"
"""Environment variable with the folder in which workers of ``burnish train --workers`` meet."""
LAUNCHERS = (
    ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
"""For each launcher: the number of workers, this worker's rank, and its rank on its machine."""
_MPI = (LAUNCHERS[1][0], LAUNCHERS[2][0])
# Slurm gives no port: each step derives one from the numbers of job and step, spaced so that jobs rarely collide.
_SLURM_PORTS = range(20000, 30000)
_STEPS = 16
_from_mpi: tuple[str, int] | None = None


@dataclass(frozen=True)
class Place:
    """The place of this worker. Workers meet in ``folder``, or at the store at ``host`` and ``port`` of torchrun or rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    folder: str = ""
    host: str = ""
    port: int = 0
    launcher_keeps_store: bool = False

    @property
    def address(self) -> str:
        return self.folder or f"{self.host}:{self.port}"

    @property
    def keeper(self) -> str:
        return "" if self.folder else "the launcher (torchrun)" if self.launcher_keeps_store else "rank 0"

    @classmethod
    def of_environment(cls) -> Place:
        names = _launcher()
        if names is None:
            return cls()
        world_size, rank = _number(names[0], 1), _number(names[1], 0)
        if rank >= world_size:
            raise ConfigurationError(
                f"{names[1]}={rank} is not below {names[0]}={world_size}: ranks count from 0. Start with torchrun"
            )
        local_rank = _number(names[2], 0) if names[2] in os.environ else rank
        if world_size == 1:
            return cls(rank, world_size, local_rank)
        if folder := os.environ.get(FOLDER, ""):
            return cls(rank, world_size, local_rank, str(Path(folder).absolute()))
        host, port = _address(names[0], rank)
        return cls(rank, world_size, local_rank, "", host, port, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _launcher() -> tuple[str, str, str] | None:
    for names in LAUNCHERS:
        if names[0] in os.environ and (names is LAUNCHERS[0] or os.environ[names[0]] != "1"):
            return names
    return None


def is_of_mpi() -> bool:
    names = _launcher()
    return names is not None and names[0] in _MPI


def is_worker() -> bool:
    return _launcher() is not None


def written() -> tuple[str, str, str]:
    """Return the number of workers, the rank and the local rank as text from the launcher; "", "0" and "0" without one."""
    names = _launcher()
    if names is None:
        return "", "0", "0"
    rank = os.environ.get(names[1], "0")
    return os.environ[names[0]], rank, os.environ.get(names[2], rank)


def _address(launcher: str, rank: int) -> tuple[str, int]:
    if launcher == "WORLD_SIZE" or "MASTER_ADDR" in os.environ or "MASTER_PORT" in os.environ:
        return _text("MASTER_ADDR", launcher), _number("MASTER_PORT", 1)
    if launcher in _MPI:
        return _address_by_mpi(rank)
    step = int(os.environ.get("SLURM_JOB_ID", "0")) * _STEPS + int(os.environ.get("SLURM_STEP_ID", "0")) % _STEPS
    if os.environ.get("SLURM_STEP_NUM_NODES") == "1":
        first = "127.0.0.1"
    else:  # the first of a list such as node[03-05,9],other
        first = re.sub(r"^([^\[,]*)\[?(\d*).*", r"\1\2", _text("SLURM_STEP_NODELIST", LAUNCHERS[3][0]))
    return first, _SLURM_PORTS[step % len(_SLURM_PORTS)]


def _address_by_mpi(rank: int) -> tuple[str, int]:
    """Let rank 0 send the others its address by MPI; only once, because all ranks must take part."""
    global _from_mpi
    if _from_mpi is not None:
        return _from_mpi
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"mpirun has started several workers, and mpi4py, by which they find each other, cannot be used ({error}): "
            f"{install_command('mpi4py')}, or set MASTER_ADDR and MASTER_PORT for all of them"
        ) from error
    told = bytearray(256)
    is_alone = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_size() == MPI.COMM_WORLD.Get_size()
    if rank == 0:
        host = "127.0.0.1" if is_alone else socket.gethostname()
        with socket.socket() as probe:
            probe.bind(("", 0))
            told[:] = f"{host} {probe.getsockname()[1]}".encode().ljust(256)
    MPI.COMM_WORLD.Bcast(told, 0)
    found, port = told.decode().split()
    _from_mpi = found, int(port)
    return _from_mpi


def _text(name: str, launcher: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigurationError(
            f"{launcher} says that this is one of several workers, but {name} is not set: start them with torchrun, or unset "
            f"{launcher} to train alone"
        )
    return value


def _number(name: str, least: int) -> int:
    text = _text(name, "WORLD_SIZE")
    if not is_natural_text(text) or int(text) < least:
        raise ConfigurationError(f"{name}={text}: it is to be a whole number of at least {least}. Start workers with torchrun")
    return int(text)
