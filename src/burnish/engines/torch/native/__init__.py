"""The engine's own kernels in C++, built when burnish is installed, or once at their first call and then cached.

Their shared headers are next to this file, their sources in ``bindings``. They run on PyTorch's own thread pool. Without a
compiler, the engine uses ATen's operators, and warns once (``KernelWarning``).

Kernels are written to compile quickly, so that the first run on a machine does not wait for them:

- A file ``<kernel>.cpp`` includes ``operators.h`` and nothing of PyTorch: that header declares the few functions of PyTorch's
  stable C interface that kernels call (``torch_interface.h``), and compiles in a third of a second. PyTorch's own headers of that
  interface take one and a half, ``<torch/library.h>`` and ``<ATen/...>`` five more.
- It ends in ``BURNISH_OPERATORS(CPU) { operators.implement<&name>("name"); }``. The schema of the operator is declared next to
  its caller (``declare_kernel``), so that graphs can be made while it is compiled.
- Each file is compiled separately, into its own library, when a graph first calls it, and again only after a change of the file
  or a header.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import torch.fx

from burnish.errors import KernelWarning
from burnish.kernels import building, compiling
from burnish.kernels.building import SWITCHED_OFF, cores, first_line, is_switched_off
from burnish.kernels.compiling import find_compiler
from burnish.warn import warn


class Use(IntEnum):
    """The number of programs that call a kernel: the most used ones are built first."""

    ALL = 0
    MOST = 1
    SOME = 2
    FEW = 3


@dataclass(frozen=True)
class Kernel:
    """A file that implements operators.

    Attributes:
        name: file name without its suffix.
        operators: names of the operators.
        use: number of programs that call it.
    """

    name: str
    operators: tuple[str, ...]
    use: Use


_kernels: dict[str, Kernel] = {}


def declare_kernel(name: str, *schemas: str, use: Use = Use.FEW, suffix: str = "") -> None:
    """Declare a kernel and define its operators; the implementation is loaded later.

    Args:
        name: name of its file.
        schemas: schemas of its operators, each with ``{}`` for the suffix of its name.
        use: number of programs that call it.
        suffix: suffix of the operators' names, for a kernel of another dtype or window size.

    Raises:
        ValueError: a kernel of this name is declared already.
    """
    if name in _kernels:
        raise ValueError(f"the kernel {name} is declared twice: give one of the two files another name")
    complete = [schema.replace("{}", suffix, 1) for schema in schemas]
    for schema in complete:
        _library().define(schema)  # type: ignore[no-untyped-call]
    _kernels[name] = Kernel(name, tuple(schema.partition("(")[0] for schema in complete), use)


def declared_kernels() -> tuple[str, ...]:
    """Return the names of all kernels, in build order."""
    return tuple(kernel.name for kernel in sorted(_kernels.values(), key=lambda kernel: kernel.use))


def kernel_of(operator: str) -> str:
    """Return the name of the kernel that implements an operator."""
    return next(kernel.name for kernel in _kernels.values() if operator in kernel.operators)


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("burnish", "FRAGMENT")  # type: ignore[no-untyped-call]


OLDEST_TORCH = (2, 10)
"""The first PyTorch whose stable interface has lists of tensors and parallel loops."""


def build_library(source: Path) -> Path:
    """Return the path of the library of one source, built if necessary.

    The source may include the headers in its folder, and those that all kernels share.

    Raises:
        RuntimeError: PyTorch is too old, there is no compiler, or it rejects the file; the message starts with the reason.
        OSError: the cache cannot be written, or the compiler cannot be started.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise RuntimeError(f"they need PyTorch {'.'.join(map(str, OLDEST_TORCH))} or later, and this is {torch.__version__}")
    headers = compiling.Headers(torch.__version__, _torch_folder() / "include")
    release = compiling.release_of(source, torch.__version__)
    circumstances = torch.__version__, str(_torch_folder())
    return building.build_library(source, release, circumstances, headers.flags, _link_flags(source))


def find_installed(source: Path) -> Path | None:
    """Return the library that the installation built from the current source, for this processor; None if there is none.

    If the source includes PyTorch's headers, the library must also be built for this PyTorch.
    """
    return building.find_installed(source, compiling.release_of(source, torch.__version__))


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _link_flags(source: Path) -> list[str]:
    folder = _torch_folder() / "lib"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [f"-L{folder}", *(f"-l{name}" for name in compiling.linked_libraries(source)), *undefined]


EARLY = ("elementwise", "allocator")
"""The kernels that all training graphs call, the slowest to compile first."""

_lock = threading.Lock()
_builds: dict[str, Future[Path]] = {}
_compilers = threading.BoundedSemaphore(cores())


def expected() -> bool:
    """True if the kernels are installed, or will be available once they are built.

    Starts to build those that all graphs call in the background; others are built when a graph calls them. Work that depends on
    them may continue; ``available`` waits for them. ``BURNISH_KERNELS=off`` in the environment disables them.
    """
    request(*EARLY)
    return is_obtainable("elementwise")


def is_obtainable(name: str) -> bool:
    """True if a kernel is installed, or can be built: kernels are enabled, and there is a compiler."""
    return not is_switched_off() and (find_compiler() is not None or find_installed(_source(name)) is not None)


def available(*names: str) -> bool:
    """True if these kernels (file names), or all of them, are available; waits for builds in progress."""
    if is_switched_off():
        return False
    try:
        wanted = names or declared_kernels()
        _requested(*wanted)
        for name in wanted:
            _load(name)
    except (OSError, RuntimeError, ImportError) as error:
        _warn(first_line(error))
        return False
    return True


def found() -> tuple[Path | None, str | None]:
    """Return the library that all training graphs call, or None and the reason why there is none; wait for its build."""
    if is_switched_off():
        return None, SWITCHED_OFF
    try:
        return library(EARLY[0]), None
    except (OSError, RuntimeError, ImportError) as error:
        return None, first_line(error)


def is_awaited(name: str) -> bool:
    """True while a kernel is being built."""
    with _lock:
        return name in _builds and not _builds[name].done()


def request(*names: str) -> None:
    """Start to build these kernels in the background, if possible; they may be requested while graphs run."""
    _requested(*filter(is_obtainable, names))


def called(module: torch.fx.GraphModule) -> set[str]:
    """Return the kernels that a graph may call."""
    found: set[str] = set()
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            names = [str(node.target) for node in part.graph.nodes if node.op == "call_function"]
            found |= {kernel_of(name.split(".")[1]) for name in names if name.startswith("burnish.")}
        elif part.__class__.__module__.startswith("burnish."):
            return set(declared_kernels())  # its calls are only known at run time
    return found


def for_elements(name: str, dtype: ir.DataType) -> Any:
    """Return the operator of this name for elements of a dtype: bfloat16 has separate libraries."""
    suffix = "_bfloat16" if dtype == ir.DataType.BFLOAT16 else ""
    return getattr(torch.ops.burnish, name + suffix).default


@functools.cache
def find_operator(name: str) -> Callable[..., Any] | None:
    """Return the operator of this name, or None if its kernel is not available; wait for its build."""
    return getattr(torch.ops.burnish, name).default if available(kernel_of(name)) else None


def library(name: str) -> Path:
    """Return the library of an available kernel."""
    (built,) = _requested(name)
    return built.result()


@functools.cache
def _load(name: str) -> None:
    torch.ops.load_library(str(library(name)))  # type: ignore[no-untyped-call]


@functools.cache
def _warn(reason: str) -> None:
    message = f"The kernels of the torch engine cannot be used: {reason}. PyTorch's own operators run instead"
    warn(KernelWarning(message))


def _requested(*names: str) -> list[Future[Path]]:
    """Return the libraries, built on separate threads: compilers are other processes, so that Python continues."""
    with _lock:
        for name in names:
            if name not in _builds:
                _builds[name] = Future()
                threading.Thread(target=_build_into, args=(name, _builds[name]), name="burnish-kernels", daemon=True).start()
        return [_builds[name] for name in names]


def _build_into(name: str, built: Future[Path]) -> None:
    with _compilers:
        try:
            built.set_result(_build(name))
        except BaseException as error:
            built.set_exception(error)


def _build(name: str) -> Path:
    return build_library(_source(name))


def _source(name: str) -> Path:
    return sources()[name]


@functools.cache
def sources() -> dict[str, Path]:
    """Return the file of each kernel by name; it is next to its caller."""
    return {path.stem: path for path in sorted(compiling.TORCH.rglob("*.cpp"))}
