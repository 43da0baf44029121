"""Packages that train a program, or run one of its graphs, without Python.

Each kind belongs to an engine, and is imported when it is first used: graphs compiled ahead of time by their file suffix, folders
with a client in another language by the name of the runtime.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from burnish.errors import ConfigurationError, EngineError
from burnish.installing import install_command
from burnish.program import GRAPH_NAMES, Program

Packager = Callable[[Program, Path, str, Mapping[str, int], str], None]
PACKAGERS = {".pt2": "burnish.engines.torch.packaging:package"}
"""Suffix -> the function that writes such a file: (program, path, graph, extents, device)."""
FolderPackager = Callable[[Program, Path], None]
RUNTIMES = {"c": "burnish.engines.onnxruntime.c_package:package"}
"""The name of a runtime -> the function that writes a folder for it: (program, folder)."""


def write_package(
    program: Program, path: Path, graph: str | None, extents: Mapping[str, int], device: str | None, runtime: str | None = None
) -> Path:
    """Write a package; see ``Program.package``."""
    if runtime is None:
        return _write_file(program, path, "step" if graph is None else graph, extents, "cpu" if device is None else device)
    if runtime not in RUNTIMES:
        raise ConfigurationError(f"runtime: unknown {runtime!r}; choose among {', '.join(map(repr, RUNTIMES))}, or leave it out")
    if graph is not None or extents or device is not None:
        raise ConfigurationError(
            f"runtime={runtime!r} packs all graphs of a program, for batches of any size and the processor: leave graph, extents "
            "and device out"
        )
    module, _, function = RUNTIMES[runtime].partition(":")
    cast(FolderPackager, getattr(importlib.import_module(module), function))(program, path)
    return path


def _write_file(program: Program, path: Path, graph: str, extents: Mapping[str, int], device: str) -> Path:
    if path.suffix not in PACKAGERS:
        raise ConfigurationError(
            f"'{path}': a package is one of the kinds {', '.join(PACKAGERS)}; give its path that suffix, "
            "or runtime='c' (--runtime c)"
        )
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
            f"A package {path.suffix} cannot be made: {error}. Install what it needs ({install_command(error.name or 'torch')})"
        ) from error
    packager(program, path, graph, extents, device)
    return path
