"""The workers of a run, and what they exchange, with a name in every error, and an end to every wait.

On CPU values go through memory that workers of one machine share (``shared_memory``), or by their connections (``exchange``); on
CUDA the exchange is NCCL's. Nothing is pickled. ``joining`` makes the group of a run.
"""

from __future__ import annotations

import atexit
import functools
import json
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from burnish.distributed.connection import nccl, shared_memory
from burnish.distributed.connection.exchange import DifferentError, Exchange
from burnish.distributed.connection.nccl import Nccl
from burnish.distributed.connection.rendezvous import FIRST_CONTACT_SECONDS, TIMEOUT_SECONDS, Meeting
from burnish.distributed.connection.shared_memory import Files, Lane, SharedBuffer, SharedRows
from burnish.distributed.connection.watch import SEARCH_SECONDS, Watch, first_line
from burnish.distributed.connection.work import DONE, Work
from burnish.engines.communicator import Pending
from burnish.errors import ConfigurationError, EngineError, WorkerError, comes_again
from burnish.settings import is_whole

if TYPE_CHECKING:
    import torch

# How long a wait lasts before it is seen whether the others still live, and Ctrl-C is heard.
LOOK_UP_SECONDS = 0.5
# By how much an exchange outlasts its time, so that who is late is found out before it ends by itself.
GRACE_SECONDS = SEARCH_SECONDS + 1
OPERATIONS = ("sum", "min", "max")
SMALL_BYTES = 2**15
"""Up to here what a worker gives to some goes to all, in one exchange."""


class ProcessGroup:
    """Workers that exchange tensors: all of a run, or some of them (``split``).

    All of its methods are to be called by all of its workers, in the same order. ``joining.join`` makes one.

    Attributes:
        rank: of this worker, from 0 to ``world_size`` - 1.
        world_size: number of workers.
        device: where tensors are exchanged: ``cpu``, or this worker's GPU.
        timeout: seconds that an exchange may take.
        patience: seconds for what is known to take longer: the first contact, a checkpoint that rank 0 writes.
        exchange: the connections with the others; None for one worker, and after ``close``.
        shares_memory: whether this worker would exchange through memory with others of its machine.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: str = "cpu",
        timeout: float = TIMEOUT_SECONDS,
        patience: float = FIRST_CONTACT_SECONDS,
        meeting: Meeting | None = None,
        exchange: Exchange | None = None,
        gpus: Nccl | None = None,
        watch: Watch | None = None,
        members: Sequence[int] | None = None,
        name: str = "run",
        share_memory: bool = True,
    ):
        self.rank, self.world_size, self.device = rank, world_size, device
        self.timeout, self.patience = timeout, patience
        self.exchange = exchange
        self._meeting, self._gpus, self._watch = meeting, gpus, watch
        # Ranks of the whole run, by rank in this group.
        self._members = tuple(range(world_size) if members is None else members)
        self._is_part = members is not None
        self._name = name
        self._parts = 0
        self._barriers = 0
        self.shares_memory = share_memory
        self._lane: Lane | None = None
        self._looked_for_lane = device != "cpu"
        self._under_way: list[SharedBuffer] = []
        if exchange is not None and not self._is_part:
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
        if (lane := self._lane_of(tensor)) is not None and lane.takes(tensor, operation):
            self.count(f"all-reduce of {name}")
            return lane.begin(tensor, tensor, operation, f"all-reduce of {name}")
        return self._begin(lambda way: way.all_reduce(tensor, operation), f"all-reduce of {name}", tensor)

    def all_gather(self, tensor: torch.Tensor, *, name: str = "values") -> list[torch.Tensor]:
        """Return the tensors of all workers, in the order of their ranks; all are of one shape and dtype."""
        return list(self.all_gather_rows(tensor, name=name).unbind())

    def all_gather_rows(self, tensor: torch.Tensor, *, name: str = "values") -> torch.Tensor:
        """Return the tensors of all workers as one, [workers, ...]."""
        if self.world_size == 1:
            return tensor.unsqueeze(0).clone()
        rows = tensor.new_empty((self.world_size, *tensor.shape))
        what = f"all-gather of {name}"
        if (lane := self._lane_of(tensor)) is not None and lane.takes(tensor, "gather"):
            self.count(what)
            lane.begin(tensor, rows, "gather", what).wait()
        else:
            self._begin(lambda way: way.all_gather(rows.unbind(), tensor), what, tensor).wait()
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
        import torch

        parts = tensor.unbind() if sizes is None else torch.split(tensor, list(sizes))
        received = tensor.new_empty((self.world_size, *parts[self.rank].shape))
        return received, self._begin(lambda way: way.all_to_all(received.unbind(), parts), f"all-to-all of {name}", tensor)

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
        parts = torch.split(tensor, list(sizes[self.rank]))
        into = torch.split(received, gets)
        self._begin(lambda way: way.all_to_all(into, parts), f"all-to-all of {name}", tensor).wait()
        return received

    def broadcast(self, tensor: torch.Tensor, source: int = 0, *, name: str = "values") -> torch.Tensor:
        """Replace ``tensor`` by that of the rank ``source``, of the same shape and dtype; returns it."""
        if self.world_size > 1:
            self._begin(lambda way: way.broadcast(tensor, source), f"broadcast of {name}", tensor).wait()
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
        part = self._members[first : first + size]
        made = self.all_gather_json(nccl.groups_made(), name="the numbers of groups") if self._gpus is not None else []
        self._parts += 1
        name = f"{self._name}/{self._parts}.{first}"
        exchange = gpus = None
        if len(part) > 1 and self._meeting is not None:
            self.count("connection of a group")
            try:
                exchange = self._meeting.connect(name, part, self.timeout + GRACE_SECONDS, self.check)
                if self._gpus is not None:
                    gpus = self._gpus.apart(part, max(made[first : first + size]))
            except (OSError, RuntimeError) as error:
                raise self.broken("connection of a group", first_line(error)) from error
        group = ProcessGroup(
            self.rank - first,
            len(part),
            self.device,
            self.timeout,
            self.patience,
            self._meeting,
            exchange,
            gpus,
            self._watch,
            part,
            name,
            self.shares_memory,
        )
        group.open_lane()
        return group

    def open_lane(self) -> None:
        """Share memory with the others, where all can; called by all of them, before or at the first exchange."""
        if not self._looked_for_lane and self.exchange is not None:
            self._looked_for_lane = True
            self._lane = Lane.open(self)

    def shared_buffer(self, dtype: torch.dtype, count: int, *, name: str = "values") -> SharedBuffer | None:
        """Return numbers that are exchanged again and again, in memory that the workers share; None where they share none.

        Args:
            dtype: of the numbers; there are shared buffers of float32, float64, bfloat16, int64 and int32.
            count: how many there are.
            name: what is exchanged, for messages.
        """
        import torch

        lane = self._lane_of(torch.empty(0))
        if lane is None or not lane.adds_up(dtype) or not count:
            return None
        files = Files.open(self, count * dtype.itemsize)
        return None if files is None else SharedBuffer(self, files, dtype, count, name, self._under_way)

    def shared_rows(self, count: int, *, name: str = "values") -> SharedRows | None:
        """Return ``count`` bytes that are shown to all workers again and again; None where they share no memory."""
        import torch

        if self._lane_of(torch.empty(0)) is None or not count:
            return None
        files = Files.open(self, count)
        return None if files is None else SharedRows(self, files, torch.uint8, count, f"all-gather of {name}")

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left."""
        return self.world_size > 1 and self.exchange is None

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
        if self.exchange is None or self._is_part:
            return
        atexit.unregister(self.close)
        shared_memory.leave()
        self._lane = None
        broken = self._watch is None or self._watch.cause() is not None
        if self._watch is not None:
            self._watch.stop()
        if self._gpus is not None:
            self._gpus.close(broken)
        if self._meeting is not None:
            self._meeting.close()
        self.exchange = None

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    @property
    def _run_rank(self) -> int:
        return self._members[self.rank]

    def _begin(self, begin: Callable[[Any], Any], name: str, tensor: torch.Tensor) -> Pending:
        self.count(name)
        on_cpu = tensor.device.type == "cpu"
        try:
            work = begin(self.exchange if on_cpu else self._gpus)
        except RuntimeError as error:
            raise self.broken(name, first_line(error)) from error
        return DONE if work is None else Work(functools.partial(self.finish, work, name, on_cpu))

    def count(self, name: str) -> None:
        """Enter that this worker has come to an exchange; refuses where it has left, or another is gone."""
        if self.exchange is None:
            raise EngineError(f"The {name}: this worker has left the group of workers (close): join it again, in a new run")
        self.check()
        if self._watch is not None:
            self._watch.operations += 1

    def finish(self, work: Any, name: str, on_cpu: bool) -> None:
        """Wait for an exchange that is under way, until its time is over.

        Raises:
            WorkerError: a worker is gone, or has not come to it in time.
        """
        if not on_cpu:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.broken(name, first_line(error)) from error
            return
        began = time.monotonic()
        while True:
            try:
                if work.wait(LOOK_UP_SECONDS):
                    return
            except DifferentError as error:
                raise self.at_odds(name) from error
            except OSError as error:
                raise self.broken(name, first_line(error)) from error
            self.check()
            if time.monotonic() > began + self.timeout:
                raise self.late(name, self.timeout)

    def broken(self, name: str, reason: str, ended: Sequence[int] = ()) -> WorkerError:
        """Find out who is gone, and tell all; returns the error that ends this worker.

        Args:
            name: the exchange.
            reason: what is known of it here.
            ended: ranks of this group whose processes run no more, as far as that is known.
        """
        cause = None if self._watch is None else self._watch.search([self._members[rank] for rank in ended])
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

    def _lane_of(self, tensor: torch.Tensor) -> Lane | None:
        """How small values are exchanged through memory; None where they go by the network."""
        if tensor.device.type != "cpu":
            return None
        self.open_lane()
        return self._lane

    def _ended(self, cause: str) -> str:
        return (
            f"{cause[0].upper()}{cause[1:]}. Rank {self._run_rank} stops too: resume from the last checkpoint, "
            "with as many workers as there are"
        )
