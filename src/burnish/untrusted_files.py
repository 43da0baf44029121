"""Common parts of all readers of untrusted files: JSON and TOML, exceptions that mean damage, limits on memory and time."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from burnish.errors import BurnishError, ConfigurationError
from burnish.settings import memory_size
from burnish.stopping import TimePassed, within_time

Result = TypeVar("Result")

UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RecursionError, struct.error),
)
"""Exceptions that a damaged or hostile file can cause."""
DEEPEST = 100
"""Deepest nesting of lists and objects. Deeper values could exceed Python's recursion limit when copied or written."""
LARGEST = 64 << 20
"""Largest size of a settings or notes file, in bytes."""
SHARE = 8
"""Memory allowed per byte of a file, in bytes."""
LEAST = 1 << 30
SECONDS = 60.0
"""Reading time allowed per GiB of allowed memory."""
MEMORY_LIMIT = "BURNISH_MEMORY_LIMIT"
# CPython's bytes for an empty list, a small object, and a value or key with its slot.
_LIST, _OBJECT, _VALUE = 64, 184, 40


def allowed_memory(size: int) -> int:
    """Return the memory in bytes that reading a file may take: 8 per byte of the file, and at least 1 GiB.

    The environment variable ``BURNISH_MEMORY_LIMIT`` raises the limit.

    Raises:
        ConfigurationError: the variable is not a size.
    """
    least, text = max(LEAST, SHARE * size), os.environ.get(MEMORY_LIMIT)
    if text is None:
        return least
    limit = memory_size(text)
    if limit is None:
        raise ConfigurationError(f"{MEMORY_LIMIT} is {text!r}: write a number of bytes, such as 4GiB")
    return max(least, limit)


def memory_excess(needed: int, size: int | None = None) -> str | None:
    """Return the message that reading a file takes too much memory and how to raise the limit; None if it does not.

    Args:
        needed: memory in bytes.
        size: bytes of the file; None for a value without a file.
    """
    allowed = allowed_memory(size or 0)
    if needed <= allowed:
        return None
    held = "it" if size is None else f"a file of {size:,} bytes"
    return f"it takes {needed:,} bytes of memory, and {held} may take {allowed:,}; {if_trusted(-(-needed >> 30))}"


def if_trusted(gibibytes: int) -> str:
    """Return the part of a message that tells how to raise the limits."""
    return f"if you trust it, set {MEMORY_LIMIT} in the environment, such as {MEMORY_LIMIT}={gibibytes}GiB"


def allowed_seconds(size: int) -> float:
    """Return the time in seconds that reading a file may take: 60 per GiB of allowed memory.

    Args:
        size: bytes of the file.
    """
    return SECONDS * allowed_memory(size) / LEAST


def read_in_time(
    name: str, size: int, error: type[BurnishError], read: Callable[..., Result], *arguments: Any, **options: Any
) -> Result:
    """Call ``read(*arguments, **options)`` and return its result, within a time limit.

    Args:
        name: the file, for the message.
        size: bytes of the file.
        error: class of the error if time runs out.
        read: reads the file. It is stopped between two Python instructions.

    Raises:
        BurnishError: of class ``error``, if reading takes longer than ``allowed_seconds``.
    """
    seconds = allowed_seconds(size)
    try:
        return within_time(seconds, lambda: read(*arguments, **options))
    except TimePassed as passed:
        twice = -(-2 * allowed_memory(size) >> 30)
        raise error(
            f"{name}: reading it takes more than {seconds:,.0f} s, and a file of {size:,} bytes may take no longer; "
            f"{if_trusted(twice)}, for {SECONDS * twice:,.0f} s"
        ) from passed


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON; an object has a key twice; more than 100 lists and objects are nested; it takes too much
            memory; or it holds half of a character (a lone surrogate). Surrogates for the bytes of a file name that is not UTF-8
            are allowed.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    lists, objects = text.count("["), text.count("{")
    excess = memory_excess(_LIST * lists + _OBJECT * objects + _VALUE * (text.count(",") + text.count(":")), len(text))
    if excess is not None:
        raise ValueError(excess)
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(_too_deep()) from error
    # With fewer brackets it cannot be too deep, which saves a walk over the value.
    if lists + objects > DEEPEST:
        _check_depth(value)
    if r"\ud" in text or r"\uD" in text:
        _check_characters(value)
    return value


def read_json_file(path: Path, largest: int = LARGEST) -> Any:
    """Return the value in a file of JSON.

    Raises:
        OSError, ValueError: the file cannot be read, has more bytes than ``largest``, or ``read_json`` refuses its content.
    """
    return read_json(read_bytes(path, largest))


def read_toml_file(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        OSError, ValueError: the file cannot be read, or is not TOML in UTF-8.
    """
    return read_toml(read_bytes(path).decode("utf-8"))


def read_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        ValueError: it is not TOML, is too deep, or holds an integer of more than 64 bits.
    """
    import tomllib

    try:
        value = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(_too_deep()) from error
    _check_depth(value)
    _check_integers(value)
    return value


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return the content of a small file.

    Raises:
        OSError, ValueError: the file cannot be read, is a pipe or a device, or has more bytes than ``largest``.
    """
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it is larger than {largest:,} bytes")
    return content


def check_regular(path: Path) -> None:
    """Raise an OSError for an impossible file name, and for a pipe, socket or device: a reader might wait for ever.

    A missing file passes. Its reader reports it.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except ValueError as error:
        raise OSError(f"no file can have this name ({error})") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError("it is a pipe or a device, and a file is expected: write its content into a file")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ())
            if isinstance(part, dict | list)
        ]
        if not level:
            return
    raise ValueError(_too_deep())


def _check_integers(value: Any) -> None:
    """Raise ValueError for an integer of more than 64 bits: TOML has no others, and Python does not print all of them."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(part)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"it holds an integer of {value.bit_length():,} bits besides its sign, and TOML's have 63")


def _too_deep() -> str:
    return f"it holds more than {DEEPEST} lists and objects in one another"


def _check_characters(value: Any) -> None:
    """Raise UnicodeError, a ValueError, for half of a character in a text."""
    json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
