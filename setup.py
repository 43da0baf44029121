"""The kernels, which pyproject.toml cannot describe: they are compiled when burnish is installed, if there is a compiler.
The sources of the C client are installed with it. The version is read from the package, and the README that indexes show has
absolute links.

``BURNISH_INSTALLED_KERNELS`` in the environment names the processors, with commas between: ``native`` (the default: the best
level of this machine's), levels of ``compiling.LEVELS``, ``portable`` for all levels of this machine's kind of processor, or
``none``. A kernel that is named and cannot be built is an error. A kernel that is not built here is built when a program first
needs it: if PyTorch is installed later, those that include its headers. Levels that are named are for wheels: their kernels load
on older systems too.

To compile for another kind of machine, name it as ``_PYTHON_HOST_PLATFORM=linux-aarch64`` does, and its compiler in ``CXX``.
"""

from __future__ import annotations

import filecmp
import importlib.util
import itertools
import os
import platform
import re
import runpy
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

SOURCES = Path("src/burnish")
PACKAGE = "burnish.kernels.built"
NAMED = os.environ.get("BURNISH_INSTALLED_KERNELS")
MACHINE = sysconfig.get_platform().rpartition("-")[2]
"""The kind of processor that the kernels are for, as ``platform.machine`` calls it there."""
WRAPPED = [f"-Wl,--wrap={name}" for name in ("exp", "exp2", "log", "log2", "pow")]
OLDER_SYSTEMS = ("-s", "-fPIC", "-O2", "wheels/older_systems.cpp", *WRAPPED)
"""What the linker takes for a library that has to load where glibc and libstdc++ are older than here; it is also stripped."""
VERSION = runpy.run_path("src/burnish/version.py")["__version__"]


def _compiling() -> ModuleType:
    # By its file: importing it by its name would import PyTorch.
    specification = importlib.util.spec_from_file_location("compiling", SOURCES / "kernels" / "compiling.py")
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


compiling = _compiling()
headers = compiling.find_headers()


class Kernel(Extension):
    """A kernel's library for some processors."""

    def __init__(self, source: Path, instructions: compiling.Instructions, linking: Sequence[str]) -> None:
        self.source, self.instructions = source, instructions
        self.headers = headers if source.stem in compiling.NEEDS_HEADERS else None
        release = compiling.release_of(source, self.headers.version) if self.headers else ()
        self.file_name = compiling.library_name(source, instructions, *release)
        self.linking = linking
        super().__init__(f"{PACKAGE}.{Path(self.file_name).stem}", [str(source)], optional=not NAMED)


class BuildKernels(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        if self.extensions and compiling.find_compiler() is None:
            if NAMED:
                remedy = "install g++, or name one in CXX"
                raise CompileError(f"there is no C++ compiler for BURNISH_INSTALLED_KERNELS={NAMED}: {remedy}")
            self.warn("there is no C++ compiler: kernels are not built")
            return
        if self.inplace or self.editable_mode:
            compiling.BUILT.mkdir(exist_ok=True)
            self._leave_out_what_is_built()
        super().run()
        if not (self.inplace or self.editable_mode):
            self._leave_out_what_is_alike()

    def _leave_out_what_is_alike(self) -> None:
        """Keep only the library of the level below if the further instructions of a level change nothing in a kernel."""
        by_source: dict[Path, list[Path]] = {}
        for ext in (ext for ext in self.extensions if ext.instructions in compiling.LEVELS):
            by_source.setdefault(ext.source, []).append(Path(self.get_ext_fullpath(ext.name)))
        for libraries in by_source.values():
            for better, lesser in itertools.pairwise(libraries):
                if better.exists() and lesser.exists() and filecmp.cmp(better, lesser, shallow=False):
                    better.unlink()

    def _leave_out_what_is_built(self) -> None:
        """Build no library whose name says that it is built already, as for another environment; remove what is outdated."""
        built = {path.name for path in compiling.BUILT.glob("*.so")}
        # What includes PyTorch's headers may be for another environment's.
        of_one_release = tuple(f"burnish_{stem}_" for stem in compiling.NEEDS_HEADERS)
        for name in built - {ext.file_name for ext in self.extensions}:
            if not name.startswith(of_one_release):
                (compiling.BUILT / name).unlink()
        if not self.force:
            self.extensions = [ext for ext in self.extensions if ext.file_name not in built]

    def get_ext_filename(self, fullname: str) -> str:
        return f"{os.path.join(*fullname.split('.'))}.so"

    def build_extension(self, ext: Kernel) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            compiling.compile_ahead(ext.source, target, compiling.find_compiler(), ext.instructions, ext.headers, ext.linking)
        except (OSError, RuntimeError) as error:
            problem = f"{ext.source.name} could not be built: {str(error).splitlines()[0]}"
            if NAMED:
                raise CompileError(problem) from error
            self.warn(problem)


class BuildWithClients(build_py):
    """Packs the C client, whose sources lie outside of the package, with what writes packages of it; a checkout needs no copy."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "burnish", "engines", "onnxruntime", "c_client")
            shutil.copytree("clients/c", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lib", "train", ".*"))


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Kernels are for a kind of machine, whatever the version of Python."""
        return ("py3", "none", super().get_tag()[2])


def kernels() -> list[Kernel]:
    named = [name for name in (NAMED or "native").split(",") if name != "none"]
    levels = {level.name: level for level in compiling.LEVELS if level.machine == MACHINE}
    known = ({"native": compiling.native()} if platform.machine() == MACHINE else {}) | levels
    if unknown := set(named) - {*known, "portable"}:
        choices = ", ".join([*known, "portable"])
        sys.exit(f"BURNISH_INSTALLED_KERNELS names {', '.join(sorted(unknown))}: give none, or some of {choices}")
    chosen = {level: OLDER_SYSTEMS for name, level in levels.items() if name in named or "portable" in named}
    if "native" in named:
        chosen.setdefault(known["native"], ())
    if not sys.platform.startswith("linux"):
        return []
    # Those that include PyTorch's headers take longest: the other cores compile the rest meanwhile.
    sources = sorted(compiling.find_sources(SOURCES), key=lambda source: (source.stem not in compiling.NEEDS_HEADERS, source))
    sources = [source for source in sources if headers or source.stem not in compiling.NEEDS_HEADERS]
    best_first = [*(set(chosen) - set(compiling.LEVELS)), *(level for level in compiling.LEVELS if level in chosen)]
    return [Kernel(source, level, chosen[level]) for level in best_first for source in sources]


def description() -> str:
    """Return the README for readers outside of the repository: its links lead to the files of this version's tag.

    If ``pyproject.toml`` names no repository, only the text of each link is left.
    """
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")

    def absolute(link: re.Match[str]) -> str:
        path = Path(link["path"])
        # A source distribution has no folder that the README names.
        kind = "blob" if path.suffix or path.is_file() else "tree"
        page = f"{repository}/{kind}/v{VERSION}/{path.as_posix()}{link['anchor']}"
        return f"[{link['text']}]({page})" if repository else link["text"]

    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<path>[^)\s#]+)(?P<anchor>[^)\s]*)\)", absolute, text)


setup(
    version=VERSION,
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=kernels(),
    cmdclass={"build_ext": BuildKernels, "build_py": BuildWithClients, "bdist_wheel": Wheel},
)
