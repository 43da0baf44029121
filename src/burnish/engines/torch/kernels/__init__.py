"""Fused kernels in C++, built once and kept in the user's cache.

They run on PyTorch's own thread pool. Without a compiler the engine goes on with ATen's operators, and says so once in the log.

A kernel is written so that the first run on a machine does not wait for it:

- Its file, ``<kernel>.cpp``, includes ``tensor.h`` and nothing else of PyTorch: that is PyTorch's stable interface, and
  compiles in a second. ``<torch/library.h>`` and ``<ATen/...>`` take five more.
- It ends in ``STABLE_TORCH_LIBRARY_IMPL(burnish, CPU, library) { library.impl("name", TORCH_BOX(&name)); }``. The schema of the
  operator stands in ``schemas.py``, so that graphs that call it are made while it is compiled.
- Each file is compiled by itself, into a library of its own, and again only when it, or a header, has changed. A graph waits for
  those that it calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.fx

from burnish.engines.torch.kernels import schemas
from burnish.engines.torch.kernels.building import build_library, cores, find_compiler

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


def available(*names: str) -> bool:
    """Whether these kernels, named as their files, are there, or all of them; waits for their building where they are not yet."""
    if os.environ.get("BURNISH_KERNELS") == "off":
        return False
    try:
        for name in names or schemas.SCHEMAS:
            _load(name)
    except (OSError, RuntimeError, ImportError) as error:
        _warn(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        return False
    return True


def called(module: torch.fx.GraphModule) -> set[str]:
    """The kernels that a graph may call."""
    found: set[str] = set()
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            names = [str(node.target) for node in part.graph.nodes if node.op == "call_function"]
            found |= {schemas.KERNEL_OF[name.split(".")[1]] for name in names if name.startswith("burnish.")}
        elif part.__class__.__module__.startswith("burnish."):
            return set(schemas.SCHEMAS)  # what it calls is known when it runs
    return found


@functools.cache
def _load(name: str) -> None:
    torch.ops.load_library(str(_building()[name].result()))  # type: ignore[no-untyped-call]


@functools.cache
def _warn(reason: str) -> None:
    _log.warning("burnish: the fused kernels could not be built (%s); PyTorch's own operators run in their place", reason)


@functools.cache
def _building() -> dict[str, Future[Path]]:
    """The libraries, being built on threads of their own: compilers are other processes, so that Python goes on."""
    built: dict[str, Future[Path]] = {name: Future() for name in schemas.SCHEMAS}
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in built:
        waiting.put(name)

    def build() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name = waiting.get_nowait()
                try:
                    built[name].set_result(_build(name))
                except BaseException as error:
                    built[name].set_exception(error)

    for _ in range(min(len(built), cores())):
        threading.Thread(target=build, name="burnish-kernels", daemon=True).start()
    return built


def _build(name: str) -> Path:
    return build_library(Path(__file__).parent / f"{name}.cpp")
