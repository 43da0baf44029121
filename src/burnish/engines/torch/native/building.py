"""Finding of the libraries of kernels for PyTorch, or building of them (``burnish.engines.kernels.building``)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from burnish.engines.kernels import building, compiling

OLDEST_TORCH = (2, 10)
"""The first PyTorch whose stable interface has lists of tensors and parallel loops."""


def build_library(source: Path) -> Path:
    """Find the library of one source, or build it; returns the library's path.

    The source may include the headers beside it, and those that all kernels share.

    Raises:
        RuntimeError: PyTorch is too old, there is no compiler, or it refuses the file; the message begins with why.
        OSError: the cache cannot be written, or the compiler not started.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise RuntimeError(f"they need PyTorch {'.'.join(map(str, OLDEST_TORCH))} or later, and this is {torch.__version__}")
    headers = compiling.Headers(torch.__version__, _torch_folder() / "include")
    release = compiling.release_of(source, torch.__version__)
    circumstances = torch.__version__, str(_torch_folder())
    return building.build_library(source, release, circumstances, headers.flags, _link_flags(source))


def find_installed(source: Path) -> Path | None:
    """The library that the installation has built of a source as it is now, for such a processor, and where it includes PyTorch's
    headers, for this PyTorch; None where it has not."""
    return building.find_installed(source, compiling.release_of(source, torch.__version__))


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _link_flags(source: Path) -> list[str]:
    folder = _torch_folder() / "lib"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [f"-L{folder}", *(f"-l{name}" for name in compiling.linked_libraries(source)), *undefined]
