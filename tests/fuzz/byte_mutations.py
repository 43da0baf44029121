"""What is done to the bytes of a file."""

from __future__ import annotations

from collections.abc import Callable
from random import Random


def mutate_bytes(random: Random, data: bytes, others: Callable[[Random], bytes]) -> tuple[bytes, str]:
    """Return changed bytes, and what was done.

    Args:
        random: the source of chance.
        data: what is changed.
        others: gives the bytes of another file, to take a piece of.
    """
    content = bytearray(data)
    place = random.randrange(len(content) + 1)
    match random.randrange(7):
        case 0:
            del content[place:]
            return bytes(content), f"cut at byte {place}"
        case 1:
            length = random.randint(1, 16)
            content[place : place + length] = random.randbytes(length)
            return bytes(content), f"{length} random bytes at {place}"
        case 2:
            length = random.randint(1, 64)
            del content[place : place + length]
            return bytes(content), f"{length} bytes from {place} on are gone"
        case 3:
            length = random.randint(1, 256)
            content[place:place] = content[place : place + length]
            return bytes(content), f"{length} bytes from {place} on come twice"
        case 4:
            other = others(random)
            start = random.randrange(len(other) + 1)
            piece = other[start : start + random.randint(1, 300)]
            content[place : place + len(piece)] = piece
            return bytes(content), f"{len(piece)} bytes of another model at {place}"
    count = random.randint(1, 4)
    for _ in range(count if content else 0):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    return bytes(content), f"{count} flipped bits"
