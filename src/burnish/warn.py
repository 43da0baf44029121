"""Warnings attributed to the line of user code that caused them, however deep inside burnish they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

LIBRARIES = ("site-packages", "dist-packages")
_OWN = Path(__file__).parent
_STANDARD = Path(sys.base_prefix) / "lib"


def is_users(filename: str) -> bool:
    """True if a code object's file belongs to the user, or is the interactive prompt, and not to burnish or a library."""
    if filename.startswith("<"):
        return filename == "<stdin>"
    path = Path(filename)
    return not (set(LIBRARIES) & set(path.parts) or _OWN in path.parents or _STANDARD in path.parents)


def warn(warning: Warning) -> None:
    """Warn at the user's innermost line, or at the line of this call if there is none, as in burnish's own threads."""
    level, frame = 2, sys._getframe(1)
    while not is_users(frame.f_code.co_filename) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level if is_users(frame.f_code.co_filename) else 2)
