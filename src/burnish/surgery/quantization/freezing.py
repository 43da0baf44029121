"""When observed ranges stay as they are, as a number or a text says it."""

from __future__ import annotations

import re
from typing import Any

from burnish.errors import ConfigurationError
from burnish.settings import is_natural_text, is_whole, read_number

SETTLED = 0.01
"""The part of its width within which a range has settled."""
_EPOCHS = re.compile(r"([0-9]{1,18}) epochs?")
_SETTLED = re.compile(r"settled(?::([0-9.eE+-]+))?")


def read_freezing(asked: int | str | None) -> dict[str, Any]:
    """Return what of ``Training`` is asked for; nothing for None.

    Args:
        asked: steps, as a number or its digits; ``2 epochs``; ``settled`` or ``settled:0.005``.

    Raises:
        ConfigurationError: it is none of these.
    """
    if asked is None:
        return {}
    if isinstance(asked, str) and is_natural_text(asked.strip()):
        asked = int(asked)
    if is_whole(asked) and asked >= 0:
        return {"freeze_after": int(asked)}
    text = asked.strip() if isinstance(asked, str) else ""
    if (epochs := _EPOCHS.fullmatch(text)) and int(epochs[1]) > 0:
        return {"freeze_epochs": int(epochs[1])}
    if settled := _SETTLED.fullmatch(text):
        try:
            part = SETTLED if settled[1] is None else read_number(settled[1])
        except ValueError:
            part = 0.0
        if 0 < part < 1:
            return {"settled": part}
    raise ConfigurationError(
        f"quantize: freeze_observers_after={asked!r}: give a whole number of steps, '2 epochs', or 'settled', with the part of "
        "its width that a range may still move by, 'settled:0.01'"
    )
