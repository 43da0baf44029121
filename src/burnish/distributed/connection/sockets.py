"""Connections between the processes of a run: who may come in, and messages of limited length.

Before anything else is read from a connection, each side proves that it knows the run's secret: both send a random challenge,
and a keyed hash (HMAC, RFC 2104) of the two, and of the rank that is called, answers it. All of this is of fixed length and has
an end in time, so that a stranger's garbage, silence or slow bytes cost one thread for a few seconds. What comes later is JSON:
nothing is unpickled.

Workers of one machine meet at sockets in a folder that only their owner can enter. There the system says whose process is at the
other end, and the secret is empty.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from burnish.errors import ConfigurationError
from burnish.untrusted import read_json

GREETING = b"burnish workers 1\n"
MESSAGE_BYTES = 2**20
"""The longest message."""
HANDSHAKE_SECONDS = 10.0
_CHALLENGE, _PROOF = 32, 32
_REFUSED = bytes(_PROOF)
# What the system has room for in the path of a socket, less the name of the socket in its folder.
_FOLDER_BYTES = 90

Address = str | tuple[str, int]
"""A socket's path, or host and port."""


class StrangerError(ConnectionError):
    """The process at the other end is not of this run."""


class SecretError(StrangerError):
    """The other end does not take this process's secret for that of the run."""


class Connection:
    """Messages to another process of the run and back: JSON-compatible values.

    Args:
        stream: a connected socket, both ends of which have proved to be of the run.
    """

    def __init__(self, stream: socket.socket):
        self.stream = stream

    def send(self, value: Any) -> None:
        """Send a message.

        Raises:
            ValueError: it is too long.
            OSError: the other end is gone.
        """
        content = json.dumps(value).encode()
        if len(content) > MESSAGE_BYTES:
            raise ValueError(f"a message of {len(content)} bytes, of which {MESSAGE_BYTES} are allowed")
        self.stream.sendall(struct.pack(">I", len(content)) + content)

    def receive(self, until: float | None = None) -> Any:
        """Return the next message.

        Args:
            until: when to give up, by the monotonic clock; None waits as long as the other end lives.

        Raises:
            StrangerError: it is too long, or no JSON.
            OSError: the other end is gone, or silent.
        """
        (length,) = struct.unpack(">I", read(self.stream, 4, until))
        if length > MESSAGE_BYTES:
            raise StrangerError(f"a message of {length} bytes, of which {MESSAGE_BYTES} are allowed")
        try:
            return read_json(read(self.stream, length, until))
        except ValueError as error:
            raise StrangerError("a message that is no JSON") from error

    def close(self) -> None:
        close(self.stream)


def dial(address: Address, secret: bytes, rank: int, until: float) -> Connection:
    """Connect to the process of a rank, and prove to each other that both are of the run.

    Raises:
        SecretError: it refuses the secret.
        StrangerError: what listens there is no process of this run.
        OSError: nothing listens there, or it is gone or silent.
    """
    seconds = max(0.01, until - time.monotonic())
    stream = socket.socket(socket.AF_UNIX) if isinstance(address, str) else socket.create_connection(address, seconds)
    try:
        if stream.family == socket.AF_UNIX:
            stream.settimeout(seconds)
            stream.connect(address)
            _check_owner(stream)
        else:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _introduce(stream, secret, rank, until)
    except BaseException:
        close(stream)
        raise
    stream.settimeout(None)
    return Connection(stream)


def admit(stream: socket.socket, secret: bytes, rank: int, until: float, known: Callable[[], bool]) -> Connection:
    """Let a process in that has connected to this rank and proves to be of the run.

    Args:
        stream: its connection.
        secret: of the run.
        rank: of this worker.
        until: when to give up, by the monotonic clock.
        known: called when it has proved it; False where it is to be sent away all the same, and may come again.

    Raises:
        StrangerError: it does not.
        OSError: it is gone or silent.
    """
    if stream.family == socket.AF_UNIX:
        _check_owner(stream)
    else:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    challenge = secrets.token_bytes(_CHALLENGE)
    stream.settimeout(max(0.01, until - time.monotonic()))
    stream.sendall(GREETING + challenge)
    answer = read(stream, _CHALLENGE + _PROOF, until)
    response, proof = answer[:_CHALLENGE], answer[_CHALLENGE:]
    if not hmac.compare_digest(proof, _proof(secret, "comes to", rank, challenge, response)):
        stream.sendall(_REFUSED)
        raise StrangerError("it does not know the secret")
    if not known():
        raise StrangerError("it has been sent away meanwhile")
    stream.sendall(_proof(secret, "is let in by", rank, challenge, response))
    return Connection(stream)


def _introduce(stream: socket.socket, secret: bytes, rank: int, until: float) -> None:
    greeting = read(stream, len(GREETING) + _CHALLENGE, min(until, time.monotonic() + HANDSHAKE_SECONDS))
    if not greeting.startswith(GREETING):
        raise StrangerError("it does not greet as a worker")
    challenge, response = greeting[len(GREETING) :], secrets.token_bytes(_CHALLENGE)
    stream.sendall(response + _proof(secret, "comes to", rank, challenge, response))
    proof = read(stream, _PROOF, min(until, time.monotonic() + HANDSHAKE_SECONDS))
    if proof == _REFUSED:
        raise SecretError("it refuses the secret")
    if not hmac.compare_digest(proof, _proof(secret, "is let in by", rank, challenge, response)):
        raise StrangerError("it does not know the secret")


def _proof(secret: bytes, what: str, rank: int, challenge: bytes, answer: bytes) -> bytes:
    return hmac.digest(secret, GREETING + f"{what} {rank}\n".encode() + challenge + answer, hashlib.sha256)


def read(stream: socket.socket, count: int, until: float | None) -> bytes:
    """Return ``count`` bytes, in whatever pieces they come.

    Raises:
        OSError: the other end is gone before, or they have not come in time.
    """
    content = bytearray()
    while len(content) < count:
        remaining = None if until is None else until - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise TimeoutError("timed out")
        stream.settimeout(remaining)
        piece = stream.recv(count - len(content))
        if not piece:
            raise ConnectionResetError("the other end has closed the connection")
        content += piece
    return bytes(content)


def close(stream: socket.socket) -> None:
    """Close a socket that no other thread uses: another connection may get its number at once."""
    end(stream)
    stream.close()


def end(stream: socket.socket) -> None:
    """End a connection, and what threads wait for at it; it is closed by the one that it belongs to."""
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _check_owner(stream: socket.socket) -> None:
    """Refuse another user's process at the other end, where the system tells whose it is."""
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if user != os.geteuid():
            raise StrangerError("it is another user's")


def check_folder(folder: Path) -> None:
    """See that workers can meet in a folder, and that nobody else can enter it; it is made where it is missing.

    Raises:
        ConfigurationError: it is another user's, or others may enter it, or it cannot be had.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError("Workers of one machine meet at unix sockets, which this system does not have")
    remedy = "name a folder of your own that nobody else can enter (chmod 700), on a local disk"
    if len(os.fsencode(folder)) > _FOLDER_BYTES:
        raise ConfigurationError(f"Workers cannot meet in '{folder}': its path is longer than {_FOLDER_BYTES} bytes: {remedy}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigurationError(f"Workers cannot meet in '{folder}' ({error.strerror}): {remedy}") from error
    if not stat.S_ISDIR(status.st_mode):
        reason = "is no folder"
    elif status.st_uid != os.geteuid():
        reason = f"belongs to another user ({status.st_uid})"
    elif status.st_mode & 0o077:
        reason = f"lets others in (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise ConfigurationError(f"Workers cannot meet in '{folder}', which {reason}: {remedy}")
