"""Processors that are emulated, the libraries that were built for them, and Python on them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from burnish.kernels import compiling
from burnish.kernels.compiling import LEVELS, Instructions
from emulation import setting_up
from emulation.setting_up import FOLDER, program

BUILT = FOLDER / "built"
"""The libraries of every processor side by side, as in a wheel."""
OPERATORS = compiling.ONNXRUNTIME / "native" / "operators.cpp"
"""Of the library that ONNX Runtime loads."""
PROJECT = FOLDER.parent
OTHER_NAMES = {"lahf_lm": "lahf-lm", "sse4_1": "sse4.1", "sse4_2": "sse4.2"}
"""What QEMU calls instructions otherwise than Linux does."""


@dataclass(frozen=True)
class Processor:
    """A processor with the instructions of one level, and no others.

    Attributes:
        level: as ``compiling.LEVELS`` has it.
        emulator: QEMU's program.
        model: as that calls it.
    """

    level: Instructions
    emulator: str
    model: str

    @property
    def is_arm(self) -> bool:
        """Whether it is no x86."""
        return self.level.machine == "aarch64"

    def run(self, *arguments: str, timeout: float = 1200, torch: bool = False) -> subprocess.CompletedProcess[str]:
        """Run Python, with this environment's packages, or those for Arm; PyTorch is among the latter where it is asked for."""
        root = setting_up.ARM if self.is_arm else self._root()
        paths = [PROJECT / "src", PROJECT / "tests"]
        if self.is_arm:
            paths += [*([setting_up.ARM_TORCH] if torch else []), setting_up.ARM_PACKAGES]
        settings = {
            "PYTHONPATH": ":".join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "CXX": str(setting_up.COMPILER),  # tests of kernels run where there is a compiler; this one builds nothing for x86
            "BURNISH_CACHE": str(FOLDER / "cache"),
        }
        python = str(setting_up.ARM / "python") if self.is_arm else sys.executable
        emulator = program(self.emulator)
        return subprocess.run(
            [*emulator, "-E", "LD_LIBRARY_PATH=", "-cpu", self.model, "-L", str(root), python, *arguments],
            env=os.environ | settings,
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def _root(self) -> Path:
        """A root folder in which files stand instead of this machine's: what Linux says of the processor."""
        root = FOLDER / self.level.name
        (root / "proc").mkdir(parents=True, exist_ok=True)
        flags = " ".join(sorted({"fpu", "sse", "sse2", "lm"} | self.level.needed))
        (root / "proc" / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\n", encoding="utf-8")
        return root


def _level(name: str) -> Instructions:
    return next(level for level in LEVELS if level.name == name)


def _x86(name: str, *further: str) -> Processor:
    level = _level(name)
    flags = sorted({OTHER_NAMES.get(flag, flag) for flag in level.needed} | set(further))
    return Processor(level, "qemu-x86_64", ",".join(["qemu64", "-svm", *(f"+{flag}" for flag in flags)]))


NEON = Processor(_level("armv8-a"), "qemu-aarch64", "neoverse-n1")
SSE = _x86("x86-64-v2")
AVX2 = _x86("x86-64-v3", "avx", "xsave")
"""QEMU has no AVX-512."""
PROCESSORS = (NEON, SSE, AVX2)


def build(source: Path, level: Instructions) -> Path:
    """Compile a source for a level, unless that was done; returns its library."""
    BUILT.mkdir(exist_ok=True)
    headers = compiling.headers_in(setting_up.ARM_TORCH) if source.stem in compiling.NEEDS_HEADERS else None
    release = compiling.release_of(source, headers.version) if headers else ()
    library = BUILT / compiling.library_name(source, level, *release)
    if not library.exists():
        compiler = str(setting_up.COMPILER) if level.machine == "aarch64" else compiling.find_compiler()
        assert compiler, "a C++ compiler is needed"
        compiling.compile_ahead(source, library, compiler, level, headers)
    return library
