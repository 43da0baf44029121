"""The workers of a run and their exchanges; every exchange has a name in errors and a timeout.

Workers of one machine exchange by ``shared_memory``, others by ``Backends``; with several machines, first within each machine,
then between the first workers. Sums are then in rank order, with the same bits for the same layout. Nothing is pickled.
"""

from __future__ import annotations

import atexit
import copy
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from burnish.distributed.connection import shared_memory
from burnish.distributed.connection.shared_memory import DONE, LOOK_UP_SECONDS, Memory, SharedBuffer, SharedRows, Work
from burnish.distributed.connection.store import FIRST_CONTACT_SECONDS, TIMEOUT_SECONDS, Meeting, first_line, torch_distributed
from burnish.distributed.connection.watch import SEARCH_SECONDS, Watch
from burnish.engines.communicator import Pending
from burnish.errors import ConfigurationError, EngineError, WorkerError, comes_again
from burnish.validation import is_whole

if TYPE_CHECKING:
    import torch

# Time that an exchange runs beyond its timeout, so that late workers are identified first.
GRACE_SECONDS = SEARCH_SECONDS + 1
# Interval of polling the store.
ASK_SECONDS = 0.002
OPERATIONS = ("sum", "min", "max")
SMALL_BYTES = 2**15
"""Up to this size, parts for single workers go to all: one exchange instead of two, because latency dominates."""


class ProcessGroup:
    """Workers that exchange tensors: all of a run, or some of them (``split``), created by ``burnish.distributed.join``.

    All workers call its methods in the same order. The methods raise WorkerError if a worker is gone or late; ``name`` is for
    messages.

    Attributes:
        rank: rank of this worker, from 0 to ``world_size`` - 1.
        world_size: number of workers.
        device: device of the exchanged tensors: ``cpu``, or this worker's GPU.
        timeout: timeout of an exchange, in seconds.
        patience: timeout of slower events, in seconds: the first contact, a checkpoint that rank 0 writes.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: str = "cpu",
        timeout: float = TIMEOUT_SECONDS,
        patience: float = FIRST_CONTACT_SECONDS,
        *,
        meeting: Meeting | None = None,
        backends: Backends | None = None,
        share_memory: bool = True,
        on_close: Callable[[bool], None] | None = None,
    ):
        self.rank, self.world_size, self.device = rank, world_size, device
        self.timeout, self.patience, self.shares_memory = timeout, patience, share_memory
        self.memory: Memory | None = None
        self.machines: Machines | None = None
        self._meeting, self._backends, self._on_close = meeting, backends, on_close
        self._members: Sequence[int] = range(world_size)  # ranks in the whole run, by rank in this group
        self._name, self._is_part, self._counts = "run", False, True
        self._parts = self._barriers = self._times_told = 0
        self._groups: list[ProcessGroup] = []
        self._watch: Watch | None = None
        if meeting is not None:
            # A wait on GPUs blocks inside the driver and must be aborted; waits on CPUs poll.
            self._watch = Watch(meeting, rank, timeout, None if device == "cpu" else self._abort_all)
            atexit.register(self.close)

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum", *, name: str = "values") -> torch.Tensor:
        """Replace ``tensor``, contiguous and of the same form on all workers, by its ``sum``, ``min`` or ``max``; return it."""
        self.begin_all_reduce(tensor, operation, name=name).wait()
        return tensor

    def begin_all_reduce(self, tensor: torch.Tensor, operation: str = "sum", *, name: str = "values") -> Pending:
        """Begin ``all_reduce``; ``tensor`` has the result after ``wait``."""
        if operation not in OPERATIONS:
            raise ConfigurationError(f"operation={operation!r}: give one of {', '.join(OPERATIONS)}")
        if self.world_size == 1:
            return DONE
        if (carrier := self._carrier(tensor)) is not None:
            return carrier.all_reduce(tensor, operation, name)
        if not adds_up(tensor):
            shared_memory.combine(self.all_gather_rows(tensor, name=name), operation, tensor)
            return DONE
        return self._begin(lambda backends: backends.all_reduce(tensor, operation), f"all-reduce of {name}", tensor)

    def all_gather(self, tensor: torch.Tensor, *, name: str = "values") -> list[torch.Tensor]:
        """Return the tensors of all workers, of the same shape and dtype, in rank order."""
        return list(self.all_gather_rows(tensor, name=name).unbind())

    def all_gather_rows(self, tensor: torch.Tensor, *, name: str = "values") -> torch.Tensor:
        if self.world_size == 1:
            return tensor.unsqueeze(0).clone()
        rows, tensor = tensor.new_empty((self.world_size, *tensor.shape)), tensor.contiguous()
        if (carrier := self._carrier(tensor)) is not None:
            carrier.all_gather(rows, tensor, name)
        else:
            self._begin(lambda backends: backends.all_gather(rows, tensor), f"all-gather of {name}", tensor).wait()
        return rows

    def begin_all_to_all(
        self, tensor: torch.Tensor, sizes: Sequence[int] | None = None, *, name: str = "values"
    ) -> tuple[torch.Tensor, Pending]:
        """Begin to send each worker a row, or with ``sizes`` a part, of ``tensor``; return the received ones, [workers, ...]."""
        if self.world_size == 1:
            return (tensor if sizes is None else tensor.unsqueeze(0)).clone(), DONE
        gives = [tensor[0].numel()] * self.world_size if sizes is None else list(sizes)
        shape = tensor.shape[1:] if sizes is None else (gives[self.rank],)
        received = tensor.new_empty((self.world_size, *shape))
        return received, self._begin_all_to_all(received, tensor, [gives] * self.world_size, name)

    def all_to_all_uneven(self, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], *, name: str = "values") -> torch.Tensor:
        """Exchange parts of vectors; ``sizes`` has the number of elements that each worker sends to each, in order."""
        if self.world_size == 1:
            return tensor.clone()
        import torch

        largest = max(map(sum, sizes))
        if not largest:
            return tensor.new_empty(0)
        if largest * tensor.itemsize <= SMALL_BYTES:
            rows = self.all_gather_rows(torch.nn.functional.pad(tensor, (0, largest - len(tensor))), name=name)
            firsts = [sum(row[: self.rank]) for row in sizes]
            return torch.cat([row[first : first + own[self.rank]] for row, first, own in zip(rows, firsts, sizes, strict=True)])
        received = tensor.new_empty(sum(row[self.rank] for row in sizes))
        self._begin_all_to_all(received, tensor, sizes, name).wait()
        return received

    def _begin_all_to_all(
        self, received: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], name: str
    ) -> Pending:
        if isinstance(carrier := self._carrier(tensor), Memory):
            carrier.all_to_all(received, tensor, sizes, name)
            return DONE
        gets, gives = [row[self.rank] for row in sizes], sizes[self.rank]
        return self._begin(lambda backends: backends.all_to_all(received, gets, tensor, gives), f"all-to-all of {name}", tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, *, name: str = "values") -> torch.Tensor:
        """Replace ``tensor`` by the one of rank ``source``, of the same shape and dtype; return it."""
        if isinstance(carrier := self._carrier(tensor), Memory):
            carrier.broadcast(tensor, source, name)
        elif self.world_size > 1:
            self._begin(lambda backends: backends.broadcast(tensor, source), f"broadcast of {name}", tensor).wait()
        return tensor

    def barrier(self, *, name: str = "the others") -> None:
        """Wait for all workers, up to ``patience`` seconds, longer than for an exchange."""
        if self.world_size == 1:
            return
        self.count(f"wait for {name}")
        self._barriers += 1
        key = f"{self._name}:{self._barriers}"
        if self._watch is not None and not self._watch.wait_for_all(key, self.world_size, self.patience):
            self.check()
            raise self.late(f"wait for {name}", self.patience)

    def all_gather_bytes(self, content: bytes, *, name: str = "values") -> list[bytes]:
        """Return the bytes of all workers, of any length, in rank order."""
        if self.world_size == 1:
            return [content]
        import torch

        length = torch.tensor([len(content)], dtype=torch.int64)
        lengths = [int(entry.item()) for entry in self.all_gather(length, name=f"the size of {name}")]
        padded = bytearray(content.ljust(max(1, *lengths), b"\0"))
        gathered = self.all_gather(torch.frombuffer(padded, dtype=torch.uint8), name=name)
        return [entry[:size].numpy().tobytes() for entry, size in zip(gathered, lengths, strict=True)]

    def all_gather_json(self, value: Any, *, name: str = "values") -> list[Any]:
        """Return the JSON-compatible values of all workers, in rank order."""
        if self.world_size == 1 or self.memory is not None or self._backends is not None:
            return [json.loads(content) for content in self.all_gather_bytes(json.dumps(value).encode(), name=name)]
        # Use the store until they have agreed on another channel.
        name = f"exchange of {name}"
        self.count(name)
        assert self._meeting is not None
        self._times_told += 1
        store, prefix = self._meeting.store, f"told/{self._name}/{self._times_told}"
        values: dict[int, Any] = {self.rank: value}
        until = time.monotonic() + self.timeout
        try:
            store.set(f"{prefix}/{self.rank}", json.dumps(value))
            while len(values) < self.world_size:
                for rank in set(range(self.world_size)) - values.keys():
                    if (text := store.get(f"{prefix}/{rank}")) is not None:
                        values[rank] = json.loads(text)
                self.check()
                if time.monotonic() > until:
                    raise self.late(name, self.timeout)
                time.sleep(ASK_SECONDS)
        except OSError as error:
            raise self.broken(name, first_line(error)) from error
        return [values[rank] for rank in range(self.world_size)]

    def shared_buffer(self, dtype: torch.dtype, count: int, *, name: str = "values") -> SharedBuffer | MachinesBuffer | None:
        carrier = self.memory or self.machines
        return None if carrier is None else carrier.shared_buffer(dtype, count, name)

    def shared_rows(self, count: int, *, name: str = "values") -> SharedRows | None:
        return None if self.memory is None else self.memory.shared_rows(count, name)

    def split(self, size: int) -> ProcessGroup:
        """Return this worker's group of ``size`` consecutive ranks; the last group may be smaller."""
        if not is_whole(size) or size < 1:
            raise ConfigurationError(f"size={size!r}: give a whole number of workers, 1 or more")
        return self if size >= self.world_size else self.apart(size)

    def apart(self, size: int) -> ProcessGroup:
        """Like ``split``, but always with separate connections; ``twin`` has the same workers."""
        first = self.rank // size * size
        self._parts += 1
        group = self._part(range(first, min(first + size, self.world_size)), f"{self._parts}.{first}", counts=self._counts)
        if group.world_size > 1 and self._meeting is not None:
            self.count("connection of a group")
            group.connect()
        return group

    def twin(self) -> ProcessGroup:
        return self if self.world_size == 1 else self.apart(self.world_size)

    def _part(self, ranks: Sequence[int], name: str, counts: bool = False) -> ProcessGroup:
        group = copy.copy(self)
        group.rank, group.world_size = ranks.index(self.rank), len(ranks)
        group.memory = group.machines = group._backends = group._on_close = None
        group._members = [self._members[rank] for rank in ranks]
        group._name, group._is_part, group._counts = f"{self._name}/{name}", True, counts
        group._parts = group._barriers = group._times_told = 0
        group._groups = []
        self._groups.append(group)
        return group

    def connect(self, by_memory: bool = True) -> None:
        if self.device == "cpu" and by_memory:
            self.memory = Memory.open(self)
            self.machines = self._by_machine() if self.memory is None else None
        if self.memory is None and self.machines is None and self._meeting is not None and self.world_size > 1:
            self._connected()

    def _by_machine(self) -> Machines | None:
        """Connect the workers in two levels; None if one machine has all, or workers of one machine share no memory."""
        machines: dict[str, list[int]] = {}
        for rank, member in enumerate(self._members if self._meeting is not None else ()):
            assert self._meeting is not None
            machines.setdefault(self._meeting.locations[member].system, []).append(rank)
        if not 1 < len(machines) < self.world_size:
            return None
        if not all(self.all_gather_json(self.shares_memory, name="who shares memory")):
            return None
        ranks = list(machines.values())
        own = next(each for each in ranks if self.rank in each)
        inside = self._part(own, f"machine.{own[0]}")
        inside.connect()
        if not all(self.all_gather_json(inside.world_size == 1 or inside.memory is not None, name="who has memory to share")):
            return None
        between = self._part([each[0] for each in ranks], "machines") if self.rank == own[0] else None
        if between is not None:
            between.connect(by_memory=False)
        return Machines(self, ranks, inside, between)

    def _connected(self) -> Backends:
        if self._backends is None:
            assert self._meeting is not None
            store = torch_distributed().PrefixStore(self._name, self._meeting.torch_store)
            limit = self.timeout + GRACE_SECONDS
            try:
                within = Backends.within(self._meeting.group, self._members, store, self.device, limit)
                self._backends = within or Backends.open(store, self.rank, self.world_size, self.device, limit)
            except RuntimeError as error:
                raise self.broken("connection of a group", first_line(error)) from error
        return self._backends

    @property
    def is_closed(self) -> bool:
        return self.world_size > 1 and self._meeting is None

    def check(self) -> None:
        if self._watch is not None and (cause := self._watch.cause()) is not None:
            raise self._ended(cause, self._watch.comes_again)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this worker stops, unless the error came from them."""
        if self._watch is not None and not isinstance(error, WorkerError):
            cause = f"rank {self._members[self.rank]} stopped: {first_line(error) or type(error).__name__}"
            self._watch.declare(cause, comes_again(error))

    def close(self) -> None:
        """Leave the run. The others may finish, but without this worker."""
        if self._meeting is None or self._is_part:
            return
        atexit.unregister(self.close)
        shared_memory.leave()
        broken = self._watch is None or self._watch.cause() is not None
        if self._watch is not None:
            self._watch.stop()
        self._leave(broken)

    def _abort_all(self) -> None:
        self.abort()
        torch_distributed().distributed_c10d._abort_process_group()

    def abort(self) -> None:
        for group in self._groups:
            group.abort()
        if self._backends is not None:
            self._backends.abort()

    def _leave(self, broken: bool) -> None:
        if broken:
            self.abort()
        for group in self._groups:
            group._leave(False)
        self.memory = self.machines = self._backends = self._meeting = None
        self._groups.clear()
        if self._on_close is not None:
            self._on_close(broken)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _carrier(self, tensor: torch.Tensor) -> Memory | Machines | None:
        return (self.memory or self.machines) if tensor.device.type == "cpu" else None

    def _begin(self, begin: Callable[[Backends], Any], name: str, tensor: torch.Tensor) -> Pending:
        self.count(name)
        backends = self._connected()
        try:
            work = begin(backends)
        except RuntimeError as error:
            raise self.broken(name, first_line(error)) from error

        def finish() -> None:
            began = time.monotonic()
            while tensor.device.type == "cpu" and not work.is_completed():
                with suppress(RuntimeError):  # a timeout; other errors are raised again below
                    work.wait(timedelta(seconds=LOOK_UP_SECONDS))
                    break  # some backends never report completion
                if work.is_completed():
                    break
                self.check()
                if time.monotonic() > began + self.timeout:
                    raise self.late(name, self.timeout)
            try:
                work.wait()
            except RuntimeError as error:
                raise self.broken(name, first_line(error)) from error

        return DONE if work is None else Work(finish)

    def count(self, name: str) -> None:
        """Note that this worker has reached an exchange; raise an error if it has left, or another worker is gone."""
        if self._meeting is None:
            raise EngineError(f"The {name}: this worker has left the group of workers (close): join it again, in a new run")
        self.check()
        if self._watch is not None and self._counts:
            self._watch.operations += 1

    def broken(self, name: str, reason: str, ended: Sequence[int] = ()) -> WorkerError:
        """Find out which workers are gone, tell all, and return the error to raise. ``ended`` are known to have ended."""
        known = {self._members[rank] for rank in ended}
        if self._meeting is not None:
            known |= {rank for rank, location in enumerate(self._meeting.locations) if location.has_ended}
        if self._watch is not None and (cause := self._watch.search(known)) is not None:
            return self._ended(cause, self._watch.comes_again)
        return self._told(f"the connection to another worker broke in the {name}: {reason}")

    def late(self, name: str, limit: float) -> WorkerError:
        """Find out which workers are late for an exchange, tell all, and return the error to raise."""
        who = "another worker has not come to it" if self._watch is None else self._watch.who_is_late()
        if self._watch is not None and who == self._watch.cause():
            return self._ended(who, self._watch.comes_again)  # another worker has reported the cause
        return self._told(f"The {name} is not done after {limit:g} s: {who}")

    def at_odds(self, name: str) -> WorkerError:
        """Tell all that the workers disagree about an exchange; return the error to raise."""
        return self._told(f"the workers have come to the {name} with different sizes, dtypes or operations")

    def _told(self, cause: str) -> WorkerError:
        if self._watch is not None:
            self._watch.declare(cause)
        return self._ended(cause)

    def _ended(self, cause: str, comes_again: bool = False) -> WorkerError:
        return WorkerError(
            f"{cause[0].upper()}{cause[1:]}. Rank {self._members[self.rank]} stops too: resume from the last checkpoint, "
            "with as many workers as there are",
            comes_again,
        )


@dataclass(frozen=True)
class Backends:
    """Process groups of ``torch.distributed``; a method begins an exchange and returns its work to wait for, or None."""

    cpu: Any
    gpu: Any
    owned: Sequence[Any]

    @classmethod
    def open(cls, store: Any, rank: int, size: int, device: str, limit: float) -> Backends:
        """Connect some workers, who call this together, for exchanges of up to ``limit`` seconds, or raise RuntimeError."""
        distributed = torch_distributed()
        seconds, gpu = timedelta(seconds=limit), None
        if device != "cpu":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = seconds
            gpu = distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl", store), rank, size, options)
        cpu = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), rank, size, seconds)
        return cls(cpu, gpu, [each for each in (cpu, gpu) if each is not None])

    @classmethod
    def of_group(cls, group: Any, store: Any, device: str, limit: float) -> Backends:
        has = _names_of(group)
        cpu = group if "cpu" in has else None
        gpu = group if has.get("cuda", "gloo") != "gloo" else None
        if cpu is not None and (device == "cpu" or gpu is not None):
            return cls(cpu, gpu, [])
        own = cls.open(store, group.rank(), group.size(), "cpu" if gpu is not None else device, limit)
        return cls(cpu or own.cpu, gpu or own.gpu, own.owned)

    @classmethod
    def within(cls, group: Any, members: Sequence[int], store: Any, device: str, limit: float) -> Backends | None:
        if group is None or _names_of(group).get("cpu" if device == "cpu" else "cuda", "gloo") in ("gloo", "nccl", "mpi"):
            return None  # ``open`` connects only these workers
        distributed = torch_distributed()
        ranks = distributed.get_process_group_ranks(group)
        part = distributed.new_group(
            [ranks[member] for member in members],
            timedelta(seconds=limit),
            distributed.distributed_c10d.get_backend_config(group),
            use_local_synchronization=True,
        )
        made = cls.of_group(part, store, device, limit)
        return replace(made, owned=[part, *made.owned])

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> Any:
        if not tensor.numel():
            return None
        distributed = torch_distributed()
        options = distributed.AllreduceOptions()
        options.reduceOp = getattr(distributed.ReduceOp, operation.upper())
        return self._of(tensor).allreduce([tensor], options)

    def all_gather(self, rows: torch.Tensor, tensor: torch.Tensor) -> Any:
        if not tensor.numel():
            return None
        return self._of(tensor).allgather(
            [list(shared_memory.as_bytes(rows).view(len(rows), -1).unbind())], [shared_memory.as_bytes(tensor)]
        )

    def all_to_all(self, received: torch.Tensor, gets: Sequence[int], given: torch.Tensor, gives: Sequence[int]) -> Any:
        sizes = [[count * given.itemsize for count in counts] for counts in (gets, gives)]
        return self._of(given).alltoall_base(shared_memory.as_bytes(received), shared_memory.as_bytes(given), *sizes)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Any:
        if not tensor.numel():
            return None
        options = torch_distributed().BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._of(tensor).broadcast([shared_memory.as_bytes(tensor)], options)

    def abort(self) -> None:
        for each in self.owned:
            with suppress(RuntimeError):
                each.abort()

    def _of(self, tensor: torch.Tensor) -> Any:
        return self.cpu if tensor.device.type == "cpu" else self.gpu


def _names_of(group: Any) -> dict[str, str]:
    return dict(entry.split(":") for entry in torch_distributed().distributed_c10d.get_backend_config(group).split(","))


def adds_up(tensor: torch.Tensor) -> bool:
    """True if backends can sum this dtype; they can gather any."""
    import torch

    return tensor.dtype not in (torch.int16, torch.bool)


@dataclass(eq=False)
class Machines:
    """The workers of a group by machine: ``ranks`` of each, the group ``inside`` this one, and ``between`` their first
    workers.
    """

    group: ProcessGroup
    ranks: Sequence[Sequence[int]]
    inside: ProcessGroup
    between: ProcessGroup | None
    under_way: list[MachinesBuffer] = field(default_factory=list)

    def all_reduce(self, tensor: torch.Tensor, operation: str, name: str) -> Pending:
        self.group.count(f"all-reduce of {name}")
        self.inside.all_reduce(tensor, operation, name=name)
        if self.between is not None:
            self.between.all_reduce(tensor, operation, name=name)
        self.inside.broadcast(tensor, name=name)
        return DONE

    def all_gather(self, rows: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
        self.group.count(f"all-gather of {name}")
        own = self.inside.all_gather_rows(tensor, name=name)
        if self.between is not None:
            most = max(map(len, self.ranks))
            padded = tensor.new_empty((most, *tensor.shape))
            padded[: len(own)] = own
            for ranks, found in zip(self.ranks, self.between.all_gather_rows(padded, name=name), strict=True):
                rows[list(ranks)] = found[: len(ranks)]
        self.inside.broadcast(rows, name=name)

    def shared_buffer(self, dtype: torch.dtype, count: int, name: str) -> MachinesBuffer | None:
        import torch

        if not dtype.is_floating_point or not count:
            return None
        if self.inside.world_size == 1:
            return MachinesBuffer(self, torch.empty(count, dtype=dtype), None, None, name)
        terms = self.inside.shared_buffer(dtype, count, name=name)
        handed = None if terms is None else self.inside.shared_rows(1, name=name)
        if not isinstance(terms, SharedBuffer) or handed is None:
            return None
        return MachinesBuffer(self, terms.tensor, terms, handed, name)


class MachinesBuffer:
    """Numbers that are replaced by their sums over all machines.

    The first worker of a machine adds up ``terms``, sends the sum once a later exchange finds it complete, and shows the result
    through ``handed``. A machine with only one worker has neither.
    """

    def __init__(
        self, machines: Machines, tensor: torch.Tensor, terms: SharedBuffer | None, handed: SharedRows | None, name: str
    ):
        self.tensor = tensor
        self._between, self._others, self._under_way = machines.between, machines.inside.world_size - 1, machines.under_way
        self._terms, self._handed, self._what = terms, handed, name
        self._sent: Pending | None = None

    def all_reduce(self) -> MachinesBuffer:
        self.settle()
        if self._terms is not None:
            self._terms.reduce_scatter([len(self.tensor), *[0] * self._others])
        self._under_way.append(self)
        for each in self._under_way:
            if each._sent is None and each._between is not None and (each._terms is None or each._terms.ends_at_once()):
                each._send()
            if each._sent is None:
                break
        return self

    def reduce_scatter(self, sizes: Sequence[int]) -> MachinesBuffer:
        return self.all_reduce()

    def wait(self) -> None:
        if self not in self._under_way:
            return
        # Send all before waiting for the first, so that nobody waits for this worker.
        for each in self._under_way:
            each._send()
        while self._under_way:
            self._under_way.pop(0)._take()

    def settle(self) -> None:
        self.wait()
        if self._terms is not None and self._handed is not None:
            self._terms.settle()
            self._handed.settle()

    def _send(self) -> None:
        if self._sent is not None:
            return
        if self._terms is not None:
            self._terms.wait()
        if self._between is not None:
            self._sent = self._between.begin_all_reduce(self.tensor, name=self._what)

    def _take(self) -> None:
        if self._sent is not None:
            self._sent.wait()
            self._sent = None
        if self._terms is not None and self._handed is not None:
            self._handed.show()
            if self._between is None:
                self._handed.rows()  # waits until the first worker shows the sums
                self.tensor.copy_(self._terms.buffers[0])
            self._handed.release()
