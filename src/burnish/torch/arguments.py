"""What a module is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Examples as the arguments of a call, by position and by name: a tuple or list, a dictionary by name, or the only one."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
