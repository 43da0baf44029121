"""How workers find each other: what the environment says, and the store and the connections that they make by it.

Workers of one machine meet in a folder that only their owner can enter; those of several at a port of the first machine, and show
each other a secret. Ranks are given in the environment; nobody is asked for one.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.distributed.connection.exchange import Exchange
from burnish.distributed.connection.listener import Listener
from burnish.distributed.connection.sockets import (
    HANDSHAKE_SECONDS,
    Address,
    Connection,
    SecretError,
    StrangerError,
    check_folder,
    dial,
)
from burnish.distributed.connection.store import Store
from burnish.distributed.connection.watch import first_line, ranks
from burnish.errors import ConfigurationError, EngineError, WorkerError
from burnish.installing import install_command
from burnish.settings import is_natural_text

TIMEOUT_SECONDS = 60.0
FIRST_CONTACT_SECONDS = 300.0
FOLDER = "BURNISH_MEETING"
"""The environment variable with the folder in which workers of one machine meet."""
SECRET = "BURNISH_SECRET"
"""The environment variable with the secret that workers of several machines share."""
SECRET_CHARACTERS = 16
_RETRY_SECONDS = 0.1
_POLL_SECONDS = 0.05

# Where this process listens, until it ends: rank 0's store is asked for a while by those that leave later.
_listeners: dict[tuple[str, int, int], Listener] = {}
_meetings = 0


@dataclass(frozen=True)
class Place:
    """Where this worker stands among the others.

    Attributes:
        rank, world_size: in the run.
        local_rank: among the workers of this machine.
        folder: where workers of one machine meet; empty on several.
        host, port: where workers of several machines meet; empty and 0 on one.
        secret: that they show each other.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    folder: str = ""
    host: str = ""
    port: int = 0
    secret: bytes = field(default=b"", repr=False)

    @property
    def address(self) -> str:
        """The address of the store, for messages."""
        return self.folder or f"{self.host}:{self.port}"

    @classmethod
    def of_environment(cls) -> Place:
        """Read what a launcher sets; a worker alone where ``WORLD_SIZE`` is not set.

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
        if folder := os.environ.get(FOLDER, ""):
            return cls(rank, world_size, local_rank, str(Path(folder).absolute()))
        host, port = _text("MASTER_ADDR"), _number("MASTER_PORT", 1)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1  # at this one listens the store of torchrun
        return cls(rank, world_size, local_rank, "", host, port, secret_of_environment())


def secret_of_environment() -> bytes:
    """Return the secret of a run on several machines.

    Raises:
        ConfigurationError: there is none, or it is easily guessed.
    """
    secret = os.environ.get(SECRET, "")
    if len(secret) < SECRET_CHARACTERS:
        what = f"has {len(secret)} characters" if secret else "is not set"
        raise ConfigurationError(
            f"{SECRET} {what}: workers that meet at a port show each other a secret, so that no stranger is taken for one. Set "
            f"it to the same {SECRET_CHARACTERS} characters or more on every machine (openssl rand -hex 32); on one machine "
            f"start with 'burnish train --workers', or let workers meet in a folder of your own ({FOLDER})"
        )
    return os.fsencode(secret)


NO_TORCH = (
    "Several workers exchange their gradients as PyTorch's tensors, and PyTorch is not installed: "
    f"{install_command('torch')}, or train with one worker"
)


def check_torch() -> None:
    """Raise EngineError where PyTorch is not installed. It is not imported for that, which takes seconds."""
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


class Meeting:
    """Workers that have found each other.

    Attributes:
        place: of this worker.
        store: what they share.
    """

    def __init__(self, place: Place, number: int, listener: Listener, store: Store, addresses: Sequence[Address]):
        self.place, self.store = place, store
        self._number, self._listener, self._addresses = number, listener, addresses
        self._exchanges: list[Exchange] = []

    def open_store(self) -> Store:
        """Return another connection to the store.

        Raises:
            OSError: it cannot be had.
        """
        connection = self._dialled(0, time.monotonic() + TIMEOUT_SECONDS, lambda: None)
        connection.send(["store", self._number])
        return Store(connection)

    def connect_all(self, seconds: float) -> Exchange:
        """Connect all workers with each other within ``seconds``.

        Raises:
            WorkerError: one is not reached.
        """
        try:
            return self.connect("run", range(self.place.world_size), seconds, lambda: None)
        except OSError as error:
            raise WorkerError(
                f"The workers have met at {self.place.address}, but rank {self.place.rank} cannot connect with another: "
                f"{first_line(error)}. Open the ports between the machines: rank 0 listens on the port where they meet, the "
                "others on ports that their systems choose"
            ) from error

    def connect(self, group: str, members: Sequence[int], seconds: float, look_up: Callable[[], None]) -> Exchange:
        """Connect some of the workers with each other; all of them call this together.

        Args:
            group: a name that no other group of this meeting has.
            members: their ranks in the run.
            seconds: how long they may take to come.
            look_up: called now and then, to end the wait by an error.

        Raises:
            OSError: one has not come, or is not reached.
        """
        until = time.monotonic() + seconds
        place = members.index(self.place.rank)
        connections: dict[int, Connection] = {}
        try:
            for index, rank in enumerate(members):
                if index < place:
                    connections[index] = self._dialled(rank, until, look_up)
                    connections[index].send(["exchange", self._number, group, self.place.rank])
            for index, rank in enumerate(members):
                if index > place:
                    connections[index] = self._listener.taken(self._number, group, rank, until, look_up)
        except BaseException as error:
            for connection in connections.values():
                connection.close()
            if isinstance(error, OSError):
                raise OSError(f"{ranks([rank])}: {first_line(error)}") from error
            raise
        self._exchanges.append(Exchange(place, {index: connection.stream for index, connection in connections.items()}))
        return self._exchanges[-1]

    def close(self) -> None:
        """Close the connections of all groups, and the one to the store."""
        for exchange in self._exchanges:
            exchange.close()
        self._exchanges.clear()
        self.store.close()

    def _dialled(self, rank: int, until: float, look_up: Callable[[], None]) -> Connection:
        while True:
            try:
                return dial(self._addresses[rank], self.place.secret, rank, until)
            except OSError:
                if time.monotonic() > until:
                    raise
            look_up()
            time.sleep(_RETRY_SECONDS)


def meet(place: Place, first_contact: float) -> Meeting:
    """Reach the store, or keep it, and wait there until all workers have come.

    Args:
        place: where this worker stands.
        first_contact: seconds to wait for the others.

    Raises:
        ConfigurationError: others may enter the folder, or the secret is not that of the run.
        WorkerError: the store cannot be reached or made, or some have not come.
    """
    global _meetings
    until = time.monotonic() + first_contact
    listener = _listener(place)
    # Workers of one run join equally often, and nothing of an earlier meeting is found in a later one.
    _meetings += 1
    if place.rank == 0:
        store_address = listener.address
    elif place.folder:
        store_address = _path(place, 0)
    else:
        store_address = (place.host, place.port)
    failure: OSError | None
    while True:
        try:
            store = _arrived(place, store_address, listener, until)
            while store is not None:
                answer = store.ask("members", place.rank, until=until + HANDSHAKE_SECONDS)
                _check_taken(place, answer)
                if not (missing := answer["missing"]):
                    return Meeting(place, _meetings, listener, store, [_reached(place, *each) for each in answer["addresses"]])
                if time.monotonic() > until:
                    raise _not_met(place, first_contact, missing, None)
                time.sleep(_POLL_SECONDS)
            failure = None
        except SecretError as error:
            raise WorkerError(
                f"Rank {place.rank} is not let in at {place.address}: its {SECRET} is not that of rank 0. Set the same on every "
                "machine",
                comes_again=True,
            ) from error
        except OSError as error:
            failure = error
        if time.monotonic() > until:
            raise _not_met(place, first_contact, [], failure)
        time.sleep(_RETRY_SECONDS)


def _arrived(place: Place, address: Address, listener: Listener, until: float) -> Store | None:
    """A connection to the store, in which this worker is entered; None where that takes nobody now."""
    connection = dial(address, place.secret, 0, max(until, time.monotonic() + _RETRY_SECONDS))
    connection.send(["store", _meetings])
    store = Store(connection)
    reached_at = listener.address if isinstance(listener.address, str) else listener.address[1]
    answer = store.ask("arrive", place.rank, place.world_size, reached_at, until=until + HANDSHAKE_SECONDS)
    _check_taken(place, answer)
    return None if "later" in answer else store


def _check_taken(place: Place, answer: Any) -> None:
    if "refused" in answer:
        raise WorkerError(
            f"Rank {place.rank} is not let in at {place.address}: {answer['refused']}. Give every worker a rank of its own, and "
            "all the same number of workers",
            comes_again=True,
        )


def _not_met(place: Place, seconds: float, missing: Sequence[int], failure: OSError | None) -> WorkerError:
    if missing:
        return WorkerError(
            f"{ranks(missing).capitalize()} of {place.world_size} {'has' if len(missing) == 1 else 'have'} not come to "
            f"{place.address} in {seconds:g} s: see whether all workers were started, with the same address, and reach it"
        )
    if failure is None:
        return WorkerError(
            f"Rank {place.rank} waits at {place.address} for a run to begin, where one has all its workers: end that run, or "
            "choose another port"
        )
    if isinstance(failure, StrangerError | TimeoutError) and not place.folder:
        return WorkerError(
            f"Rank {place.rank} waits for rank 0 at {place.address}, where something answers that is no worker of this run: "
            "choose another port (MASTER_PORT; --master-port)"
        )
    whether = "all workers name this folder" if place.folder else "MASTER_ADDR and MASTER_PORT are reached from this machine"
    return WorkerError(
        f"Rank {place.rank} has not reached rank 0 at {place.address} in {seconds:g} s: {first_line(failure)}. See whether it "
        f"runs, and whether {whether}"
    )


def _listener(place: Place) -> Listener:
    """Return the listener of this process in this run; its first meeting opens it."""
    key = (place.folder or place.host, place.port, place.rank)
    if key in _listeners:
        return _listeners[key]
    if place.folder:
        check_folder(Path(place.folder))
    try:
        if place.folder:
            opened = Listener.on_path(_path(place, place.rank), place.secret, place.rank)
        else:
            opened = Listener.on_network(place.host, place.port if place.rank == 0 else 0, place.secret, place.rank)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        remedy = "Name another folder" if place.folder else "Choose another port (MASTER_PORT; --master-port)"
        raise WorkerError(f"Rank {place.rank} cannot wait for the others at {place.address}: {reason}. {remedy}") from error
    return _listeners.setdefault(key, opened)


def _path(place: Place, rank: int) -> str:
    return str(Path(place.folder) / str(rank))


def _reached(place: Place, host: str | None, address: str | int) -> Address:
    """Return the address at which this process reaches a worker: as the store sees it, or the store's own on its machine."""
    if place.folder:
        return str(address)
    return (host or place.host, int(address))


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
    if not is_natural_text(text) or int(text) < least:
        raise ConfigurationError(f"{name}={text}: it is to be a whole number of at least {least}. Start workers with torchrun")
    return int(text)
