"""Launchers start workers of ``tests/distributed/launched.py``, with no variable of burnish's.

``python tests/launchers/every_launcher.py [NAME ...]`` prints for each launcher how far its workers are from one process. One
that is not installed here is named as left out. Exits with status 1 if a launcher fails, or its workers are further than 1e-10
from one process. ``make test-launchers`` installs MPICH and Ray. Open MPI and Slurm (slurmd, slurmctld, munge) are of the system,
and the daemons of Slurm want root.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TOLERANCE = 1e-10
SECONDS = 600
FOLDER = Path(__file__).parent
SCRIPT = str(FOLDER.parent / "distributed" / "launched.py")
PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run")
SBIN = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))


class NotHereError(Exception):
    """The launcher is not installed."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def found(command: str) -> str:
    """The path of a command: the one of this environment goes before that of the system."""
    beside = Path(PYTHON).with_name(command)
    path = str(beside) if beside.exists() else shutil.which(command, path=SBIN)
    if path is None:
        raise NotHereError(command)
    return path


def differences(command: Sequence[str], workers: int, variables: Mapping[str, str] | None = None) -> list[float]:
    """What the workers of a command print.

    Raises:
        RuntimeError: it fails, or other workers print something.
    """
    own = {name: text for name, text in os.environ.items() if not name.startswith("BURNISH")}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**own, "OMP_NUM_THREADS": "1", **(variables or {})},
        timeout=SECONDS,
        check=False,
    )
    # Lines of several workers may run into each other.
    printed = {int(rank): float(number) for rank, number in re.findall(r"rank (\d+) of \d+: (\d\.\de[+-]\d\d)", done.stdout)}
    if done.returncode or sorted(printed) != list(range(workers)):
        raise RuntimeError(f"status {done.returncode}:\n{done.stdout}")
    return list(printed.values())


def torchrun() -> list[float]:
    return differences([*TORCHRUN, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nproc-per-node", "4", SCRIPT], 4)


def torchrun_static() -> list[float]:
    place = ("--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    return differences([*TORCHRUN, *place, "--nproc-per-node", "3", SCRIPT, "--group"], 3)


def torchrun_with_a_worker_killed() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        place = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", "1", "--nproc-per-node", "3")
        return differences([*TORCHRUN, *place, SCRIPT, "--interrupted", f"{folder}/run.safetensors"], 3)


def mpich() -> list[float]:
    return differences([found("mpiexec.hydra"), "-n", "4", PYTHON, SCRIPT], 4)


def mpich_without_pytorch() -> list[float]:
    return differences([found("mpiexec.hydra"), "-n", "4", PYTHON, SCRIPT, "--mpi", "--engine", "onnxruntime"], 4)


def open_mpi() -> list[float]:
    """With an address, as the mpi4py of this environment is MPICH's."""
    command = [found("mpirun.openmpi"), "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return differences([*command, "-n", "3", PYTHON, SCRIPT], 3, place)


SLURM = """ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """A cluster of Slurm that is this machine alone; yields what tells its commands where it is."""
    munged, controller, daemon = found("munged"), found("slurmctld"), found("slurmd")
    if os.geteuid() != 0:
        raise NotHereError("slurmd as root")
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        for each in ("spool", "state"):
            (folder / each).mkdir()
        key, socket_path = folder / "munge.key", folder / "munge.socket"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        configuration = folder / "slurm.conf"
        configuration.write_text(SLURM.format(host=socket.gethostname(), folder=folder, ports=(free_port(), free_port())))
        files = {"pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / file}" for option, file in files.items()]
        try:
            subprocess.run([munged, "--force", f"--socket={socket_path}", f"--key-file={key}", *options], check=True)
            for each in (controller, daemon):
                subprocess.run([each, "-f", str(configuration)], check=True)
            variables = {"SLURM_CONF": str(configuration)}
            until = time.monotonic() + 60
            while (
                "idle"
                not in subprocess.run(
                    [found("sinfo"), "-h", "-o", "%T"], capture_output=True, text=True, env=os.environ | variables, check=False
                ).stdout
                and time.monotonic() < until
            ):
                time.sleep(0.2)
            yield variables
        finally:
            for file in folder.glob("*.pid"):
                with suppress(ValueError, ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGTERM)
            until = time.monotonic() + 20
            while any(folder.glob("*.pid")) and time.monotonic() < until:
                time.sleep(0.2)


def slurm() -> list[float]:
    with cluster() as variables:
        return differences([found("srun"), "--overcommit", "-n", "4", PYTHON, SCRIPT], 4, variables)


def ray_train() -> list[float]:
    if importlib.util.find_spec("ray") is None:
        raise NotHereError("ray")
    paths = os.pathsep.join([str(Path(SCRIPT).parent), os.environ.get("PYTHONPATH", "")])
    # Its workers are nice otherwise, and wait for minutes on a machine that is busy.
    return differences([PYTHON, str(FOLDER / "with_ray.py")], 3, {"PYTHONPATH": paths, "RAY_worker_niceness": "0"})


LAUNCHERS: Mapping[str, Callable[[], list[float]]] = {
    "torchrun": torchrun,
    "torchrun, static": torchrun_static,
    "torchrun, a worker killed": torchrun_with_a_worker_killed,
    "MPICH": mpich,
    "MPICH, without PyTorch": mpich_without_pytorch,
    "Open MPI": open_mpi,
    "Slurm": slurm,
    "Ray Train": ray_train,
}


def main() -> int:
    failed = False
    for name in sys.argv[1:] or LAUNCHERS:
        try:
            worst = max(LAUNCHERS[name]())
        except NotHereError as missing:
            print(f"{name}: left out, as there is no {missing} here", flush=True)
            continue
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"{name}: FAILED, {error}", flush=True)
            failed = True
            continue
        failed |= not worst <= TOLERANCE
        print(f"{name}: {worst:.1e} from one process{'' if worst <= TOLERANCE else ', FAILED'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
