"""How a worker comes to be one of a run: by what its launcher sets, or in a process group that its script has made already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from burnish.distributed.connection import environment, rendezvous, shared_memory
from burnish.distributed.connection.backends import Backends, check_nccl
from burnish.distributed.connection.environment import Place
from burnish.distributed.connection.process_group import GRACE_SECONDS, ProcessGroup
from burnish.distributed.connection.rendezvous import FIRST_CONTACT_SECONDS, TIMEOUT_SECONDS, Meeting
from burnish.distributed.connection.watch import Watch, first_line
from burnish.errors import ConfigurationError, EngineError, WorkerError
from burnish.settings import is_natural_text

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

    Without a group, and unless ``torch.distributed`` is already initialized, the environment tells who they are: that of torchrun
    (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``), of srun, or of mpirun, which needs mpi4py unless
    ``MASTER_ADDR`` and ``MASTER_PORT`` are set. burnish then initializes ``torch.distributed``, and ``close`` ends it.

    Args:
        device: ``cpu``, or ``cuda`` (NCCL; each worker of a machine uses the GPU of its ``LOCAL_RANK``), or ``cuda:1``.
        group: a process group of ``torch.distributed``; None is its default group, if there is one.
        timeout: seconds that an exchange may take, and that a worker may be silent.
        first_contact: seconds to wait for the others to come.
        share_memory: let workers of one machine exchange through memory, if all of them can. If it is False on one of them, or
            ``BURNISH_SHARED_MEMORY=off`` is in its environment, ``torch.distributed`` carries everything.

    Returns:
        The group; a group of one worker if no launcher started several. A process that has joined and not left gets the same
        group again.

    Raises:
        ConfigurationError: the environment is incomplete or contradicts itself, others may enter the folder, a time is not
            positive, or this process is not in ``group``.
        EngineError: PyTorch is missing, or lacks what the device needs.
        WorkerError: the others did not come, or cannot be reached.
    """
    for name, seconds in {"timeout": timeout, "first_contact": first_contact}.items():
        if not seconds > 0:
            raise ConfigurationError(f"{name}={seconds!r}: give a number of seconds above 0")
    global _joined, _joined_in
    if group is None and _joined is not None and not _joined.is_closed:
        group = _joined_in
    elif group is None:
        group = _default_group()
    place = Place.of_environment() if group is None else _place_in(group)
    own_device = _own_device(device, place.local_rank)
    if place.world_size == 1:
        return ProcessGroup(0, 1, own_device, timeout, first_contact)
    if _joined is not None and not _joined.is_closed and _joined_in is group and _joined.device == own_device:
        return _joined
    rendezvous.torch_distributed()
    if own_device == "cpu" and share_memory:
        shared_memory.prepare()  # before workers wait for each other
    _joined = _connected(place, group, own_device, timeout, first_contact, share_memory)
    _joined_in = group
    return _joined


def _connected(place: Place, group: Any, device: str, timeout: float, first_contact: float, share_memory: bool) -> ProcessGroup:
    """Meet the other workers, and find out by what they exchange."""
    distributed = rendezvous.torch_distributed()
    if device != "cpu":
        check_nccl()
        import torch

        torch.cuda.set_device(device)
    meeting = rendezvous.meet(place, first_contact) if group is None else rendezvous.meet_in_group(group, first_contact)
    rendezvous.use_interface(meeting, place)
    limit = timeout + GRACE_SECONDS
    ends: Callable[[bool], None] | None = None
    backends = None
    if group is None and not place.folder and not distributed.is_initialized():
        _initialize(meeting, place, device, limit)
        ends = _end_default_group
    if group is None and not place.folder:
        group = distributed.group.WORLD
    if group is not None:
        backends = Backends.of_group(group, meeting.torch_store, device, limit)
    joined: ProcessGroup

    def abort() -> None:
        joined.abort()
        distributed.distributed_c10d._abort_process_group()

    watch = Watch(
        meeting.store,
        meeting.address,
        meeting.keeper,
        place.rank,
        [str(location) for location in meeting.locations],
        timeout,
        None if device == "cpu" else abort,  # a wait on GPUs blocks a thread within the driver; those on CPUs look up
        meeting.has_ended,
    )
    joined = ProcessGroup(
        place.rank,
        place.world_size,
        device,
        timeout,
        first_contact,
        meeting,
        backends,
        watch,
        share_memory=share_memory,
    )
    watch.start()
    if ends is not None:
        joined.at_close(ends)
    joined.connect()
    return joined


def _initialize(meeting: Meeting, place: Place, device: str, limit: float) -> None:
    """Make the default group of ``torch.distributed`` of the workers that have met."""
    distributed = rendezvous.torch_distributed()
    try:
        distributed.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=meeting.torch_store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=limit),
        )
    except RuntimeError as error:
        raise WorkerError(
            f"The workers have met at {place.address}, but rank {place.rank} cannot connect with another: {first_line(error)}. "
            f"Name the network interface that they reach each other by in {rendezvous.INTERFACES[0]}, and open the ports between "
            "the machines"
        ) from error


def _end_default_group(broken: bool) -> None:
    """End what ``_initialize`` began; if the run has failed, what is under way ends too, and nobody is waited for."""
    distributed = rendezvous.torch_distributed()
    if not distributed.is_initialized():
        return
    try:
        if broken:
            distributed.distributed_c10d._abort_process_group()
        else:
            distributed.destroy_process_group()
    except RuntimeError:
        pass  # the connections that it would end are broken


def _default_group() -> Any:
    """The default group of ``torch.distributed`` if the script has made it."""
    module = sys.modules.get("torch.distributed")
    return module.group.WORLD if module is not None and module.is_available() and module.is_initialized() else None


def is_torch_group(group: Any) -> bool:
    """Whether this is a process group of ``torch.distributed`` that this process is of."""
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and isinstance(group, module.ProcessGroup)


def _place_in(group: Any) -> Place:
    if not is_torch_group(group):
        raise ConfigurationError(
            f"group={group!r} is no process group of torch.distributed that this process is of: give what "
            "torch.distributed.new_group() returned to its members, or None for the default group"
        )
    local_rank = environment.written_local_rank() if environment.is_worker() else str(group.rank())
    return Place(group.rank(), group.size(), int(local_rank) if is_natural_text(local_rank) else group.rank())


def has_joined() -> bool:
    """Whether this process has ever come to the other workers of a run."""
    return _joined is not None


def _own_device(device: str, local_rank: int) -> str:
    """Return the device of this worker, such as ``cuda:1`` for ``cuda``."""
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
