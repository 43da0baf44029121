"""Warnings that point at the line of the user's own code that led to them, however deep inside of burnish they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

LIBRARIES = ("site-packages", "dist-packages")
_OWN = Path(__file__).parent
_STANDARD = Path(sys.base_prefix) / "lib"


def is_users(filename: str) -> bool:
    """Tell whether a file, as a code object names it, belongs to the user: not to burnish nor to a library. A prompt does."""
    if filename.startswith("<"):
        return filename == "<stdin>"
    path = Path(filename)
    return not (set(LIBRARIES) & set(path.parts) or _OWN in path.parents or _STANDARD in path.parents)


def warn(warning: Warning) -> None:
    """Warn at the user's innermost line; at the line of this call if there is none, as in a thread of burnish's own."""
    level, frame = 2, sys._getframe(1)
    while not is_users(frame.f_code.co_filename) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level if is_users(frame.f_code.co_filename) else 2)
