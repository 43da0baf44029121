"""The socket at which the other workers of a run reach this one, and the limits that it sets to strangers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable

from burnish.distributed.connection.sockets import HANDSHAKE_SECONDS, Address, Connection, admit, close, end
from burnish.distributed.connection.store import StoreServer

STRANGERS = 128
"""How many may be at the door at once; of more the one that has been there longest is sent away."""
LOOK_UP_SECONDS = 0.5
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Listener:
    """Lets in the processes of a run, and keeps the store for them where it is that of rank 0.

    A process says in its first message what it has come for: ``["store", meeting]``, or ``["exchange", meeting, group, rank]``,
    which waits until it is asked for.

    Args:
        server: a socket that is bound.
        secret: of the run.
        rank: of this worker.

    Attributes:
        address: where it is reached on this machine.
    """

    def __init__(self, server: socket.socket, secret: bytes, rank: int):
        self._server, self._secret, self._rank = server, secret, rank
        name = server.getsockname()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        self.address: Address = name if isinstance(name, str) else (host.get(name[0], name[0]), name[1])
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()
        self._lock = threading.Lock()
        self._stores: defaultdict[int, StoreServer] = defaultdict(StoreServer)
        self._arrived: dict[tuple[int, str, int], Connection] = {}
        self._arrival = threading.Condition()
        server.listen(STRANGERS)
        threading.Thread(target=self._listen, name="burnish-listener", daemon=True).start()

    @classmethod
    def on_network(cls, host: str, port: int, secret: bytes, rank: int) -> Listener:
        """Listen on a port; on the loopback alone where the run meets there, else on all interfaces.

        Raises:
            OSError: the port is taken.
        """
        if host in _LOOPBACK:
            family = socket.AF_INET6 if host == "::1" else socket.AF_INET
            return cls(socket.create_server(("::1" if host == "::1" else "127.0.0.1", port), family=family), secret, rank)
        if socket.has_dualstack_ipv6():
            return cls(socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True), secret, rank)
        return cls(socket.create_server(("", port)), secret, rank)

    @classmethod
    def on_path(cls, path: str, secret: bytes, rank: int) -> Listener:
        """Listen at a path, in a folder of the user's own; what an earlier process has left there is taken away.

        Raises:
            OSError: a process listens there.
        """
        server = socket.socket(socket.AF_UNIX)
        try:
            try:
                server.bind(path)
            except OSError:
                with socket.socket(socket.AF_UNIX) as other:
                    if other.connect_ex(path) == 0:
                        raise
                os.unlink(path)
                server.bind(path)
            return cls(server, secret, rank)
        except BaseException:
            server.close()
            raise

    def taken(self, meeting: int, group: str, rank: int, until: float, look_up: Callable[[], None]) -> Connection:
        """Return the connection that a rank has made for a group, as soon as it has.

        Args:
            meeting, group, rank: of what is waited for.
            until: when to give up, by the monotonic clock.
            look_up: called now and then, to end the wait by an error.

        Raises:
            TimeoutError: it has not come.
        """
        key = (meeting, group, rank)
        while True:
            with self._arrival:
                if key in self._arrived or self._arrival.wait_for(lambda: key in self._arrived, LOOK_UP_SECONDS):
                    return self._arrived.pop(key)
            look_up()
            if time.monotonic() > until:
                raise TimeoutError(f"rank {rank} has not come")

    def _listen(self) -> None:
        while True:
            try:
                stream, _ = self._server.accept()
            except OSError:
                time.sleep(0.05)  # too many files are open: those of strangers will be closed
                continue
            with self._lock:
                self._strangers[stream] = None
                oldest = self._strangers.popitem(last=False)[0] if len(self._strangers) > STRANGERS else None
            if oldest is not None:
                end(oldest)
            try:
                threading.Thread(target=self._receive, args=(stream,), name="burnish-visitor", daemon=True).start()
            except RuntimeError:  # no more threads are to be had
                self._leaves(stream)
                close(stream)

    def _receive(self, stream: socket.socket) -> None:
        until = time.monotonic() + HANDSHAKE_SECONDS
        try:
            # Who is let in is no stranger any more, and not sent away for others that come.
            connection = admit(stream, self._secret, self._rank, until, lambda: self._leaves(stream))
            purpose = connection.receive(until)
            stream.settimeout(None)
            match purpose:
                case ["store", int(meeting)] if self._rank == 0:
                    with self._lock:
                        store = self._stores[meeting]
                    store.serve(connection, _seen_at(stream))
                case ["exchange", int(meeting), str(group), int(rank)]:
                    with self._arrival:
                        self._arrived[meeting, group, rank] = connection
                        self._arrival.notify_all()
                case _:
                    connection.close()
        except OSError:
            self._leaves(stream)
            close(stream)

    def _leaves(self, stream: socket.socket) -> bool:
        """Take a socket from those of strangers; returns whether it was one."""
        with self._lock:
            return self._strangers.pop(stream, stream) is None


def _seen_at(stream: socket.socket) -> str | None:
    """The host of a peer, as it is seen from here; None on this machine."""
    if stream.family == socket.AF_UNIX:
        return None
    host = str(stream.getpeername()[0]).removeprefix("::ffff:")
    return None if host == "::1" or host.startswith("127.") else host
