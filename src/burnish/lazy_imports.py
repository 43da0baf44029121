"""Lazy imports of a package's public names: each is imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, defined_in: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Submodules are found too; ``__dir__`` lists ``__all__``. Assign them under ``if not TYPE_CHECKING``: type checkers believe
    that a package with ``__getattr__`` has every name. No name may equal that of a submodule, since importing a submodule sets
    the attribute of its name.

    Args:
        package: ``__name__`` of the package.
        defined_in: {submodule: the names that it defines, separated by spaces}.
    """
    modules = {name: f"{package}.{module}" for module, names in defined_in.items() for name in names.split()}

    def get(name: str) -> Any:
        value = getattr(import_module(modules[name]), name) if name in modules else _module(package, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sys.modules[package].__all__)


def _module(package: str, name: str) -> Any:
    path = f"{package}.{name}"
    if not name.startswith("_"):
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
    raise AttributeError(f"module '{package}' has no attribute '{name}'")
