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


@contextmanager
def started(command: Sequence[str], variables: Mapping[str, str] | None = None) -> Iterator[Callable[[], tuple[int, str]]]:
    """Start a command without a variable of burnish's; yields what waits for its status and all that it prints."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("BURNISH")}
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(
            command, stdout=messages, stderr=subprocess.STDOUT, env={**own, "OMP_NUM_THREADS": "1", **(variables or {})}
        )

        def wait() -> tuple[int, str]:
            status = process.wait(SECONDS)
            messages.seek(0)
            return status, messages.read()

        try:
            yield wait
        finally:
            process.terminate()
            process.wait()


def numbers(status: int, messages: str, workers: int) -> list[float]:
    """What the workers of a command have printed.

    Raises:
        RuntimeError: it has failed, or other workers have printed something.
    """
    # Lines of several workers may run into each other.
    line = r"rank (\d+) of (\d+): (nan|\d\.\de[+-]\d\d)"
    printed = {(int(rank), int(size)): float(number) for rank, size, number in re.findall(line, messages)}
    if status or sorted(printed) != [(rank, workers) for rank in range(workers)]:
        raise RuntimeError(f"status {status}:\n{messages}")
    return list(printed.values())


def differences(command: Sequence[str], workers: int, variables: Mapping[str, str] | None = None) -> list[float]:
    """What the workers of a command print."""
    with started(command, variables) as wait:
        return numbers(*wait(), workers)


def torchrun(*options: str) -> list[float]:
    """Three workers in torch.distributed's default way, at a port that is free: alone it takes 29500, which another may have."""
    return differences([*TORCHRUN, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nproc-per-node", "3", SCRIPT, *options], 3)


def torchrun_static() -> list[float]:
    place = ("--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    return differences([*TORCHRUN, *place, "--nproc-per-node", "4", SCRIPT, "--group"], 4)


def torchrun_standalone() -> list[float]:
    return differences([*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, "--engine", "onnxruntime"], 2)


def torchrun_with_a_worker_killed() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        place = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", "1", "--nproc-per-node", "3")
        return differences([*TORCHRUN, *place, SCRIPT, "--checkpoint", f"{folder}/run.safetensors", "--interrupt", "worker"], 3)


def torchrun_with_fewer_and_more_workers() -> list[float]:
    """An agent begins with two workers, another comes with a third, which the rest lose in the middle."""
    # A store that agents share is not entered anew in PyTorch 2.13 if one comes later, and it waits for ever.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    times = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "changing")
    agent = (*TORCHRUN, "--nnodes", "1:2", "--max-restarts", "3", *place, "--rdzv-conf", times)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "run.safetensors"
        script = (SCRIPT, "--checkpoint", str(checkpoint), "--interrupt")
        with started([*agent, "--nproc-per-node", "2", *script, "alone"], variables) as wait:
            until = time.monotonic() + SECONDS
            while not checkpoint.exists() and time.monotonic() < until:
                time.sleep(0.1)
            with started([*agent, "--nproc-per-node", "1", *script, "agent"], variables) as wait_for_other:
                status, messages = wait_for_other()
                if status != -signal.SIGKILL:
                    raise RuntimeError(f"the agent that is to be killed has status {status}:\n{messages}")
                return numbers(*wait(), 2)


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
    # Its workers are nice otherwise, and wait for minutes on a machine that is busy. Of lines like each other it prints one.
    own = {"PYTHONPATH": paths, "RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0"}
    return differences([PYTHON, str(FOLDER / "with_ray.py")], 3, own)


LAUNCHERS: Mapping[str, Callable[[], list[float]]] = {
    "torchrun": torchrun,
    "torchrun, static": torchrun_static,
    "torchrun, standalone, ONNX Runtime": torchrun_standalone,
    "torchrun, a worker killed": torchrun_with_a_worker_killed,
    "torchrun, 2 workers, then 3, then 2": torchrun_with_fewer_and_more_workers,
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
