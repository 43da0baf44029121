"""The workers of a run, and what they exchange, with a name in every error, and an end to every wait.

On CPUs values go through memory that workers of one machine share (``shared_memory``, ``pieces``), or else by the backends of
``torch.distributed`` (``backends``), as on GPUs. Nothing is pickled. ``joining`` makes the group of a run.
"""

from __future__ import annotations

import atexit
import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from burnish.distributed.connection import shared_memory
from burnish.distributed.connection.backends import Backends, adds_up
from burnish.distributed.connection.machines import Machines, MachinesBuffer
from burnish.distributed.connection.memory import Memory, combine
from burnish.distributed.connection.rendezvous import FIRST_CONTACT_SECONDS, TIMEOUT_SECONDS, Meeting, torch_distributed
from burnish.distributed.connection.shared_memory import SharedBuffer, SharedRows
from burnish.distributed.connection.watch import SEARCH_SECONDS, Watch, first_line
from burnish.engines.communicator import Pending
from burnish.errors import ConfigurationError, EngineError, WorkerError, comes_again
from burnish.settings import is_whole

if TYPE_CHECKING:
    import torch

# How long a wait lasts before it is seen whether the others still live, and Ctrl-C is heard.
LOOK_UP_SECONDS = 0.5
# By how much an exchange outlasts its time, so that who is late is found out before it ends by itself.
GRACE_SECONDS = SEARCH_SECONDS + 1
# How often the store is asked for what others tell by it.
ASK_SECONDS = 0.002
OPERATIONS = ("sum", "min", "max")
SMALL_BYTES = 2**15
"""Up to here what a worker gives to some goes to all, in one exchange."""


class Work:
    """An exchange that is under way. Until ``wait`` has returned, its tensors are neither read nor written.

    Args:
        finish: waits for it; None for what is done already.
    """

    def __init__(self, finish: Callable[[], None] | None = None):
        self._finish = finish

    def wait(self) -> None:
        """Wait until the exchange is done; on CUDA, until it stands in the current stream.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time.
        """
        if self._finish is not None:
            self._finish()
        self._finish = None


DONE = Work()


class ProcessGroup:
    """Workers that exchange tensors: all of a run, or some of them (``split``).

    All of its methods are to be called by all of its workers, in the same order. ``joining.join`` makes one.

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
        meeting: Meeting | None = None,
        backends: Backends | None = None,
        watch: Watch | None = None,
        members: Sequence[int] | None = None,
        name: str = "run",
        share_memory: bool = True,
        counts: bool = True,
    ):
        self.rank, self.world_size, self.device = rank, world_size, device
        self.timeout, self.patience = timeout, patience
        self._meeting, self._backends, self._watch = meeting, backends, watch
        # Ranks of the whole run, by rank in this group.
        self._members = tuple(range(world_size) if members is None else members)
        self._is_part = members is not None
        self._name, self._counts = name, counts
        self._parts = 0
        self._barriers = 0
        self._times_told = 0
        self.shares_memory = share_memory
        self.memory: Memory | None = None
        self.machines: Machines[ProcessGroup] | None = None
        self._groups: list[ProcessGroup] = []
        self._on_close: Callable[[bool], None] | None = None
        if meeting is not None and not self._is_part:
            atexit.register(self.close)

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum", *, name: str = "values") -> torch.Tensor:
        """Replace ``tensor`` by its sum (``min``, ``max``) over the workers; returns it.

        Args:
            tensor: of the same shape and dtype on all workers; contiguous.
            operation: ``sum``, ``min`` or ``max``.
            name: what is exchanged, for messages.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time.
        """
        self.begin_all_reduce(tensor, operation, name=name).wait()
        return tensor

    def begin_all_reduce(self, tensor: torch.Tensor, operation: str = "sum", *, name: str = "values") -> Pending:
        """Begin what ``all_reduce`` does, and return at once; ``tensor`` has the result when ``wait`` has returned."""
        if operation not in OPERATIONS:
            raise ConfigurationError(f"operation={operation!r}: give one of {', '.join(OPERATIONS)}")
        if self.world_size == 1:
            return DONE
        what = f"all-reduce of {name}"
        if (memory := self._memory_of(tensor)) is not None:
            return memory.all_reduce(tensor, operation, what) or DONE
        if (machines := self._machines_of(tensor)) is not None:
            self.count(what)
            machines.all_reduce(tensor, operation, name)
            return DONE
        if not adds_up(tensor):
            combine(self.all_gather_rows(tensor, name=name), operation, tensor)
            return DONE
        return self._begin(lambda backends: backends.all_reduce(tensor, operation), what, tensor)

    def all_gather(self, tensor: torch.Tensor, *, name: str = "values") -> list[torch.Tensor]:
        """Return the tensors of all workers, in the order of their ranks; all are of one shape and dtype."""
        return list(self.all_gather_rows(tensor, name=name).unbind())

    def all_gather_rows(self, tensor: torch.Tensor, *, name: str = "values") -> torch.Tensor:
        """Return the tensors of all workers as one, [workers, ...]."""
        if self.world_size == 1:
            return tensor.unsqueeze(0).clone()
        rows = tensor.new_empty((self.world_size, *tensor.shape))
        what = f"all-gather of {name}"
        if (memory := self._memory_of(tensor)) is not None:
            memory.all_gather(rows, tensor.contiguous(), what)
        elif (machines := self._machines_of(tensor)) is not None:
            self.count(what)
            machines.all_gather(rows, tensor, name)
        else:
            self._begin(lambda backends: backends.all_gather(rows, tensor.contiguous()), what, tensor).wait()
        return rows

    def begin_all_to_all(
        self, tensor: torch.Tensor, sizes: Sequence[int] | None = None, *, name: str = "values"
    ) -> tuple[torch.Tensor, Pending]:
        """Begin to give each worker a part of ``tensor``, contiguous, of the same dtype on all.

        Args:
            tensor: [workers, ...], of which each worker gets a row; with ``sizes`` a vector.
            sizes: of the parts, which lie one after the other, by rank; the same on all workers.
            name: what is exchanged, for messages.

        Returns:
            The parts that the workers gave to this one, [workers, ...] in the order of their ranks, which are there when ``wait``
            has returned.
        """
        if self.world_size == 1:
            return (tensor if sizes is None else tensor.unsqueeze(0)).clone(), DONE
        gives = [tensor[0].numel()] * self.world_size if sizes is None else list(sizes)
        shape = tensor.shape[1:] if sizes is None else (gives[self.rank],)
        received = tensor.new_empty((self.world_size, *shape))
        what = f"all-to-all of {name}"
        if (memory := self._memory_of(tensor)) is not None:
            memory.all_to_all(received, tensor, [gives] * self.world_size, what)
            return received, DONE
        gets = [gives[self.rank]] * self.world_size
        return received, self._begin(lambda backends: backends.all_to_all(received, gets, tensor, gives), what, tensor)

    def all_to_all_uneven(self, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], *, name: str = "values") -> torch.Tensor:
        """Give each worker a part of a vector, of any size, and return what the workers gave to this one, in their order.

        Args:
            tensor: the parts, one behind the other; contiguous, of the same dtype on all workers.
            sizes: for each worker how many elements it gives to each; the same on all workers.
            name: what is exchanged, for messages.
        """
        if self.world_size == 1:
            return tensor.clone()
        import torch

        largest = max(map(sum, sizes))
        if not largest:
            return tensor.new_empty(0)
        if largest * tensor.itemsize <= SMALL_BYTES:
            # All to all is one exchange through memory that workers share, which connections are slower than.
            rows = self.all_gather_rows(torch.nn.functional.pad(tensor, (0, largest - len(tensor))), name=name)
            firsts = [sum(row[: self.rank]) for row in sizes]
            return torch.cat([row[first : first + own[self.rank]] for row, first, own in zip(rows, firsts, sizes, strict=True)])
        gets = [row[self.rank] for row in sizes]
        received = tensor.new_empty(sum(gets))
        what = f"all-to-all of {name}"
        if (memory := self._memory_of(tensor)) is not None:
            memory.all_to_all(received, tensor, sizes, what)
        else:
            gives = sizes[self.rank]
            self._begin(lambda backends: backends.all_to_all(received, gets, tensor, gives), what, tensor).wait()
        return received

    def broadcast(self, tensor: torch.Tensor, source: int = 0, *, name: str = "values") -> torch.Tensor:
        """Replace ``tensor`` by that of the rank ``source``, of the same shape and dtype; returns it."""
        what = f"broadcast of {name}"
        if (memory := self._memory_of(tensor)) is not None:
            memory.broadcast(tensor, source, what)
        elif self.world_size > 1:
            self._begin(lambda backends: backends.broadcast(tensor, source), what, tensor).wait()
        return tensor

    def barrier(self, *, name: str = "the others") -> None:
        """Wait until all workers have come here, for ``patience`` seconds at most.

        It takes a hundredth of a second or more, and may last longer than an exchange: it is for what workers do at different
        speeds, such as compiling, or waiting for rank 0 to write a checkpoint.

        Args:
            name: what is waited for, for messages.

        Raises:
            WorkerError: a worker is gone, or has not come in time.
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
            self.count(f"exchange of {name}")
            return self._all_told(value, name)
        return [json.loads(content) for content in self.all_gather_bytes(json.dumps(value).encode(), name=name)]

    def split(self, size: int) -> ProcessGroup:
        """Return this worker's group of ``size`` ranks that follow each other; the last group has what is left.

        Raises:
            ConfigurationError: ``size`` is no whole number of at least one.
        """
        if not is_whole(size) or size < 1:
            raise ConfigurationError(f"size={size!r}: give a whole number of workers, 1 or more")
        return self if size >= self.world_size else self.apart(size)

    def apart(self, size: int) -> ProcessGroup:
        """Return this worker's group of ``size`` ranks that follow each other, with connections of its own.

        Exchanges of one group wait for each other, and not for those of another.
        """
        first = self.rank // size * size
        self._parts += 1
        group = self.part(range(first, min(first + size, self.world_size)), f"{self._parts}.{first}", counts=self._counts)
        if group.world_size > 1 and self._meeting is not None:
            self.count("connection of a group")
            group.connect()
        return group

    def part(self, ranks: Sequence[int], name: str, counts: bool = False) -> ProcessGroup:
        """Return a group of some of these workers, this one among them; it is not connected yet.

        Args:
            ranks: of the workers, in the order of their ranks there.
            name: which no other part with one of these workers has.
            counts: whether its exchanges are counted: all workers count the same ones.
        """
        group = ProcessGroup(
            list(ranks).index(self.rank),
            len(ranks),
            self.device,
            self.timeout,
            self.patience,
            self._meeting,
            watch=self._watch,
            members=[self._members[rank] for rank in ranks],
            name=f"{self._name}/{name}",
            share_memory=self.shares_memory,
            counts=counts,
        )
        self._groups.append(group)
        return group

    def connect(self, by_memory: bool = True) -> None:
        """Find out by what these workers exchange: memory if all of them can, else backends; called by all of them together.

        Workers of several machines exchange within each machine by memory. Backends connect those who then need them.

        Raises:
            WorkerError: one has not come, or is not reached.
        """
        if self.device == "cpu" and by_memory:
            self.memory = Memory.open(self)
            places = self._places()
            if self.memory is None and self.shares_memory and 1 < len(places) < self.world_size:
                self.machines = self._by_machine(places)
        if self.memory is None and self.machines is None and self._meeting is not None and self.world_size > 1:
            self._connected()

    def _by_machine(self, ranks: Sequence[Sequence[int]]) -> Machines[ProcessGroup] | None:
        """Connect the workers in two levels; None, on all of them, if those of a machine cannot share memory.

        Args:
            ranks: of each machine, ascending.
        """
        own = next(each for each in ranks if self.rank in each)
        inside = self.part(own, f"machine.{own[0]}")
        inside.connect()
        if not all(self.all_gather_json(inside.world_size == 1 or inside.memory is not None, name="who shares memory")):
            return None
        between = self.part([each[0] for each in ranks], "machines") if self.rank == own[0] else None
        if between is not None:
            between.connect(by_memory=False)
        return Machines(ranks, inside, between)

    def _connected(self) -> Backends:
        """The backends of these workers, who all ask for them at the same exchange."""
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

    def _places(self) -> list[list[int]]:
        """The ranks of each machine."""
        if self._meeting is None:
            return []
        ranks: dict[str, list[int]] = {}
        for rank, member in enumerate(self._members):
            ranks.setdefault(self._meeting.locations[member].system, []).append(rank)
        return list(ranks.values())

    def shared_buffer(self, dtype: torch.dtype, count: int, *, name: str = "values") -> SharedBuffer | MachinesBuffer | None:
        """Return numbers that are exchanged again and again, in memory that the workers share; None where they share none.

        Args:
            dtype: of the numbers; there are shared buffers of float32, float64, bfloat16, int64 and int32.
            count: how many there are.
            name: what is exchanged, for messages.
        """
        if self.machines is not None:
            return self.machines.shared_buffer(dtype, count, name) if dtype.is_floating_point and count else None
        return None if self.memory is None else self.memory.shared_buffer(dtype, count, name)

    def shared_rows(self, count: int, *, name: str = "values") -> SharedRows | None:
        """Return ``count`` bytes that are shown to all workers again and again; None where they share no memory."""
        return None if self.memory is None else self.memory.shared_rows(count, name)

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left."""
        return self.world_size > 1 and self._meeting is None

    def twin(self) -> ProcessGroup:
        """Return a group of the same workers, whose exchanges do not wait for those of this one."""
        return self if self.world_size == 1 else self.apart(self.world_size)

    def check(self) -> None:
        """Raise WorkerError where a worker is known to be gone; asks nobody."""
        if self._watch is not None and (cause := self._watch.cause()) is not None:
            raise WorkerError(self._ended(cause), self._watch.comes_again)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this worker stops, and why; an error that came from them is theirs already."""
        if self._watch is not None and not isinstance(error, WorkerError):
            cause = f"rank {self._run_rank} stopped: {first_line(error) or type(error).__name__}"
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

    def at_close(self, function: Callable[[bool], None]) -> None:
        """Have something called when this worker leaves; it is told whether the run has failed."""
        self._on_close = function

    def abort(self) -> None:
        """End by an error what is under way, in this group and in its parts."""
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

    @property
    def _run_rank(self) -> int:
        return self._members[self.rank]

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
        """Wait for an exchange that is under way, until its time is over.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time.
        """
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

    def _all_told(self, value: Any, name: str) -> list[Any]:
        """Return what all workers tell by the store: what they exchange by is not found out yet.

        Raises:
            WorkerError: a worker is gone, or has not come in time.
        """
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
                    raise self.late(f"exchange of {name}", self.timeout)
                time.sleep(ASK_SECONDS)
        except OSError as error:
            raise self.broken(f"exchange of {name}", first_line(error)) from error
        return [values[rank] for rank in range(self.world_size)]

    def broken(self, name: str, reason: str, ended: Sequence[int] = ()) -> WorkerError:
        """Find out who is gone, and tell all; returns the error that ends this worker.

        Args:
            name: the exchange.
            reason: what is known of it here.
            ended: ranks of this group whose processes run no more, as far as that is known.
        """
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

    def _memory_of(self, tensor: torch.Tensor) -> Memory | None:
        return self.memory if tensor.device.type == "cpu" else None

    def _machines_of(self, tensor: torch.Tensor) -> Machines[ProcessGroup] | None:
        return self.machines if tensor.device.type == "cpu" else None

    def _ended(self, cause: str) -> str:
        return (
            f"{cause[0].upper()}{cause[1:]}. Rank {self._run_rank} stops too: resume from the last checkpoint, "
            "with as many workers as there are"
        )
