"""Fused kernels in C++, built once and kept in the user's cache.

They run on PyTorch's own thread pool. Without a compiler the engine goes on with ATen's operators, and says so once in the log.

A kernel is written so that the first run on a machine does not wait for it:

- Its file, ``<kernel>.cpp``, includes ``tensor.h`` and nothing else of PyTorch: that is PyTorch's stable interface, and
  compiles in a second. ``<torch/library.h>`` and ``<ATen/...>`` take five more.
- It ends in ``STABLE_TORCH_LIBRARY_IMPL(burnish, CPU, library) { library.impl("name", TORCH_BOX(&name)); }``. The schema of the
  operator stands in ``schemas.py``, so that graphs that call it are made while it is compiled.
- Files that belong together may call each other: all become one library. Each is compiled by itself, and again only when it, or a
  header, has changed.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from concurrent.futures import Future
from pathlib import Path

import torch

from burnish.engines.torch.kernels import schemas
from burnish.engines.torch.kernels.building import build_library, find_compiler

schemas.define()

_log = logging.getLogger("burnish")


def expected() -> bool:
    """Whether the kernels will be there once they are built: they are not switched off, and there is a compiler.

    Starts building them in the background. What depends on them may be prepared meanwhile; ``available`` waits for them.
    ``BURNISH_KERNELS=off`` in the environment goes without them.
    """
    if os.environ.get("BURNISH_KERNELS") == "off" or find_compiler() is None:
        return False
    _building()
    return True


@functools.cache
def available() -> bool:
    """Whether the kernels are there; waits for their building where they are not yet."""
    if os.environ.get("BURNISH_KERNELS") == "off":
        return False
    try:
        torch.ops.load_library(str(_building().result()))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        _log.warning("burnish: the fused kernels could not be built (%s); PyTorch's own operators run in their place", reason)
        return False
    return True


@functools.cache
def _building() -> Future[Path]:
    """The library, being built on a thread of its own: the compiler is another process, so that Python goes on."""
    built: Future[Path] = Future()

    def build() -> None:
        try:
            built.set_result(_build())
        except BaseException as error:
            built.set_exception(error)

    threading.Thread(target=build, name="burnish-kernels", daemon=True).start()
    return built


def _build() -> Path:
    return build_library(Path(__file__).parent)
