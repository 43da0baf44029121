"""The store that workers share: a few short texts by name, kept in the process of rank 0, and who has come to the run."""

from __future__ import annotations

import threading
from typing import Any

from burnish.distributed.connection.sockets import Connection, StrangerError


class StoreServer:
    """What workers of one meeting have entered; each of their connections is served by a thread of its own."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()
        self._world_size: int | None = None
        # Of those that have come, by rank: the connection that they hold meanwhile, and where they are reached.
        self._arrived: dict[int, tuple[Connection, list[Any]]] = {}
        self._complete = False

    def serve(self, connection: Connection, host: str | None) -> None:
        """Answer what a worker asks, until it leaves; ``host`` is where it is seen from here."""
        try:
            while True:
                operation, *arguments = connection.receive()
                with self._lock:
                    answer = self._answer(operation, arguments, connection, host)
                connection.send(answer)
        except (OSError, ValueError, TypeError, KeyError):
            pass  # it has left, or says what no worker does
        finally:
            connection.close()
            with self._lock:
                if not self._complete:
                    self._arrived = {rank: entry for rank, entry in self._arrived.items() if entry[0] is not connection}

    def _answer(self, operation: str, arguments: list[Any], connection: Connection, host: str | None) -> Any:
        values = self._values
        match operation, arguments:
            case "arrive", [int(rank), int(world_size), address]:
                return self._arrive(rank, world_size, connection, [host, address])
            case "members", [int(rank)]:
                if rank not in self._arrived or self._arrived[rank][0] is not connection:
                    return {"refused": f"another process has come as rank {rank}"}
                missing = [other for other in range(self._world_size or 0) if other not in self._arrived]
                self._complete = not missing
                return {"missing": missing, "addresses": [self._arrived[other][1] for other in sorted(self._arrived)]}
            case "set", [str(key), str(value)]:
                values[key] = value
                return None
            case "get", [str(key)]:
                return values.get(key)
            case "add", [str(key), int(amount)]:
                values[key] = str(int(values.get(key, "0")) + amount)
                return int(values[key])
            case "compare_set", [str(key), str(expected), str(desired)]:
                if values.get(key, expected) == expected:
                    values[key] = desired
                return values.get(key)
        raise StrangerError("a message that no worker sends")

    def _arrive(self, rank: int, world_size: int, connection: Connection, address: list[Any]) -> Any:
        if rank == 0:
            self._world_size = world_size
        if self._world_size is None or self._complete:
            return {"later": True}  # rank 0 is about to come, or has come to a run that is about to end
        if world_size != self._world_size:
            return {"refused": f"it is one of {world_size} workers, and rank 0 of {self._world_size}"}
        # The later one counts: a worker that was started again comes while the one before it may still seem to be connected.
        self._arrived[rank] = connection, address
        return {}


class Store:
    """A worker's connection to the store.

    All methods raise OSError where the store is gone.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._lock = threading.Lock()

    def ask(self, *request: Any, until: float | None = None) -> Any:
        """Return the store's answer to a request."""
        with self._lock:
            self._connection.send(request)
            return self._connection.receive(until)

    def set(self, key: str, value: str) -> None:
        """Enter a value."""
        self.ask("set", key, value)

    def get(self, key: str) -> str | None:
        """Return a value; None where none is entered."""
        value: str | None = self.ask("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 before, and return it."""
        return int(self.ask("add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> str | None:
        """Enter a value where none is entered or ``expected`` is; returns what is entered then."""
        value: str | None = self.ask("compare_set", key, expected, desired)
        return value

    def close(self) -> None:
        self._connection.close()
