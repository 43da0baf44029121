"""The digest in every file of burnish, over all its bytes, which detects any changed bit.

The entry ``burnish.digest`` holds ``sha256:`` and 64 digits: the SHA-256 of the file with zeros in place of these digits. To
check it, search for the text in the file's bytes; nothing needs to be serialized again, in any language.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from burnish.errors import CheckpointError

DIGEST = "burnish.digest"
FORMAT_VERSION = 3
"""Format version of programs, checkpoints and all other files with a digest."""
BLANK = "sha256:" + "0" * 64
"""The text in the entry until the digest is known."""
_ENTRY, _BLANK = DIGEST.encode(), BLANK.encode()


def blank_place(content: bytes) -> int:
    """Return the offset of the entry's blank: the first one after the entry's name."""
    return content.index(_BLANK, content.index(_ENTRY))


def stamped(content: bytes) -> bytes:
    """Return the content of a file with its digest in place of the blank."""
    place = blank_place(content)
    return content[:place] + digest_text(hashlib.sha256(content)).encode() + content[place + len(_BLANK) :]


def digest_text(total: hashlib._Hash) -> str:
    """Return the text of the entry."""
    return "sha256:" + total.hexdigest()


def agrees(digest: Any, head: bytes, rest: Iterable[bytes | memoryview] = ()) -> bool:
    """Return True if a file is unchanged since it was written.

    Args:
        digest: value of its entry.
        head: its bytes up to some place after the entry.
        rest: the remaining bytes, in parts.
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
        found: version of the file.
        subject: kind and path of the file, for the message.
        remedy: how to recreate an older file.
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
