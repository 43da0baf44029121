"""The digest that every file of burnish's own has, of all its bytes: a bit that has changed anywhere is found.

The entry ``burnish.digest`` holds ``sha256:`` and 64 digits: the SHA-256 of the file with zeros in place of these digits. Who
checks it looks for the text in the file's bytes and needs to write nothing again, whatever the language.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from burnish.errors import CheckpointError

DIGEST = "burnish.digest"
FORMAT_VERSION = 3
"""Of programs, checkpoints and all other files with a digest."""
BLANK = "sha256:" + "0" * 64
"""What stands in the entry until the digest is known."""
_ENTRY, _BLANK = DIGEST.encode(), BLANK.encode()


def blank_place(content: bytes) -> int:
    """Return where the blank of the entry begins: the first one after the entry's name."""
    return content.index(_BLANK, content.index(_ENTRY))


def stamped(content: bytes) -> bytes:
    """Return the content of a file with its digest in place of the blank."""
    place = blank_place(content)
    return content[:place] + digest_text(hashlib.sha256(content)).encode() + content[place + len(_BLANK) :]


def digest_text(total: hashlib._Hash) -> str:
    """Return what the entry holds."""
    return "sha256:" + total.hexdigest()


def agrees(digest: Any, head: bytes, rest: Iterable[bytes | memoryview] = ()) -> bool:
    """Return whether a file is as it was written.

    Args:
        digest: what its entry holds.
        head: its bytes up to some place after the entry.
        rest: the bytes after these, in parts.
    """
    if not isinstance(digest, str) or len(digest) != len(BLANK):
        return False
    place = head.find(digest.encode("utf-8", "replace"))
    if place < 0:
        return False
    total = hashlib.sha256(memoryview(head)[:place])
    total.update(_BLANK)
    total.update(memoryview(head)[place + len(_BLANK) :])
    for part in rest:
        total.update(part)
    return digest_text(total) == digest


def check_version(found: Any, subject: str, remedy: str) -> None:
    """Raise CheckpointError for a file of another format version.

    Args:
        found: the version that it has.
        subject: what it is, and its path, for the message.
        remedy: how an older one is made again.
    """
    version = int(found)
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{subject} is of format version {version}, and this burnish reads version {FORMAT_VERSION}: update burnish"
        )
    if version < FORMAT_VERSION:
        raise CheckpointError(
            f"{subject} is of format version {version}, and this burnish reads version {FORMAT_VERSION}: {remedy}"
        )
