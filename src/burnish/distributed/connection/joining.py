"""How a worker comes to be one of a run: by the environment that a launcher sets; without it, it is alone."""

from __future__ import annotations

from collections.abc import Callable

from burnish.distributed.connection import rendezvous, shared_memory
from burnish.distributed.connection.nccl import Nccl
from burnish.distributed.connection.process_group import GRACE_SECONDS, ProcessGroup
from burnish.distributed.connection.rendezvous import FIRST_CONTACT_SECONDS, TIMEOUT_SECONDS
from burnish.distributed.connection.watch import Watch
from burnish.errors import ConfigurationError, EngineError
from burnish.settings import is_natural_text

_joined: ProcessGroup | None = None


def join(
    device: str = "cpu",
    *,
    timeout: float = TIMEOUT_SECONDS,
    first_contact: float = FIRST_CONTACT_SECONDS,
    share_memory: bool = True,
) -> ProcessGroup:
    """Join the other workers of the run, by the environment.

    ``RANK`` and ``WORLD_SIZE`` say who this worker is. Workers of one machine meet in the folder ``BURNISH_MEETING``, which
    nobody else may enter; those of several at ``MASTER_ADDR`` and ``MASTER_PORT``, with the same ``BURNISH_SECRET``.

    Args:
        device: ``cpu``, or ``cuda`` (NCCL; each worker of a machine has the GPU of its ``LOCAL_RANK``), or ``cuda:1``.
        timeout: seconds that an exchange may take, and that a worker may be silent.
        first_contact: seconds that the others may take to come.
        share_memory: let workers of one machine exchange through memory where all of them can; False on one of them, or
            ``BURNISH_SHARED_MEMORY=off`` in its environment, leaves everything to connections.

    Returns:
        The group; of one worker where ``WORLD_SIZE`` is not set, or is 1. A process that has joined and not left gets the group
        that it is in.

    Raises:
        ConfigurationError: the environment is incomplete or contradicts itself, or others may enter the folder, or a time is not
            positive.
        EngineError: PyTorch is missing, or lacks what the device needs.
        WorkerError: the others did not come, or cannot be reached.
    """
    for name, seconds in {"timeout": timeout, "first_contact": first_contact}.items():
        if not seconds > 0:
            raise ConfigurationError(f"{name}={seconds!r}: give a number of seconds above 0")
    place = rendezvous.Place.of_environment()
    if place.world_size == 1:
        return ProcessGroup(0, 1, _own_device(device, place.local_rank), timeout, first_contact)
    global _joined
    distributed = rendezvous.torch_distributed()
    own_device = _own_device(device, place.local_rank)
    if _joined is not None and _joined.device == own_device and not _joined.is_closed:
        return _joined
    if own_device != "cpu" and distributed.is_initialized():
        raise ConfigurationError(
            "torch.distributed is initialized already in this process: close the group that burnish joined earlier (close()), or "
            "leave torch.distributed.init_process_group to burnish"
        )
    _joined = _connected(place, own_device, timeout, first_contact, share_memory)
    _joined.open_lane()
    return _joined


def _connected(place: rendezvous.Place, device: str, timeout: float, first_contact: float, share_memory: bool) -> ProcessGroup:
    """Meet the other workers, and connect with them."""
    if device == "cpu" and share_memory:
        shared_memory.prepare()  # before workers wait for each other
    meeting = rendezvous.meet(place, first_contact)
    limit = timeout + GRACE_SECONDS
    exchange = meeting.connect_all(limit)
    gpus = None if device == "cpu" else Nccl.open(meeting, device, limit)
    watch = Watch(meeting.open_store, place.address, place.rank, place.world_size, timeout, _abort_on_cuda(gpus))
    watch.start()
    return ProcessGroup(
        place.rank,
        place.world_size,
        device,
        timeout,
        first_contact,
        meeting,
        exchange,
        gpus,
        watch,
        share_memory=share_memory,
    )


def has_joined() -> bool:
    """Whether this process has ever come to the other workers of a run."""
    return _joined is not None


def _abort_on_cuda(gpus: Nccl | None) -> Callable[[], None] | None:
    """What ends a wait that blocks a thread within the driver, when a worker is gone; nothing on CPU, where waits look up."""
    return None if gpus is None else lambda: gpus.close(broken=True)


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
