"""How workers find each other: in the store of their launcher, of rank 0 or of a process group, or in a folder of one machine.

Each of them enters where it runs, and waits until all have done so. Ranks are given in the environment; nobody is asked for one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from burnish.distributed.connection.environment import Place
from burnish.distributed.connection.store import FolderStore, Store, TorchStore, check_folder
from burnish.distributed.connection.watch import first_line, ranks
from burnish.errors import EngineError, WorkerError
from burnish.installing import install_command

TIMEOUT_SECONDS = 60.0
FIRST_CONTACT_SECONDS = 300.0
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The environment variables with the network interface that the backends of ``torch.distributed`` exchange by."""
LOOPBACKS = {"linux": "lo", "darwin": "lo0"}
_POLL_SECONDS = 0.02
_RETRY_SECONDS = 0.2
# How much longer than asked a connection may take: the library waits without an end for what accepts it and is silent.
_SILENT_SECONDS = 3.0
_SIOCGIFADDR = 0x8915
Result = TypeVar("Result")

# The server of a store lives in the process of rank 0 until that ends: others may still ask it. C++ does not keep it alive.
_stores: dict[str, Any] = {}
_meetings: dict[str, int] = {}

NO_TORCH = (
    "Several workers exchange their gradients as PyTorch's tensors, and PyTorch is not installed: "
    f"{install_command('torch')}, or train with one worker, or by MPI (burnish.distributed.mpi)"
)


def check_torch() -> None:
    """Raise EngineError if PyTorch is not installed. It is not imported for that, which takes seconds."""
    if importlib.util.find_spec("torch") is None:
        raise EngineError(NO_TORCH)


def torch_distributed() -> Any:
    """Return the module ``torch.distributed``.

    Raises:
        EngineError: PyTorch is not installed, or was built without it.
    """
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise EngineError(NO_TORCH) from error
    if not distributed.is_available():
        raise EngineError("This PyTorch was built without torch.distributed: install another build, or train with one worker")
    return distributed


@dataclass(frozen=True)
class Location:
    """Where a worker runs.

    Attributes:
        host: the name of its machine.
        process: its number there.
        system: what tells one running system, with its processes and network, from others.
    """

    host: str
    process: int
    system: str

    @classmethod
    def own(cls) -> Location:
        host = socket.gethostname()
        try:
            # Containers of one machine, and namespaces that stand in for machines, are taken for machines.
            spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
            system = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {spaces}"
        except OSError:
            system = host
        return cls(host, os.getpid(), system)

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to run no more, by its number on this machine."""
        if self.system != Location.own().system or os.name != "posix":
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def __str__(self) -> str:
        return f"{self.host}, process {self.process}"


@dataclass(frozen=True)
class Meeting:
    """Workers that have found each other.

    Attributes:
        store: what they share.
        torch_store: the same as a store of ``torch.distributed``, for the backends that find each other by it.
        locations: by rank.
        address, keeper: of the store, for messages; the keeper is empty if the store outlives each of them.
        group: the process group of ``torch.distributed`` that they were found in; None if they were found otherwise.
    """

    store: Store
    torch_store: Any
    locations: Sequence[Location]
    address: str
    keeper: str
    group: Any = None

    @property
    def is_of_one_machine(self) -> bool:
        """Whether all workers run on one machine, in one network of it."""
        return len({location.system for location in self.locations}) == 1

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a worker is known to run no more, by its number on this machine."""
        return self.locations[rank].has_ended


def meet(place: Place, first_contact: float) -> Meeting:
    """Reach the store, or keep it, and wait there until all workers have come.

    Args:
        place: of this worker.
        first_contact: seconds to wait for the others.

    Raises:
        ConfigurationError: others may enter the folder.
        WorkerError: the store cannot be reached or made, or some have not come.
    """
    until = time.monotonic() + first_contact
    distributed = torch_distributed()
    # Workers of one run join equally often, and nothing of an earlier meeting is found in a later one.
    key = place.address
    _meetings[key] = _meetings.get(key, 0) + 1
    number = str(_meetings[key])
    if place.folder:
        folder = Path(place.folder)
        check_folder(folder)
        run, locations = _gathered(FolderStore(folder), number, place, until, first_contact, key)
        store = FolderStore(folder / run)
        store.folder.mkdir(mode=0o700, exist_ok=True)
        backends = distributed.FileStore(str(store.folder / "backends"), place.world_size)
        return Meeting(store, backends, locations, key, place.keeper)
    while True:
        try:
            if key not in _stores:
                _stores[key] = _open(place, max(1.0, until - time.monotonic()), first_contact)
            run, locations = _gathered(TorchStore(_stores[key]), number, place, until, first_contact, key)
            break
        except OSError as error:
            # The store was that of a run that has come to its end: rank 0 of this one is about to come.
            _stores.pop(key, None)
            if time.monotonic() > until:
                raise _not_reached(place, first_contact, error) from error
            time.sleep(_RETRY_SECONDS)
    torch_store = distributed.PrefixStore(run, _stores[key])
    return Meeting(TorchStore(torch_store), torch_store, locations, key, place.keeper)


def meet_in_group(group: Any, first_contact: float) -> Meeting:
    """Wait in the store of a process group of ``torch.distributed`` until all of its workers have come.

    Raises:
        WorkerError: some have not come.
    """
    # A group that is written in Python does not tell its name and store itself.
    known = torch_distributed().distributed_c10d
    store = known._get_process_group_store(group)
    place = Place(group.rank(), group.size())
    address = f"the process group '{known._get_process_group_name(group)}'"
    try:
        # The store counts, as a process may be of several groups.
        number = f"burnish.{store.add(f'burnish.meetings/{place.rank}', 1)}"
        until = time.monotonic() + first_contact
        run, locations = _gathered(TorchStore(store), number, place, until, first_contact, address)
    except (OSError, RuntimeError) as error:
        raise WorkerError(f"Rank {place.rank} cannot reach the store of {address}: {first_line(error)}") from error
    torch_store = torch_distributed().PrefixStore(run, store)
    return Meeting(TorchStore(torch_store), torch_store, locations, address, "the process that keeps the store", group)


def _gathered(hall: Store, number: str, place: Place, until: float, seconds: float, address: str) -> tuple[str, list[Location]]:
    """Wait until all workers have come; return the name of their run, and where they are, by rank.

    A store may hold what earlier runs left there, or those that were ended while they waited: each worker enters a token of its
    own, and once more under that of rank 0. Rank 0 waits for those under its own, and answers with a new name and the tokens of
    those that are of the run. Of two of one rank the later one counts. The number of starts would not tell runs apart: each agent
    of torchrun counts those of its own workers.

    Raises:
        OSError: the store is gone.
        WorkerError: some have not come, or contradict each other.
    """
    token = secrets.token_hex(16)
    hall.set(f"{number}/came/{place.rank}", json.dumps([token, astuple(Location.own()), place.world_size]))
    looks: dict[str, int] = {}
    while True:
        own, first = (_entry(hall, number, rank) for rank in (place.rank, 0))
        if own is not None and own[0] != token:
            raise _refused(place, address, f"another process has come as rank {place.rank}")
        if place.rank == 0:
            hall.add(f"{number}/{token}/looks", 1)
        if first is not None and first[2] != place.world_size:
            # One that looks no more is of an earlier run, when there were more or fewer workers.
            count = hall.add(f"{number}/{first[0]}/looks", 0)
            if looks.setdefault(first[0], count) != count:
                raise _refused(place, address, f"it is one of {place.world_size} workers, and rank 0 of {first[2]}")
        elif first is not None:
            hall.set(f"{number}/{first[0]}/{place.rank}", token)
        is_late = time.monotonic() > until
        entries = [_entry(hall, number, rank) for rank in range(place.world_size)] if place.rank == 0 or is_late else []
        missing = [
            rank
            for rank, entry in enumerate(entries)
            if entry is None
            or entry[2] != place.world_size
            or (place.rank == 0 and hall.get(f"{number}/{token}/{rank}") != entry[0])
        ]
        if place.rank == 0 and not missing:
            hall.set(f"{number}/run", json.dumps([secrets.token_hex(8), entries]))
        name, of_run = json.loads(hall.get(f"{number}/run") or "[null, []]")
        if any(entry[0] == token for entry in of_run):
            return name, [Location(*location) for _, location, _ in of_run]
        if is_late and not missing and of_run:
            raise WorkerError(
                f"Rank {place.rank} waits at {address} for a run to begin, where one has all its workers: end that, or choose "
                "another port"
            )
        if is_late:
            missing = missing or [0]
            raise WorkerError(
                f"{ranks(missing).capitalize()} of {place.world_size} {'has' if len(missing) == 1 else 'have'} not come to "
                f"{address} in {seconds:g} s: see whether all workers were started, with the same address, and reach it"
            )
        time.sleep(_POLL_SECONDS)


def _entry(hall: Store, number: str, rank: int) -> list[Any] | None:
    """What a worker entered: its token, where it is and how many there are; None if it has not come, or has ended."""
    text = hall.get(f"{number}/came/{rank}")
    if text is None:
        return None
    token, location, world_size = json.loads(text)
    return None if Location(*location).has_ended else [token, location, world_size]


def use_interface(meeting: Meeting, place: Place) -> None:
    """Let backends use the loopback if all workers are of one machine, else the interface that the store is reached by.

    What the user names stays. By itself Gloo takes what the machine's own name resolves to, on many machines the loopback, which
    no other machine reaches.
    """
    if meeting.is_of_one_machine:
        for variable in INTERFACES if sys.platform in LOOPBACKS else ():
            os.environ.setdefault(variable, LOOPBACKS[sys.platform])
    elif sys.platform == "linux" and place.host and (name := _interface_towards(place.host, place.port)) is not None:
        os.environ.setdefault(INTERFACES[0], name)


def _open(place: Place, seconds: float, first_contact: float) -> Any:
    """Connect to the store within so many seconds, of those that the first contact may take, or keep it."""
    distributed = torch_distributed()
    is_server = place.rank == 0 and not place.launcher_keeps_store

    def opened() -> Any:
        limit = timedelta(seconds=seconds)
        return distributed.TCPStore(
            place.host, place.port, None, is_server, limit, wait_for_workers=False, multi_tenant=is_server
        )

    try:
        if not is_server:
            _wait_for_listener(place, time.monotonic() + seconds)
        return _within(opened, seconds + _SILENT_SECONDS)
    except TimeoutError as error:
        raise WorkerError(
            f"Rank {place.rank} waits for {place.keeper} at {place.address}, where something answers that is no worker of this "
            "run: choose another port (MASTER_PORT; --master-port)"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        if is_server:
            raise WorkerError(
                f"Rank 0 cannot wait for the others at {place.address}: {first_line(error)}. Choose another port (MASTER_PORT; "
                "--master-port)"
            ) from error
        raise _not_reached(place, first_contact, error) from error


def _wait_for_listener(place: Place, until: float) -> None:
    """Wait until something listens where the store is: the library would write to stderr for each attempt before.

    Raises:
        ConnectionError: nothing does.
    """
    while True:
        try:
            socket.create_connection((place.host, place.port), max(1.0, until - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(str(error)) from error
        time.sleep(_RETRY_SECONDS)


def _within(function: Callable[[], Result], seconds: float) -> Result:
    """Return what a function returns that may block without an end, such as a connection to what never answers.

    Raises:
        TimeoutError: it has not returned in time; its thread is left to itself.
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


def _refused(place: Place, address: str, reason: str) -> WorkerError:
    return WorkerError(
        f"Rank {place.rank} is not let in at {address}: {reason}. Give every worker a rank of its own, and all the same "
        "number of workers",
        comes_again=True,
    )


def _not_reached(place: Place, seconds: float, error: Exception) -> WorkerError:
    return WorkerError(
        f"Rank {place.rank} has not reached {place.keeper} at {place.address} in {seconds:g} s: {first_line(error)}. See whether "
        "it runs, and whether MASTER_ADDR and MASTER_PORT are reached from this machine"
    )


def _interface_towards(host: str, port: int) -> str | None:
    """Return the name of the network interface that packets to ``host`` leave by; None if that is unknown."""
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
