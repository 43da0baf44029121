"""Whoever is not of a run and reaches its ports or its folder: garbage, silence, floods and guesses change nothing in it."""

from __future__ import annotations

import itertools
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from worker_processes import Workers, free_port, run, tell

from burnish.distributed import join
from burnish.distributed.connection import listener as listener_module
from burnish.distributed.connection import rendezvous
from burnish.distributed.connection.listener import Listener
from burnish.distributed.connection.nccl import torch_store
from burnish.distributed.connection.sockets import (
    GREETING,
    MESSAGE_BYTES,
    Connection,
    SecretError,
    StrangerError,
    check_folder,
    dial,
)
from burnish.distributed.connection.store import Store
from burnish.errors import ConfigurationError, WorkerError

SECRET = b"known to workers alone"
NOBODY = 65534
TCP_STORE_MAGIC = bytes([9]) + struct.pack("<I", 0x3C85F7CE)


def says_garbage(stream):
    stream.sendall(os.urandom(4096))


def says_too_much(stream):
    stream.sendall(struct.pack(">I", 2**31) + bytes(2**20))


def says_nothing(stream):
    time.sleep(0.2)


def says_a_byte_at_a_time(stream):
    for byte in os.urandom(96):
        stream.sendall(bytes([byte]))
        time.sleep(0.02)


def says_what_a_worker_said(stream):
    """An answer that was right for another challenge."""
    stream.sendall(b"a" * 64)


def speaks_to_the_store_of_torch(stream):
    stream.sendall(TCP_STORE_MAGIC + bytes([1]) + struct.pack("<Q", 3) + b"key" + struct.pack("<Q", 5) + b"value")


STRANGERS = [
    says_garbage,
    says_too_much,
    says_nothing,
    says_a_byte_at_a_time,
    says_what_a_worker_said,
    speaks_to_the_store_of_torch,
]


def what_a_stranger_hears(address, says) -> bytes:
    """All that is sent to a stranger until it is sent away."""
    with socket.create_connection(address, 600) as stream:
        heard = stream.recv(len(GREETING) + 32, socket.MSG_WAITALL)
        try:
            says(stream)
            while content := stream.recv(4096):
                heard += content
        except ConnectionError:
            pass
    return heard


@pytest.fixture
def door(monkeypatch) -> Listener:
    monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", 600.0)
    return Listener.on_network("127.0.0.1", 0, SECRET, 0)


def entered(door: Listener, secret: bytes = SECRET, rank: int = 0, seconds: float = 600) -> Store:
    connection = dial(door.address, secret, rank, time.monotonic() + seconds)
    connection.send(["store", 1])
    return Store(connection)


@pytest.mark.parametrize("says", STRANGERS, ids=lambda says: says.__name__)
def test_a_stranger_hears_a_greeting_and_is_sent_away(door, says, monkeypatch):
    store = entered(door)
    monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", 0.5)
    heard = what_a_stranger_hears(door.address, says)  # which ends when it is sent away
    assert heard.startswith(GREETING)
    assert heard[len(GREETING) + 32 :] in (b"", bytes(32))  # no, and nothing else
    store.set("key", "value")
    assert store.get("key") == "value"


def test_who_has_another_secret_or_calls_another_rank_is_not_let_in(door):
    with pytest.raises(SecretError):
        entered(door, b"known to others")
    with pytest.raises(SecretError):  # as when somebody hands a worker's words on to another one
        entered(door, rank=1)


def test_who_only_seems_to_be_the_run_gets_no_message():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def seem() -> None:
            for reply in (bytes(range(32)), b"HTTP/1.1 400 Bad Request" + bytes(32)):
                stream, _ = server.accept()
                with stream, suppress(ConnectionError):
                    stream.sendall(GREETING + bytes(32) if reply[0] == 0 else reply)
                    said.append(stream.recv(1000))
                    stream.sendall(reply)

        said: list[bytes] = []
        thread = threading.Thread(target=seem, daemon=True)
        thread.start()
        for _ in range(2):
            with pytest.raises(StrangerError):
                dial(server.getsockname(), SECRET, 0, time.monotonic() + 600)
        thread.join(600)
    assert [len(each) for each in said] == [64, 0]  # a proof for its challenge, and nothing for what does not greet
    assert SECRET not in b"".join(said)


def test_more_strangers_than_there_is_room_for_send_each_other_away(door):
    before = threading.active_count()
    crowd = [socket.create_connection(door.address) for _ in range(3 * listener_module.STRANGERS)]
    try:
        assert entered(door).add("number", 3) == 3
        until = time.monotonic() + 600
        while threading.active_count() > before + listener_module.STRANGERS + 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() <= before + listener_module.STRANGERS + 1
        crowd[0].settimeout(600)
        assert crowd[0].recv(1000)
        assert crowd[0].recv(1000) == b""  # the first is gone, the last may still speak
        assert len(crowd[-1].recv(1000)) == len(GREETING) + 32
        crowd[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            crowd[-1].recv(1)
    finally:
        for stream in crowd:
            stream.close()


def test_who_has_been_let_in_is_not_sent_away_for_strangers(door, monkeypatch):
    monkeypatch.setattr(listener_module, "STRANGERS", 1)
    connection = dial(door.address, SECRET, 0, time.monotonic() + 600)
    crowd = [socket.create_connection(door.address) for _ in range(5)]
    try:
        while crowd[3].recv(1000):  # until it is sent away for the last one
            pass
        connection.send(["store", 1])
        assert Store(connection).add("number", 3) == 3
    finally:
        for stream in crowd:
            stream.close()


@pytest.mark.parametrize(
    "message",
    [
        struct.pack(">I", MESSAGE_BYTES + 1),
        struct.pack(">I", 3) + b"{[}",
        struct.pack(">I", 9) + b'["leave"]',
        struct.pack(">I", 2) + b"12",
        struct.pack(">I", 13) + b'["set", 1, 2]',
        struct.pack(">I", 200_000) + b"[" * 200_000,
    ],
)
def test_what_no_worker_says_ends_its_own_connection_alone(door, message):
    store, other = entered(door), entered(door)
    other._connection.stream.sendall(message)
    assert other._connection.stream.recv(100) == b""
    store.set("key", "value")
    assert store.get("key") == "value"
    with pytest.raises(ValueError, match=r"a message of \d+ bytes, of which 1048576 are allowed"):
        store.set("key", "a" * MESSAGE_BYTES)


def _trains(rank, times):
    with join(timeout=600, first_contact=600, share_memory=False) as group:
        tell("joined")
        total = torch.zeros(40_000)
        for step in range(times):
            total += group.all_reduce(torch.full((40_000,), float(rank + step)))
            if step % 10 == 0:
                group.barrier()
            time.sleep(0.03)
        part = group.twin()
        return total.sum().item(), part.all_reduce(torch.ones(3)).sum().item()


def test_a_run_among_strangers_is_as_it_would_be_alone():
    port, over = free_port(), threading.Event()

    def crowd(says):
        while not over.is_set():
            try:
                what_a_stranger_hears(("127.0.0.1", port), says)
            except OSError:
                time.sleep(0.01)

    threads = [threading.Thread(target=crowd, args=(says,), daemon=True) for says in STRANGERS for _ in range(2)]
    for thread in threads:
        thread.start()
    idle = []
    try:
        with Workers(_trains, 3, 60, environment={"MASTER_PORT": str(port)}) as workers:
            workers.message(0)
            with suppress(ConnectionError):  # the run may be over before all have come
                for _ in range(300):
                    idle.append(socket.create_connection(("127.0.0.1", port)))
            outcomes = workers.outcomes()
    finally:
        over.set()
        for stream in idle:
            stream.close()
    expected = float(sum(3 * step + 3 for step in range(60)) * 40_000), 9.0
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(expected, None)] * 3


def test_the_store_of_torch_finds_nothing_at_the_port_of_a_run(door):
    """What a stranger rewrote to have it unpickled by the agents of torchrun."""
    with pytest.raises(RuntimeError):
        torch.distributed.TCPStore(*door.address, None, False, timedelta(seconds=2), wait_for_workers=False)


def _refused_or_out_of_time(refusal: Path) -> WorkerError:
    """The error of joining in a process that has ten minutes, which are over when another one has been refused.

    The clock is first asked when the ten minutes begin, which may be after that.
    """
    asked = itertools.count()

    def monotonic() -> float:
        return time.monotonic() + (3600 if next(asked) and refusal.exists() else 0)

    rendezvous.time = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    with pytest.raises(WorkerError) as raised:
        join(first_contact=600)
    refusal.touch()
    return raised.value


def _comes_with(rank, secrets, refusal):
    os.environ["BURNISH_SECRET"] = secrets[rank]
    error = _refused_or_out_of_time(refusal)
    return str(error), error.comes_again, refusal.exists()


def test_a_wrong_secret_is_an_error_where_it_is_wrong_and_does_not_end_the_others(tmp_path):
    first, second = run(_comes_with, 2, ["the secret of the run", "another secret of ours"], tmp_path / "refused")
    assert second[0].startswith("Rank 1 is not let in at 127.0.0.1:")
    assert "its BURNISH_SECRET is not that of rank 0. Set the same on every machine" in second[0]
    assert second[1]
    assert first[0].startswith("Rank 1 of 2 has not come to 127.0.0.1:")
    assert not first[1]
    assert first[2], "it has waited until its time was over"


def _comes_as(rank, ranks, sizes, refusal):
    os.environ.update({"RANK": ranks[rank], "WORLD_SIZE": sizes[rank]})
    return str(_refused_or_out_of_time(refusal))


@pytest.mark.parametrize(
    ("ranks", "sizes", "reason"),
    [
        (["0", "1", "1"], ["4"] * 3, r"another process has come as rank 1"),
        (["0", "1", "2"], ["4", "4", "3"], r"it is one of 3 workers, and rank 0 of 4"),
    ],
)
def test_workers_that_contradict_each_other_are_told(ranks, sizes, reason, tmp_path):
    results = run(_comes_as, 3, ranks, sizes, tmp_path / "refused")
    (refused,) = [text for text in results if "is not let in at 127.0.0.1:" in text]
    assert re.search(reason, refused)
    assert "Give every worker a rank of its own, and all the same number of workers" in refused
    assert all("in 600 s: " in text for text in results if text != refused)


def _meets(rank, folder):
    os.environ["BURNISH_MEETING"] = folder
    with join(timeout=600, first_contact=600) as group:
        listening = [
            line for kind in ("tcp", "tcp6", "udp", "udp6") for line in own_sockets(Path(f"/proc/self/net/{kind}").read_text())
        ]
        return listening, group.all_reduce(torch.ones(100_000)).sum().item()


def own_sockets(table: str) -> list[str]:
    """The lines of a table of the system that are of sockets of this process."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    return [line for line in table.splitlines()[1:] if line.split()[9] in inodes]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux lists the sockets of a process")
def test_workers_that_meet_in_a_folder_have_no_network_address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meeting") / "own"
    assert run(_meets, 3, str(folder)) == [([], 300_000.0)] * 3
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    folder = tmp_path / "meeting"
    check_folder(folder)
    check_folder(folder)
    for mode in (0o710, 0o701, 0o777):
        folder.chmod(mode)
        with pytest.raises(ConfigurationError, match=rf"which lets others in \(mode {mode:o}\): name a folder of your own"):
            check_folder(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigurationError, match=r"link', which is no folder"):
        check_folder(tmp_path / "link")
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(ConfigurationError, match=r"file' \(File exists\)"):
        check_folder(tmp_path / "file")
    with pytest.raises(ConfigurationError, match=r"No such file or directory"):
        check_folder(tmp_path / "missing" / "meeting")
    with pytest.raises(ConfigurationError, match=r"its path is longer than 90 bytes"):
        check_folder(tmp_path / ("a" * 90))


def test_a_folder_that_others_can_enter_is_refused_by_join(tmp_path, monkeypatch):
    (tmp_path / "meeting").mkdir(mode=0o755)
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "BURNISH_MEETING": str(tmp_path / "meeting")}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError, match=r"which lets others in \(mode 755\)"):
        join(first_contact=1)


root_alone = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as another user")


@root_alone
def test_the_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "meeting"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ConfigurationError, match=rf"which belongs to another user \({NOBODY}\)"):
        check_folder(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder of this user alone, in one that everybody can enter, as the launcher makes it."""
    with tempfile.TemporaryDirectory(prefix="burnish-") as name:
        yield Path(name)


STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
for attempt in (lambda: os.listdir({folder!r}), lambda: socket.socket(socket.AF_UNIX).connect({path!r})):
    try:
        attempt()
    except PermissionError:
        print("kept out")
"""


@root_alone
def test_another_user_cannot_enter_the_folder(folder):
    path = str(folder / "0")
    Listener.on_path(path, b"", 0)
    code = STRANGER.format(nobody=NOBODY, folder=str(folder), path=path)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["kept out"] * 2


@root_alone
@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the system does not tell whose process it is")
def test_another_user_in_the_folder_all_the_same_is_sent_away(folder):
    """As when the mode of the folder was changed later."""
    path = str(folder / "0")
    Listener.on_path(path, b"", 0)
    folder.chmod(0o755)
    os.chmod(path, 0o777)
    code = f"""
import os, socket
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
stream = socket.socket(socket.AF_UNIX)
stream.connect({path!r})
print(stream.recv(100))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "b''"
    assert isinstance(dial(path, b"", 0, time.monotonic() + 600), Connection)


def test_what_an_ended_process_left_in_the_folder_is_taken_away(tmp_path):
    path = str(tmp_path / "0")
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()
    Listener.on_path(path, b"", 0)
    with pytest.raises(OSError, match=r"in use"):
        Listener.on_path(path, b"", 0)


def _by_gloo(rank):
    """The store that NCCL's processes find each other by, asked by another library of the kind."""
    distributed = torch.distributed
    meeting = rendezvous.meet(rendezvous.Place.of_environment(), 60)
    distributed.init_process_group("gloo", store=torch_store(meeting, 30), rank=rank, world_size=2)
    tensor = torch.ones(3)
    distributed.all_reduce(tensor)
    distributed.all_reduce(tensor, group=distributed.new_group([0, 1]))
    distributed.barrier()
    distributed.destroy_process_group()
    return tensor.tolist()


def test_the_store_serves_the_libraries_of_torch():
    assert run(_by_gloo, 2) == [[4.0, 4.0, 4.0]] * 2
