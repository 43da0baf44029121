"""Fused kernels in C++, built once with PyTorch's extension mechanism and kept in the user's cache.

They run on PyTorch's own thread pool. Without a compiler the engine goes on with ATen's operators, and says so once in the log.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
from pathlib import Path

import torch

SOURCES = (
    "allocator.cpp",
    "batch_norm.cpp",
    "depthwise.cpp",
    "elementwise.cpp",
    "linear.cpp",
    "standardize.cpp",
    "winograd.cpp",
    "winograd_weights.cpp",
)
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
_log = logging.getLogger("burnish")


@functools.cache
def available() -> bool:
    """Whether the kernels are there; builds them where they are not yet.

    ``BURNISH_KERNELS=off`` in the environment goes without them.
    """
    if os.environ.get("BURNISH_KERNELS") == "off":
        return False
    try:
        _build()
    except (OSError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        _log.warning("burnish: the fused kernels could not be built (%s); PyTorch's own operators run in their place", reason)
        return False
    return True


def _build() -> None:
    """Build and load the library; what was built from the same sources, by the same PyTorch, on such a processor, is loaded."""
    from torch.utils import cpp_extension

    folder = Path(__file__).parent
    sources = [folder / name for name in SOURCES]
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.machine(), platform.processor(), _processor(), *FLAGS):
        digest.update(part.encode())
    for source in (*sources, *sorted(folder.glob("*.h"))):
        digest.update(source.read_bytes())
    name = f"burnish_kernels_{digest.hexdigest()[:16]}"
    build = _cache() / name
    build.mkdir(parents=True, exist_ok=True)
    library = build / f"{name}.so"
    if library.exists():
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        return
    cpp_extension.load(
        name, [str(source) for source in sources], extra_cflags=list(FLAGS), build_directory=str(build), is_python_module=False
    )


def _cache() -> Path:
    root = os.environ.get("BURNISH_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "burnish"


def _processor() -> str:
    """What instructions the processor has: a library built for another may not run on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")
