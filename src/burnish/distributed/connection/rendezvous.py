"""How workers find each other: the environment that ``torchrun`` sets, the store that they share, and the network."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from burnish.distributed.connection.watch import first_line, ranks
from burnish.errors import ConfigurationError, EngineError, WorkerError

TIMEOUT_SECONDS = 60.0
FIRST_CONTACT_SECONDS = 300.0
# How much longer than asked a connection may take: to what accepts it and is silent, the library waits without an end.
SILENT_SECONDS = 30.0
INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
Result = TypeVar("Result")

# The server of the store lives in the process of rank 0, if not in the launcher's, until that ends: others may still ask it.
_stores: dict[tuple[str, int], Any] = {}
_meetings = 0
# Groups that this process is of, beside that of all workers.
_groups = 0


@dataclass(frozen=True)
class Place:
    """Where this worker stands among the others.

    Attributes:
        rank, world_size: in the run.
        local_rank: among the workers of this machine.
        host, port: of the store; empty and 0 for a worker alone.
        attempt: how often ``torchrun`` has started the workers again.
        launcher_keeps_store: whether the store is in the process of ``torchrun``; else it is in that of rank 0.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str = ""
    port: int = 0
    attempt: int = 0
    launcher_keeps_store: bool = False

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def keeper(self) -> str:
        """Who keeps the store."""
        return "the launcher" if self.launcher_keeps_store else "rank 0"

    @classmethod
    def of_environment(cls) -> Place:
        """Read what ``torchrun`` sets; a worker alone where ``WORLD_SIZE`` is not set.

        Raises:
            ConfigurationError: something is missing, or no number, or out of range.
        """
        if "WORLD_SIZE" not in os.environ:
            return cls()
        world_size = _number("WORLD_SIZE", 1)
        rank = _number("RANK", 0)
        if rank >= world_size:
            raise ConfigurationError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0. Start with torchrun")
        local_rank = _number("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else rank
        if world_size == 1:
            return cls(rank, world_size, local_rank)
        return cls(
            rank,
            world_size,
            local_rank,
            _text("MASTER_ADDR"),
            _number("MASTER_PORT", 1),
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def torch_distributed() -> Any:
    """Return the module ``torch.distributed``.

    Raises:
        EngineError: PyTorch is not installed, or was built without it.
    """
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise EngineError(
            "Several workers exchange their gradients by torch.distributed, and PyTorch is not installed: "
            "pip install 'burnish[torch]', or train with one worker"
        ) from error
    if not distributed.is_available():
        raise EngineError("This PyTorch was built without torch.distributed: install another build, or train with one worker")
    return distributed


def meet(place: Place, first_contact: float) -> tuple[Any, Callable[[], Any]]:
    """Reach the store and wait there until all workers have come.

    Args:
        place: where this worker stands.
        first_contact: seconds to wait for the others.

    Returns:
        The part of the store that is this meeting's, and a function that opens a further connection to it.

    Raises:
        WorkerError: the store cannot be reached or made, or some have not come.
    """
    global _meetings
    until = time.monotonic() + first_contact
    distributed = torch_distributed()
    key = (place.host, place.port)
    if key not in _stores:
        _stores[key] = _open(place, first_contact, place.rank == 0 and not place.launcher_keeps_store)
    # Workers of one run join equally often, and nothing of an earlier meeting or attempt is found in a later one.
    _meetings += 1
    prefix = f"burnish/{place.attempt}/{_meetings}"
    store = distributed.PrefixStore(prefix, _stores[key])
    store.set(_arrival(place.rank), f"{socket.gethostname()}:{os.getpid()}")
    _wait_for_all(store, place, until, first_contact)

    def open_store() -> Any:
        return distributed.PrefixStore(prefix, _open(place, first_contact, False))

    return store, open_store


def initialize(place: Place, store: Any, device: str, limit: float) -> None:
    """Connect the workers with each other.

    Raises:
        EngineError: this PyTorch cannot exchange tensors of the device.
        WorkerError: they have met in the store, but do not reach each other.
    """
    distributed = torch_distributed()
    if device != "cpu":
        if not distributed.is_nccl_available():
            raise EngineError(
                "This PyTorch has no NCCL, by which GPUs exchange tensors: install a build for CUDA, or train on cpu"
            )
        import torch

        torch.cuda.set_device(device)
    _choose_interface(place)
    global _groups
    _groups = 0
    try:
        distributed.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=limit),
        )
    except RuntimeError as error:
        raise WorkerError(
            f"The workers have met at {place.address}, but rank {place.rank} cannot connect with another: {first_line(error)}. "
            f"Name the network interface that they reach each other by in {INTERFACE}, and open the ports between the machines"
        ) from error


def groups_made() -> int:
    """Return of how many groups this process is, beside that of all workers."""
    return _groups


def connect(members: Sequence[int], made: int, limit: float) -> Any:
    """Connect some of the workers in a group of ``torch.distributed`` of their own; all of them call this together.

    PyTorch names such a group by its ranks and the number of groups that its process is of: where these differ, workers wait for
    each other under different names. So who is of fewer than another makes groups of itself alone first.

    Args:
        members: their ranks in the run.
        made: the largest ``groups_made`` of them.
        limit: seconds that an exchange may take.

    Raises:
        RuntimeError: one has not come, or is not reached.
    """
    global _groups
    distributed, timeout = torch_distributed(), timedelta(seconds=limit)
    while _groups < made:
        distributed.new_group([distributed.get_rank()], timeout=timeout, backend="gloo", use_local_synchronization=True)
        _groups += 1
    group = distributed.new_group(list(members), timeout=timeout, use_local_synchronization=True)
    _groups += 1
    return group


def part(broken: bool) -> None:
    """Close the connections of this process with the others.

    Args:
        broken: that some are gone: what is under way ends at once, and nobody is waited for.
    """
    distributed = torch_distributed()
    with suppress(RuntimeError):
        if broken:
            distributed.distributed_c10d._abort_process_group()
        else:
            distributed.destroy_process_group()


def _open(place: Place, seconds: float, is_server: bool) -> Any:
    distributed = torch_distributed()

    def opened() -> Any:
        return distributed.TCPStore(
            place.host,
            place.port,
            None,
            is_server,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        return _within(opened, seconds + SILENT_SECONDS)
    except TimeoutError as error:
        raise WorkerError(
            f"Rank {place.rank} waits for {place.keeper} at {place.address}, where something answers that is no worker of this "
            "run: choose another port (MASTER_PORT; torchrun --master-port)"
        ) from error
    except (RuntimeError, ValueError) as error:
        if is_server:
            raise WorkerError(
                f"Rank 0 cannot wait for the others at {place.address}: {first_line(error)}. Choose another port (MASTER_PORT; "
                "torchrun --master-port)"
            ) from error
        raise WorkerError(
            f"Rank {place.rank} has not reached {place.keeper} at {place.address} in {seconds:g} s: {first_line(error)}. See "
            "whether it runs, and whether MASTER_ADDR and MASTER_PORT are reached from this machine"
        ) from error


def _within(function: Callable[[], Result], seconds: float) -> Result:
    """Return what a function returns that may block without an end, such as a connection to what never answers.

    Raises:
        TimeoutError: it has not returned in time; its thread is left behind.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="burnish-open", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def _wait_for_all(store: Any, place: Place, until: float, seconds: float) -> None:
    missing = [rank for rank in range(place.world_size) if rank != place.rank]
    while missing:
        missing = [rank for rank in missing if not store.check([_arrival(rank)])]
        if missing and time.monotonic() > until:
            raise WorkerError(
                f"{ranks(missing).capitalize()} of {place.world_size} {'has' if len(missing) == 1 else 'have'} not come to "
                f"{place.address} in {seconds:g} s: see whether all workers were started, with the same address, and reach it"
            )
        if missing:
            with suppress(RuntimeError):
                store.wait([_arrival(missing[0])], timedelta(seconds=max(0.01, min(1.0, until - time.monotonic()))))


def _choose_interface(place: Place) -> None:
    """Let Gloo use the interface that the store is reached by, where the user names none; for groups that are made later too.

    By itself it takes what the machine's own name resolves to, which is the loopback on many machines: nobody else reaches that.
    """
    if INTERFACE not in os.environ and (name := _interface_towards(place.host, place.port)) is not None:
        os.environ[INTERFACE] = name


def _interface_towards(host: str, port: int) -> str | None:
    """Return the name of the network interface that packets to ``host`` leave by; None where that is unknown."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with suppress(OSError):
                    if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                        return name
    except OSError:
        return None
    return None


def _text(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigurationError(
            f"WORLD_SIZE says that this is one of several workers, but {name} is not set: start them with torchrun, or unset "
            "WORLD_SIZE to train alone"
        )
    return value


def _number(name: str, least: int) -> int:
    text = _text(name)
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(f"{name}={text}: it is to be a whole number of at least {least}. Start workers with torchrun")
    return int(text)


def _arrival(rank: int) -> str:
    return f"arrived/{rank}"
