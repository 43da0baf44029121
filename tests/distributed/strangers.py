"""Somebody on the network of workers, who connects to every open port: garbage, what others sent, silence, floods."""

from __future__ import annotations

import random
import select
import socket
import struct
import sys
import time
from collections import defaultdict
from pathlib import Path

from network_namespaces import enter

_LISTENS = "0A"
_TCP = 6


def open_ports() -> list[tuple[str, int]]:
    """Where something listens in this network namespace."""
    found = []
    for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/thread-self/net/{file}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == _LISTENS:
                words = b"".join(struct.pack("=I", int(address[first : first + 8], 16)) for first in range(0, len(address), 8))
                host = socket.inet_ntop(family, words)
                found.append(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port, 16)))
    return found


def heard(sniffer: socket.socket, sent: dict[int, list[bytes]]) -> None:
    """Keep what others send to each port, as it comes by."""
    while True:
        try:
            packet = sniffer.recv(65536)
        except BlockingIOError:
            return
        header = (packet[0] & 15) * 4
        if packet[9] == _TCP and len(packet) > header + 20:
            port = struct.unpack("!H", packet[header + 2 : header + 4])[0]
            content = packet[header + (packet[header + 12] >> 4) * 4 :]
            if content and len(sent[port]) < 200:
                sent[port].append(content)


def main(namespace: str, seconds: float) -> None:
    """Attack for so long from the first open port on, or until the input ends.

    Prints how many connections were made, to how many ports, and how many of them were replays.
    """
    enter(namespace)
    draw = random.Random(namespace)
    sent: dict[int, list[bytes]] = defaultdict(list)
    sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    sniffer.setblocking(False)
    held: list[socket.socket] = []
    attacked, made, replayed = set(), 0, 0
    until = None
    while (until is None or time.monotonic() < until) and not select.select([sys.stdin], [], [], 0)[0]:
        heard(sniffer, sent)
        for place in open_ports():
            kind = draw.choice(["garbage", "replay", "silence", "flood"])
            for _ in range(50 if kind == "flood" else 1):
                try:
                    connection = socket.create_connection(place, 0.5)
                except OSError:
                    continue
                until = until or time.monotonic() + seconds
                attacked.add(place)
                made += 1
                connection.setblocking(False)
                try:
                    if kind == "replay" and sent[place[1]]:
                        first = draw.randrange(len(sent[place[1]]))
                        connection.send(b"".join(sent[place[1]][first : first + draw.randint(1, 20)]))
                        replayed += 1
                    elif kind in ("garbage", "flood"):
                        connection.send(draw.randbytes(draw.choice([1, 8, 9, 64, 4096])))
                except OSError:
                    pass
                held.append(connection)
        while len(held) > 300:
            held.pop(0).close()
        time.sleep(0.02)
    print(made, len(attacked), replayed)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
