"""Joining a run: workers meet in a store (of the launcher, rank 0 or a process group) or in a folder, and wait for each other."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

from burnish.distributed.connection import environment, shared_memory, store
from burnish.distributed.connection.environment import Place
from burnish.distributed.connection.process_group import GRACE_SECONDS, Backends, ProcessGroup
from burnish.distributed.connection.store import FIRST_CONTACT_SECONDS, TIMEOUT_SECONDS, first_line, ranks, torch_distributed
from burnish.errors import ConfigurationError, EngineError, WorkerError
from burnish.settings import is_natural_text

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACKS = {"linux": "lo", "darwin": "lo0"}
_POLL_SECONDS = 0.02
_RETRY_SECONDS = 0.2
# Extra time for a connection: the library waits forever for a silent peer.
_SILENT_SECONDS = 3.0
_SIOCGIFADDR = 0x8915

# Keeps the store's server alive until rank 0's process ends, because others may still ask it; C++ does not.
_stores: dict[str, Any] = {}
_meetings: Counter[str] = Counter()
_joined: ProcessGroup | None = None
_joined_in: Any = None


def join(
    device: str = "cpu",
    *,
    group: Any = None,
    timeout: float = TIMEOUT_SECONDS,
    first_contact: float = FIRST_CONTACT_SECONDS,
    share_memory: bool = True,
) -> ProcessGroup:
    """Join the other workers of the run, over ``torch.distributed``.

    Without a group, and unless ``torch.distributed`` is initialized, the environment identifies them: that of torchrun (``RANK``,
    ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``), srun, or mpirun, which needs mpi4py unless ``MASTER_ADDR``
    and ``MASTER_PORT`` are set. burnish then initializes ``torch.distributed``, and ``close`` ends it.

    Args:
        device: ``cpu``, or ``cuda`` (NCCL; each worker uses the GPU of its ``LOCAL_RANK``), or ``cuda:1``.
        group: a process group of ``torch.distributed``; None is its default group, if there is one.
        timeout: seconds until an exchange, or a silent worker, counts as failed.
        first_contact: seconds to wait for the others.
        share_memory: True to let workers of one machine exchange through memory. If one of them passes False, or has
            ``BURNISH_SHARED_MEMORY=off`` in its environment, all exchanges use ``torch.distributed``.

    Returns:
        The group, with one worker if no launcher started several. A process that has already joined gets the same one again.

    Raises:
        ConfigurationError: the environment is incomplete or contradictory, other users can enter the folder, a time is not
            positive, or this process is not in ``group``.
        EngineError: PyTorch is missing, or lacks support for the device.
        WorkerError: the others did not come, or cannot be reached.
    """
    for name, seconds in {"timeout": timeout, "first_contact": first_contact}.items():
        if not seconds > 0:
            raise ConfigurationError(f"{name}={seconds!r}: give a number of seconds above 0")
    global _joined, _joined_in
    module = sys.modules.get("torch.distributed")
    if group is None and _joined is not None and not _joined.is_closed:
        group = _joined_in
    elif group is None and module is not None and module.is_available() and module.is_initialized():
        group = module.group.WORLD
    place = Place.of_environment() if group is None else _place_in(group)
    own_device = _own_device(device, place.local_rank)
    if place.world_size == 1:
        return ProcessGroup(0, 1, own_device, timeout, first_contact)
    if _joined is not None and not _joined.is_closed and _joined_in is group and _joined.device == own_device:
        return _joined
    distributed = torch_distributed()
    if own_device == "cpu" and share_memory:
        shared_memory.prepare()  # slow, so do it before the others wait
    elif own_device != "cpu":
        if not distributed.is_nccl_available():
            raise EngineError(
                "This PyTorch has no NCCL, by which GPUs exchange tensors: install a build for CUDA, or train on cpu"
            )
        import torch

        torch.cuda.set_device(own_device)
    meeting = _meet(place, first_contact) if group is None else _meet_in_group(group, first_contact)
    _use_interface(meeting, place)
    limit = timeout + GRACE_SECONDS
    is_initialized_here = group is None and not place.folder and not distributed.is_initialized()
    if is_initialized_here:
        try:
            distributed.init_process_group(
                "gloo" if own_device == "cpu" else "cpu:gloo,cuda:nccl",
                store=meeting.torch_store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=limit),
            )
        except RuntimeError as error:
            raise WorkerError(
                f"The workers have met at {place.address}, but rank {place.rank} cannot connect with another: "
                f"{first_line(error)}. Name the network interface that they reach each other by in {INTERFACES[0]}, and open the "
                "ports between the machines"
            ) from error
    within = distributed.group.WORLD if group is None and not place.folder else group
    joined = ProcessGroup(
        place.rank,
        place.world_size,
        own_device,
        timeout,
        first_contact,
        meeting=meeting,
        backends=None if within is None else Backends.of_group(within, meeting.torch_store, own_device, limit),
        share_memory=share_memory,
        on_close=_end_default_group if is_initialized_here else None,
    )
    joined.connect()
    _joined, _joined_in = joined, group
    return joined


def has_joined() -> bool:
    return _joined is not None


def _end_default_group(broken: bool) -> None:
    distributed = torch_distributed()
    if distributed.is_initialized():
        with suppress(RuntimeError):  # the connections to end are broken
            if broken:
                distributed.distributed_c10d._abort_process_group()
            else:
                distributed.destroy_process_group()


def is_torch_group(group: Any) -> bool:
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and isinstance(group, module.ProcessGroup)


def _place_in(group: Any) -> Place:
    if not is_torch_group(group):
        raise ConfigurationError(
            f"group={group!r} is no process group of torch.distributed that this process is of: give what "
            "torch.distributed.new_group() returned to its members, or None for the default group"
        )
    local_rank = environment.written()[2] if environment.is_worker() else str(group.rank())
    return Place(group.rank(), group.size(), int(local_rank) if is_natural_text(local_rank) else group.rank())


def _own_device(device: str, local_rank: int) -> str:
    if device == "cpu":
        return device
    import torch

    name, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if name != "cuda" or (index and not is_natural_text(index)):
        raise EngineError(f"device={device!r}: workers exchange tensors on cpu or cuda")
    number = int(index) if index else local_rank
    if number >= torch.cuda.device_count():
        raise EngineError(
            f"device={device!r}: this worker is number {local_rank} of its machine, which has {torch.cuda.device_count()} GPUs: "
            "start as many workers on it as it has GPUs, or train on cpu"
        )
    return f"cuda:{number}"


def _meet(place: Place, first_contact: float) -> store.Meeting:
    until = time.monotonic() + first_contact
    # Workers of one run join equally often; the number keeps a meeting apart from earlier ones.
    key = place.address
    _meetings[key] += 1
    number = str(_meetings[key])
    if place.folder:
        folder = Path(place.folder)
        store.check_folder(folder)
        run, locations = _gathered(store.FolderStore(folder), number, place, until, first_contact, key)
        own = store.FolderStore(folder / run)
        own.folder.mkdir(mode=0o700, exist_ok=True)
        torch_store = torch_distributed().FileStore(str(own.folder / "backends"), place.world_size)
        return store.Meeting(own, torch_store, locations, key, place.keeper)
    while True:
        try:
            if key not in _stores:
                _stores[key] = _open(place, max(1.0, until - time.monotonic()), first_contact)
            run, locations = _gathered(store.TorchStore(_stores[key]), number, place, until, first_contact, key)
            break
        except OSError as error:
            # The store belonged to an ended run; rank 0 of this run has not started its own yet.
            _stores.pop(key, None)
            if time.monotonic() > until:
                raise _not_reached(place, first_contact, error) from error
            time.sleep(_RETRY_SECONDS)
    torch_store = torch_distributed().PrefixStore(run, _stores[key])
    return store.Meeting(store.TorchStore(torch_store), torch_store, locations, key, place.keeper)


def _meet_in_group(group: Any, first_contact: float) -> store.Meeting:
    # A group implemented in Python does not expose its name and store.
    known = torch_distributed().distributed_c10d
    hall = known._get_process_group_store(group)
    place = Place(group.rank(), group.size())
    address = f"the process group '{known._get_process_group_name(group)}'"
    try:
        # The store does the counting, because a process may belong to several groups.
        number = f"burnish.{hall.add(f'burnish.meetings/{place.rank}', 1)}"
        until = time.monotonic() + first_contact
        run, locations = _gathered(store.TorchStore(hall), number, place, until, first_contact, address)
    except (OSError, RuntimeError) as error:
        raise WorkerError(f"Rank {place.rank} cannot reach the store of {address}: {first_line(error)}") from error
    torch_store = torch_distributed().PrefixStore(run, hall)
    return store.Meeting(
        store.TorchStore(torch_store), torch_store, locations, address, "the process that keeps the store", group
    )


def _gathered(
    hall: store.Store, number: str, place: Place, until: float, seconds: float, address: str
) -> tuple[str, list[store.Location]]:
    """Wait until all workers have come; return the run's name, and their locations by rank.

    A store may hold entries of other runs. Each worker therefore enters a random token, and enters it again under rank 0's token;
    rank 0 answers with a new name. If two workers have the same rank, the later one counts. (A count of starts would not work:
    each agent of torchrun counts its own.)
    """
    token = secrets.token_hex(16)
    hall.set(f"{number}/came/{place.rank}", json.dumps([token, astuple(store.Location.own()), place.world_size]))
    looks: dict[str, int] = {}
    while True:
        own, first = (_entry(hall, number, rank) for rank in (place.rank, 0))
        if own is not None and own[0] != token:
            raise _refused(place, address, f"another process has come as rank {place.rank}")
        if place.rank == 0:
            hall.add(f"{number}/{token}/looks", 1)
        if first is not None and first[2] != place.world_size:
            # A rank 0 that no longer looks belongs to an earlier run with another number of workers.
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
            return name, [store.Location(*location) for _, location, _ in of_run]
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


def _entry(hall: store.Store, number: str, rank: int) -> list[Any] | None:
    text = hall.get(f"{number}/came/{rank}")
    if text is None:
        return None
    token, location, world_size = json.loads(text)
    return None if store.Location(*location).has_ended else [token, location, world_size]


def _use_interface(meeting: store.Meeting, place: Place) -> None:
    """Let backends use the loopback on a single machine, otherwise the interface that leads to the store, unless the user set
    one.

    Gloo's default is the address of the host name, often a loopback that other machines cannot reach.
    """
    if len({location.system for location in meeting.locations}) == 1:
        for variable in INTERFACES if sys.platform in LOOPBACKS else ():
            os.environ.setdefault(variable, LOOPBACKS[sys.platform])
    elif sys.platform == "linux" and place.host:
        import fcntl

        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((place.host, place.port))
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with suppress(OSError):
                    if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                        os.environ.setdefault(INTERFACES[0], name)
                        return


def _open(place: Place, seconds: float, first_contact: float) -> Any:
    is_server = place.rank == 0 and not place.launcher_keeps_store
    outcome: Future[Any] = Future()

    def open_store() -> None:
        arguments = (place.host, place.port, None, is_server, timedelta(seconds=seconds))
        try:
            outcome.set_result(torch_distributed().TCPStore(*arguments, wait_for_workers=False, multi_tenant=is_server))
        except BaseException as error:
            outcome.set_exception(error)

    try:
        if not is_server:
            _wait_for_listener(place, time.monotonic() + seconds)
        # A connection to a silent peer blocks forever, so it runs in a thread that can be abandoned.
        threading.Thread(target=open_store, name="burnish-open", daemon=True).start()
        return outcome.result(seconds + _SILENT_SECONDS)
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
    """Wait until something listens at the store's address: the library would print an error for each failed attempt."""
    while True:
        try:
            socket.create_connection((place.host, place.port), max(1.0, until - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(str(error)) from error
        time.sleep(_RETRY_SECONDS)


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
