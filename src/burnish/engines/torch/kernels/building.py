"""Building of the kernels: one compiler process and one library per source file.

What was built from the same source and headers, by the same compiler, for the same PyTorch and such a processor is found in the
cache. Files come there whole or not at all, and processes that want the same library at once build it once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

FLAGS = ("-std=c++20", "-fPIC", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
OLDEST_TORCH = (2, 10)
"""The first PyTorch whose stable interface has lists of tensors and parallel loops."""


@functools.cache
def find_compiler() -> str | None:
    """The path of the C++ compiler: the one that ``CXX`` names, else the system's; None where there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def build_library(source: Path) -> Path:
    """Build one source, which may include the headers beside it, or find what was built of it; returns the library's path.

    Raises:
        RuntimeError: PyTorch is too old, there is no compiler, or it refuses the file; the message begins with why.
        OSError: the cache cannot be written, or the compiler not started.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise RuntimeError(f"they need PyTorch {'.'.join(map(str, OLDEST_TORCH))} or later, and this is {torch.__version__}")
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler: install g++ or clang++, or name one in CXX")
    headers = [header.read_bytes() for header in sorted(source.parent.glob("*.h"))]
    digest = _digest(_circumstances(compiler), source.name, source.read_bytes(), *headers)
    cache = _cache()
    library = cache / f"burnish_{source.stem}_{digest[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f"{source.stem}.lock"):
        if not library.exists():
            flags = [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *_include_flags()]
            _write(library, [compiler, *flags, "-I", str(source.parent), "-shared", str(source), *_link_flags()])
    return library


def _write(target: Path, command: Sequence[str]) -> None:
    """Run a compiler, and put what it writes into its place once it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building_") as scratch:
        made = Path(scratch) / target.name
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise RuntimeError("\n".join([errors[0] if errors else f"{command[0]} ended with {done.returncode}", done.stderr]))
        os.replace(made, target)


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _include_flags() -> list[str]:
    include = _torch_folder() / "include"
    return ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def _link_flags() -> list[str]:
    folder = _torch_folder() / "lib"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [f"-L{folder}", "-ltorch_cpu", "-lc10", *undefined]


@functools.cache
def _circumstances(compiler: str) -> str:
    """All that a library depends on beside its sources."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return "\n".join((torch.__version__, str(_torch_folder()), compiler, version, platform.machine(), _processor(), *FLAGS))


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time in. Where there are no locks of files, several build the same, and the last one's file stays."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
