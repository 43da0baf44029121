"""Packages: a graph of a program compiled ahead of time into one file that runs without Python.

What compiles one belongs to an engine: a kind of package is found by the suffix of its file, and what makes it is imported when
the first one is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from burnish.errors import ConfigurationError, EngineError
from burnish.program import GRAPH_NAMES, Program

Packager = Callable[[Program, Path, str, Mapping[str, int], str], None]
PACKAGERS = {".pt2": "burnish.engines.torch.packaging:package"}
"""Suffix -> the function that writes such a file: (program, path, graph, extents, device)."""


def write_package(program: Program, path: Path, graph: str, extents: Mapping[str, int], device: str) -> Path:
    """Compile a graph into a file; see ``Program.package``."""
    if path.suffix not in PACKAGERS:
        raise ConfigurationError(f"'{path}': a package is one of the kinds {', '.join(PACKAGERS)}; give its path that suffix")
    if graph not in GRAPH_NAMES:
        raise ConfigurationError(f"graph: unknown '{graph}'; choose among {', '.join(map(repr, GRAPH_NAMES))}")
    dimensions = {name for entry in program.signature[graph].inputs for name in entry.extents if isinstance(name, str)}
    for name, extent in extents.items():
        if name not in dimensions:
            known = ", ".join(map(repr, sorted(dimensions))) or "none"
            raise ConfigurationError(f"extents: the {graph} graph has no dimension '{name}' to give an extent; it has {known}")
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 1:
            raise ConfigurationError(f"extents: '{name}' is {extent!r}: give a whole number of at least one")
    module, _, function = PACKAGERS[path.suffix].partition(":")
    try:
        packager = cast(Packager, getattr(importlib.import_module(module), function))
    except ImportError as error:
        raise EngineError(
            f"A package {path.suffix} cannot be made: {error}. Install what it needs (pip install {error.name or 'torch'})"
        ) from error
    packager(program, path, graph, extents, device)
    return path
