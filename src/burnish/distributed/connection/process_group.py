"""The workers of a run, and what they exchange, with a name in every error, and an end to every wait.

On CPUs values go through memory that workers of one machine share (``shared_memory``), or else by the backends of
``torch.distributed`` (``backends``), as on GPUs. Workers of several machines exchange within each machine through memory, and
once between the machines: the first worker of each exchanges for all of it. A sum is then taken in the order of the ranks on each
machine, and after that over the machines: it has the same bits again for the same layout of workers. Nothing is pickled.
"""

from __future__ import annotations

import atexit
import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from burnish.distributed.connection import shared_memory
from burnish.distributed.connection.backends import Backends, adds_up
from burnish.distributed.connection.shared_memory import DONE, LOOK_UP_SECONDS, Memory, SharedBuffer, SharedRows, Work, combine
from burnish.distributed.connection.store import FIRST_CONTACT_SECONDS, TIMEOUT_SECONDS, Meeting, first_line, torch_distributed
from burnish.distributed.connection.watch import SEARCH_SECONDS, Watch
from burnish.engines.communicator import Pending
from burnish.errors import ConfigurationError, EngineError, WorkerError, comes_again
from burnish.validation import is_whole

if TYPE_CHECKING:
    import torch

# By how much an exchange outlasts its time, so that who is late is found out before it ends by itself.
GRACE_SECONDS = SEARCH_SECONDS + 1
# How often the store is asked for what others tell by it.
ASK_SECONDS = 0.002
OPERATIONS = ("sum", "min", "max")
SMALL_BYTES = 2**15
"""Up to here what a worker gives to some goes to all: one exchange in place of two, where latency is what an exchange costs."""


class ProcessGroup:
    """Workers that exchange tensors: all of a run, or some of them (``split``). ``burnish.distributed.join`` makes one.

    All of its methods are to be called by all of its workers, in the same order. They raise WorkerError if a worker is gone, or
    is late.

    Attributes:
        rank: of this worker, from 0 to ``world_size`` - 1.
        world_size: number of workers.
        device: where tensors are exchanged: ``cpu``, or this worker's GPU.
        timeout: seconds that an exchange may take.
        patience: seconds for what is known to take longer: the first contact, a checkpoint that rank 0 writes.
        shares_memory: whether this worker would exchange through memory with others of its machine.
        memory: by which the workers exchange if all of them share it.
        machines: the workers by machine, if they exchange within each of several machines first.
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
        watch: Watch | None = None,
        share_memory: bool = True,
        members: Sequence[int] | None = None,
        name: str = "run",
        counts: bool = True,
        on_close: Callable[[bool], None] | None = None,
    ):
        self.rank, self.world_size, self.device = rank, world_size, device
        self.timeout, self.patience, self.shares_memory = timeout, patience, share_memory
        self.memory: Memory | None = None
        self.machines: Machines | None = None
        self._meeting, self._backends, self._watch = meeting, backends, watch
        # Ranks of the whole run, by rank in this group.
        self._members = tuple(range(world_size) if members is None else members)
        self._is_part = members is not None
        self._name, self._counts = name, counts
        self._parts = self._barriers = self._times_told = 0
        self._groups: list[ProcessGroup] = []
        self._on_close = on_close
        if meeting is not None and not self._is_part:
            atexit.register(self.close)

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum", *, name: str = "values") -> torch.Tensor:
        """Replace ``tensor``, contiguous, by its ``sum``, ``min`` or ``max`` over the workers; returns it.

        It is of the same shape and dtype on all workers. ``name`` is what is exchanged, for messages; so for all methods.
        """
        self.begin_all_reduce(tensor, operation, name=name).wait()
        return tensor

    def begin_all_reduce(self, tensor: torch.Tensor, operation: str = "sum", *, name: str = "values") -> Pending:
        """Begin what ``all_reduce`` does, and return at once; ``tensor`` has the result when ``wait`` has returned."""
        if operation not in OPERATIONS:
            raise ConfigurationError(f"operation={operation!r}: give one of {', '.join(OPERATIONS)}")
        if self.world_size == 1:
            return DONE
        if (carrier := self._carrier(tensor)) is not None:
            return carrier.all_reduce(tensor, operation, name)
        if not adds_up(tensor):
            combine(self.all_gather_rows(tensor, name=name), operation, tensor)
            return DONE
        return self._begin(lambda backends: backends.all_reduce(tensor, operation), f"all-reduce of {name}", tensor)

    def all_gather(self, tensor: torch.Tensor, *, name: str = "values") -> list[torch.Tensor]:
        """Return the tensors of all workers, in the order of their ranks; all are of one shape and dtype."""
        return list(self.all_gather_rows(tensor, name=name).unbind())

    def all_gather_rows(self, tensor: torch.Tensor, *, name: str = "values") -> torch.Tensor:
        """Return the tensors of all workers as one, [workers, ...]."""
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
        """Begin to give each worker a row of ``tensor``, or with ``sizes`` its part of a vector; contiguous, of one dtype on all.

        Returns what the workers gave to this one, [workers, ...] in the order of their ranks, and what is waited for.
        """
        if self.world_size == 1:
            return (tensor if sizes is None else tensor.unsqueeze(0)).clone(), DONE
        gives = [tensor[0].numel()] * self.world_size if sizes is None else list(sizes)
        shape = tensor.shape[1:] if sizes is None else (gives[self.rank],)
        received = tensor.new_empty((self.world_size, *shape))
        return received, self._begin_all_to_all(received, tensor, [gives] * self.world_size, name)

    def all_to_all_uneven(self, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], *, name: str = "values") -> torch.Tensor:
        """Give each worker a part of a vector, of any size, and return what the workers gave to this one, in their order.

        ``sizes`` says for each worker how many elements it gives to each; the parts lie one after the other.
        """
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
        """Replace ``tensor`` by that of the rank ``source``, of the same shape and dtype; returns it."""
        if isinstance(carrier := self._carrier(tensor), Memory):
            carrier.broadcast(tensor, source, name)
        elif self.world_size > 1:
            self._begin(lambda backends: backends.broadcast(tensor, source), f"broadcast of {name}", tensor).wait()
        return tensor

    def barrier(self, *, name: str = "the others") -> None:
        """Wait until all workers have come here, for ``patience`` seconds at most.

        It takes a hundredth of a second or more, and may last longer than an exchange: it is for what workers do at different
        speeds, such as compiling, or waiting for rank 0 to write a checkpoint. ``name`` is what is waited for, for messages.
        """
        if self.world_size == 1:
            return
        self.count(f"wait for {name}")
        self._barriers += 1
        key = f"{self._name}:{self._barriers}"
        if self._watch is not None and not self._watch.wait_for_all(key, self.world_size, self.patience):
            self.check()
            raise self.late(f"wait for {name}", self.patience)

    def all_gather_bytes(self, content: bytes, *, name: str = "values") -> list[bytes]:
        """Return the bytes of all workers, in the order of their ranks; each may have any number of them."""
        if self.world_size == 1:
            return [content]
        import torch

        length = torch.tensor([len(content)], dtype=torch.int64)
        lengths = [int(entry.item()) for entry in self.all_gather(length, name=f"the size of {name}")]
        padded = bytearray(content.ljust(max(1, *lengths), b"\0"))
        gathered = self.all_gather(torch.frombuffer(padded, dtype=torch.uint8), name=name)
        return [entry[:size].numpy().tobytes() for entry, size in zip(gathered, lengths, strict=True)]

    def all_gather_json(self, value: Any, *, name: str = "values") -> list[Any]:
        """Return the JSON-compatible values of all workers, in the order of their ranks."""
        if self.world_size > 1 and self.memory is None and self._backends is None:
            return self._all_told(value, f"exchange of {name}")
        return [json.loads(content) for content in self.all_gather_bytes(json.dumps(value).encode(), name=name)]

    def _all_told(self, value: Any, name: str) -> list[Any]:
        """Return what all workers tell by the store: what they exchange by is not found out yet."""
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
        """Return ``count`` numbers that are exchanged again and again, in shared memory; None if there is none for them."""
        carrier = self.memory or self.machines
        return None if carrier is None else carrier.shared_buffer(dtype, count, name)

    def shared_rows(self, count: int, *, name: str = "values") -> SharedRows | None:
        """Return ``count`` bytes that are shown to all workers again and again; None if they share no memory."""
        return None if self.memory is None else self.memory.shared_rows(count, name)

    def split(self, size: int) -> ProcessGroup:
        """Return this worker's group of ``size`` ranks that follow each other; the last group has what is left."""
        if not is_whole(size) or size < 1:
            raise ConfigurationError(f"size={size!r}: give a whole number of workers, 1 or more")
        return self if size >= self.world_size else self.apart(size)

    def apart(self, size: int) -> ProcessGroup:
        """As ``split``, with connections of its own: exchanges of one group do not wait for those of another."""
        first = self.rank // size * size
        self._parts += 1
        group = self._part(range(first, min(first + size, self.world_size)), f"{self._parts}.{first}", counts=self._counts)
        if group.world_size > 1 and self._meeting is not None:
            self.count("connection of a group")
            group.connect()
        return group

    def twin(self) -> ProcessGroup:
        """Return a group of the same workers, whose exchanges do not wait for those of this one."""
        return self if self.world_size == 1 else self.apart(self.world_size)

    def _part(self, ranks: Sequence[int], name: str, counts: bool = False) -> ProcessGroup:
        """Return a group of some of these workers, not connected yet, by a new name; all workers count the same exchanges."""
        group = ProcessGroup(
            list(ranks).index(self.rank),
            len(ranks),
            self.device,
            self.timeout,
            self.patience,
            meeting=self._meeting,
            watch=self._watch,
            share_memory=self.shares_memory,
            members=[self._members[rank] for rank in ranks],
            name=f"{self._name}/{name}",
            counts=counts,
        )
        self._groups.append(group)
        return group

    def connect(self, by_memory: bool = True) -> None:
        """Find out by what these workers exchange: memory if all of them can, else backends; called by all of them together."""
        if self.device == "cpu" and by_memory:
            self.memory = Memory.open(self)
            if self.memory is None:
                self.machines = self._by_machine()
        if self.memory is None and self.machines is None and self._meeting is not None and self.world_size > 1:
            self._connected()

    def _by_machine(self) -> Machines | None:
        """Connect the workers in two levels; None, on all of them, if one machine has all, or workers of one share no memory."""
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
        """Raise WorkerError if a worker is known to be gone; asks nobody."""
        if self._watch is not None and (cause := self._watch.cause()) is not None:
            raise WorkerError(self._ended(cause), self._watch.comes_again)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this worker stops, and why; an error that came from them is theirs already."""
        if self._watch is not None and not isinstance(error, WorkerError):
            cause = f"rank {self._members[self.rank]} stopped: {first_line(error) or type(error).__name__}"
            self._watch.declare(cause, comes_again(error))

    def close(self) -> None:
        """Leave the run. The others may go on to their own end, but exchange nothing with this worker any more."""
        if self._meeting is None or self._is_part:
            return
        atexit.unregister(self.close)
        shared_memory.leave()
        broken = self._watch is None or self._watch.cause() is not None
        if self._watch is not None:
            self._watch.stop()
        self._leave(broken)

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
        """By what a tensor is exchanged; None is by the backends, as on GPUs."""
        return (self.memory or self.machines) if tensor.device.type == "cpu" else None

    def _begin(self, begin: Callable[[Backends], Any], name: str, tensor: torch.Tensor) -> Pending:
        self.count(name)
        on_cpu = tensor.device.type == "cpu"
        backends = self._connected()
        try:
            work = begin(backends)
        except RuntimeError as error:
            raise self.broken(name, first_line(error)) from error
        return DONE if work is None else Work(functools.partial(self._finish, work, name, on_cpu))

    def count(self, name: str) -> None:
        """Enter that this worker has come to an exchange; refuses if it has left, or another is gone."""
        if self._meeting is None:
            raise EngineError(f"The {name}: this worker has left the group of workers (close): join it again, in a new run")
        self.check()
        if self._watch is not None and self._counts:
            self._watch.operations += 1

    def _finish(self, work: Any, name: str, on_cpu: bool) -> None:
        began = time.monotonic()
        while on_cpu and not work.is_completed():
            with suppress(RuntimeError):  # of the time that it was given; another one comes again below
                work.wait(timedelta(seconds=LOOK_UP_SECONDS))
                break  # not every backend's exchange says that it is completed
            if work.is_completed():
                break
            self.check()
            if time.monotonic() > began + self.timeout:
                raise self.late(name, self.timeout)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.broken(name, first_line(error)) from error

    def broken(self, name: str, reason: str, ended: Sequence[int] = ()) -> WorkerError:
        """Find out who is gone, and tell all; returns the error that ends this worker. ``ended`` are known to run no more."""
        known = {self._members[rank] for rank in ended}
        if self._meeting is not None:
            known |= {rank for rank, location in enumerate(self._meeting.locations) if location.has_ended}
        cause = None if self._watch is None else self._watch.search(known)
        if self._watch is not None and cause is not None:
            return WorkerError(self._ended(cause), self._watch.comes_again)
        return self._told(f"the connection to another worker broke in the {name}: {reason}")

    def late(self, name: str, limit: float) -> WorkerError:
        """Find out who has not come to an exchange, and tell all; returns the error that ends this worker."""
        who = "another worker has not come to it" if self._watch is None else self._watch.who_is_late()
        if self._watch is not None and who == self._watch.cause():
            return WorkerError(self._ended(who), self._watch.comes_again)  # what another worker told meanwhile says it all
        return self._told(f"The {name} is not done after {limit:g} s: {who}")

    def at_odds(self, name: str) -> WorkerError:
        """Tell all that workers gave different things to an exchange; returns the error that ends this worker."""
        return self._told(f"the workers have come to the {name} with different sizes, dtypes or operations")

    def _told(self, cause: str) -> WorkerError:
        if self._watch is not None:
            self._watch.declare(cause)
        return WorkerError(self._ended(cause))

    def _ended(self, cause: str) -> str:
        return (
            f"{cause[0].upper()}{cause[1:]}. Rank {self._members[self.rank]} stops too: resume from the last checkpoint, "
            "with as many workers as there are"
        )


@dataclass(eq=False)
class Machines:
    """The workers of a group, by machine: ``ranks`` of each, ascending.

    ``inside`` are the workers of this machine, who share memory; ``between`` the first workers of all machines, for one of them.
    ``under_way`` are buffers that are being exchanged, in the order in which that began.
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
    """Numbers of which each worker has its own, and that are replaced by their sums over all machines, again and again.

    The first worker of each machine adds up what its machine's workers have. It begins to exchange the sum as soon as a later
    exchange begins and finds it complete: the network works while gradients are computed. ``terms`` has the numbers of all
    workers of this machine; the first one shows ``handed`` when its terms are the sums. Both are None for a worker alone on its
    machine.
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
            if not each._send_at_once():
                break
        return self

    def reduce_scatter(self, sizes: Sequence[int]) -> MachinesBuffer:
        """As ``all_reduce``: nothing is said of the sections of others."""
        return self.all_reduce()

    def wait(self) -> None:
        if self not in self._under_way:
            return
        # All of them before the first is waited for: others find what they wait for.
        for each in self._under_way:
            each._send()
        while self._under_way:
            self._under_way.pop(0)._take()

    def settle(self) -> None:
        self.wait()
        if self._terms is not None and self._handed is not None:
            self._terms.settle()
            self._handed.settle()

    def _send_at_once(self) -> bool:
        if self._sent is None and self._between is not None and (self._terms is None or self._terms.ends_at_once()):
            self._send()
        return self._sent is not None

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
                self._handed.rows()  # which the first worker shows when it has the sums
                self.tensor.copy_(self._terms.buffers[0])
            self._handed.release()
