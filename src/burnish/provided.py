"""What the layers above a module do for it, by name.

A program has a method that saves it, and what saves programs is made of programs: neither can import the other. So
``burnish/__init__``, which is above both, enters in ``PROVIDED`` which function the method calls. It is imported when it is first
called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

PROVIDED: dict[str, str] = {}
"""The name of a method -> ``module:function``, which takes the object first."""


def provided(name: str) -> Callable[..., Any]:
    """Return the function that does the work of a method, by the name of the method."""
    module, _, attribute = PROVIDED[name].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function
