"""Compile kernel files, and name their libraries.

Imports nothing of burnish or PyTorch: the installation runs it without either.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
"""The folder of the headers for kernels of all engines."""
TORCH = KERNELS.parent / "engines" / "torch"
ONNXRUNTIME = KERNELS.parent / "engines" / "onnxruntime"
BUILT = KERNELS / "built"
"""The folder of the libraries that the installation built."""

# For some processors, GCC splits the fused operations of a single sum, but not of several sums: the last row of a block would be
# rounded differently from the same row of a larger one.
ALL_FUSED = "--param=avoid-fma-max-bits=0"
# Names are hidden, so that two libraries of one source in one process (an installed and a newer one) share nothing.
FLAGS = ("-std=c++20", "-fPIC", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fvisibility=hidden", ALL_FUSED)
NEEDS_HEADERS = frozenset({"allocator", "autograd_node"})
"""Files that include headers of PyTorch, and so are compiled for one release of it, if it is installed."""
NEEDS_PYTHON = frozenset({"autograd_node"})
"""Files among these that also include Python's headers, and so are compiled for one version of it."""


@dataclass(frozen=True)
class Headers:
    """The headers of PyTorch and of this Python.

    Attributes:
        version: version of PyTorch with its local part, such as ``2.13.0+cpu``.
        folder: folder of the headers.
    """

    version: str
    folder: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags to find the headers."""
        folders = (self.folder, self.folder / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include"))
        return tuple(flag for folder in folders for flag in ("-isystem", str(folder)))


def find_headers() -> Headers | None:
    """Return the headers of PyTorch in this Python's environment, even if an isolated build hides it; None if there are none."""
    return next(filter(None, (headers_in(Path(sysconfig.get_path(name))) for name in ("purelib", "platlib"))), None)


def headers_in(packages: Path) -> Headers | None:
    """Return the headers of PyTorch in a folder of packages."""
    folder = packages / "torch"
    if (folder / "include").is_dir() and (folder / "version.py").is_file():
        for statement in ast.parse((folder / "version.py").read_text(encoding="utf-8")).body:
            match statement:
                case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))):
                    return Headers(version, folder / "include")
    return None


@dataclass(frozen=True)
class Instructions:
    """The instruction set of a library.

    Attributes:
        name: part of library names.
        title: the usual name, such as ``avx512``.
        machine: kind of processor, as in ``platform.machine``.
        flags: flags of the compiler.
        needed: Linux's names of the instructions beyond the baseline of this kind.
    """

    name: str
    title: str
    machine: str
    flags: tuple[str, ...]
    needed: frozenset[str]

    def runs_here(self) -> bool:
        """True if this machine's processor has the instructions."""
        return self.machine == platform.machine() and self.needed <= set(processor().split())


_SSE4 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
_AVX2 = f"{_SSE4} abm avx2 bmi1 bmi2 f16c fma movbe"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
_AVX512_BF16 = f"{_AVX512} avx512_bf16"
LEVELS = (
    Instructions(
        "x86-64-v4-bf16",
        "avx512_bf16",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512bf16"),
        frozenset(f"{_AVX512} avx512_bf16".split()),
    ),
    Instructions("x86-64-v4", "avx512", "x86_64", ("-march=x86-64-v4",), frozenset(_AVX512.split())),
    Instructions("x86-64-v3", "avx2", "x86_64", ("-march=x86-64-v3",), frozenset(_AVX2.split())),
    Instructions("x86-64-v2", "sse4.2", "x86_64", ("-march=x86-64-v2",), frozenset(_SSE4.split())),
    Instructions("armv8-a", "neon", "aarch64", ("-march=armv8-a",), frozenset()),
)
"""The levels of a distribution: with AVX-512, AVX2 or SSE4.2, and with NEON, which every 64-bit Arm processor has. The best come
first: a processor takes the first that it has.
"""


def native() -> Instructions:
    """Return the best level of this machine's processor; all of its instructions, if it is of another kind.

    With levels, an installation also works on other machines, like the image of a container, and after an update of Linux, which
    lists more instructions. Kernels use nothing beyond the levels.
    """
    every = Instructions(f"native {processor()}", platform.machine(), platform.machine(), ("-march=native",), frozenset())
    return next((level for level in LEVELS if level.runs_here()), every)


def cpu_level() -> str:
    """Return the usual name of this processor's best level, such as ``avx512``; else its kind."""
    return native().title


@functools.cache
def processor() -> str:
    """Return the names of this processor's instructions, separated by spaces; empty if Linux does not list them."""
    return _cpu_information("flags", "Features")


@functools.cache
def model_name() -> str:
    """Return the processor's own name."""
    return _cpu_information("model name") or platform.processor() or platform.machine()


def _cpu_information(*names: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = next((line for line in lines if line.startswith(names)), "")
    return found.partition(":")[2].strip()


@functools.cache
def find_compiler() -> str | None:
    """Return the path of the C++ compiler from ``CXX`` or the system; None if there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def release_of(source: Path, torch_version: str) -> tuple[str, ...]:
    """Return the PyTorch release and the Python version of a source's library, if the source includes their headers."""
    python = (str(sysconfig.get_config_var("SOABI")),) if source.stem in NEEDS_PYTHON else ()
    return ((torch_version,) if source.stem in NEEDS_HEADERS else ()) + python


def header_folders(source: Path) -> tuple[Path, ...]:
    """Return the folders of the headers of a source, of all kernels, and of its engine."""
    engine = ONNXRUNTIME if _is_for_onnxruntime(source) else TORCH
    families = [
        KERNELS / family for family in ("elementwise", "normalization", "softmax", "convolution", "recurrent", "indexing")
    ]
    return tuple(dict.fromkeys((source.resolve().parent, KERNELS, *families, engine / "native")))


def parts_of(source: Path) -> tuple[Path, ...]:
    """Return the parts of a source: files in the folder of its name, compiled separately and linked with it."""
    return tuple(sorted((source.parent / source.stem).glob("*.cpp")))


def find_sources(folder: Path) -> list[Path]:
    """Return the sources in a folder with a library each: all files except the parts of others."""
    files = sorted(folder.rglob("*.cpp"))
    parts = {part for source in files for part in parts_of(source)}
    return [source for source in files if source not in parts]


def _is_for_onnxruntime(source: Path) -> bool:
    return source.resolve().is_relative_to(ONNXRUNTIME)


def linked_libraries(source: Path) -> tuple[str, ...]:
    """Return the names of PyTorch's libraries that the library of a source calls, for the linker."""
    if _is_for_onnxruntime(source):
        return ()  # ONNX Runtime passes its functions when it loads the library
    return ("torch_cpu", "c10", "torch_python") if source.stem in NEEDS_PYTHON else ("torch_cpu", "c10")


def contents_of(source: Path) -> bytes:
    """Return a digest of the names and contents of a source, its parts and its possible headers.

    It does not depend on paths: the installation names sources from the project's folder, and a session from the installed
    package.
    """
    source = source.resolve()
    headers = {header for folder in header_folders(source) for header in folder.glob("*.h")}
    files = sorted((file.name, file.read_bytes()) for file in {source, *parts_of(source), *headers})
    return _digest(part for name, content in files for part in (name.encode(), content)).digest()


def library_name(source: Path, instructions: Instructions, *circumstances: str, contents: bytes | None = None) -> str:
    """Return the name of a source's library; it changes with the source, its parts, the headers and the flags.

    ``contents`` is the result of ``contents_of`` for the source, if known.
    """
    described = [*circumstances, instructions.machine, instructions.name, *FLAGS, *instructions.flags]
    digest = _digest([*(text.encode() for text in described), contents or contents_of(source)])
    return f"burnish_{source.stem}_{digest.hexdigest()[:16]}.so"


def _digest(parts: Iterable[bytes]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest


def compile_library(
    source: Path, target: Path, compiler: str, instructions: Instructions, preprocessing: Sequence[str], linking: Sequence[str]
) -> None:
    """Compile a source, and move its library into place when it is complete.

    Raises:
        RuntimeError: the compiler rejects the file; the message starts with the reason.
        OSError: the compiler cannot be started, or the library cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building_") as scratch:
        made = Path(scratch) / target.name
        folders = [flag for folder in header_folders(source) for flag in ("-I", str(folder))]
        flags = [*FLAGS, *instructions.flags, *preprocessing, *folders]
        parts = parts_of(source)
        if not parts:
            _run(compiler, *flags, "-shared", str(source), *linking, "-o", str(made))
        else:
            objects = {file: str(Path(scratch) / f"{file.stem}.o") for file in (source, *parts)}
            with ThreadPoolExecutor(min(len(objects), os.cpu_count() or 1)) as pool:
                list(pool.map(lambda file: _run(compiler, *flags, "-c", str(file), "-o", objects[file]), objects))
            _run(compiler, "-shared", *objects.values(), *linking, "-o", str(made))
        made.chmod(0o755)  # independent of the umask: files that others can write are not loaded from a cache
        replace_durably(made, target)


def replace_durably(made: Path, target: Path) -> None:
    """Move a complete file into place, so that a power cut leaves the whole file there or none."""
    with made.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(made, target)
    if hasattr(os, "O_DIRECTORY"):  # Windows cannot open folders
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise RuntimeError("\n".join([errors[0] if errors else f"{command[0]} ended with {done.returncode}", done.stderr]))


def compile_ahead(
    source: Path,
    target: Path,
    compiler: str,
    instructions: Instructions,
    headers: Headers | None = None,
    linking: Sequence[str] = (),
) -> None:
    """Compile a source on Linux without loading PyTorch, for any release of it, or for that of the headers.

    Raises:
        RuntimeError, OSError: as for ``compile_library``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # The library must list PyTorch's as dependencies, or it would not find the functions there.
        linked = [Path(scratch) / f"lib{name}.so" for name in linked_libraries(source)]
        for library in linked:
            _run(compiler, "-shared", "-x", "c++", os.devnull, f"-Wl,-soname,{library.name}", "-o", str(library))
        preprocessing = headers.flags if headers else ()
        linking = ("-Wl,--no-as-needed", *map(str, linked), *linking)
        compile_library(source, target, compiler, instructions, preprocessing, linking)
