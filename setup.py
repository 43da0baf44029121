"""What pyproject.toml cannot say: the PyTorch engine's kernels are compiled where burnish is installed, if there is a compiler.
The sources of the C client are installed with it.

``BURNISH_INSTALLED_KERNELS`` in the environment names for what processors, with commas between: ``native`` (the default), levels
of ``compiling.LEVELS``, ``portable`` for all of these that are for this machine's kind of processor, or ``none``. What is not
built here is built where a program first needs it: files that include PyTorch's headers are, where PyTorch is installed later.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ENGINES = Path("src/burnish/engines")
PACKAGE = "burnish.engines.kernels.built"


def _compiling() -> ModuleType:
    # By its file: importing it by its name would import PyTorch.
    specification = importlib.util.spec_from_file_location("compiling", ENGINES / "kernels" / "compiling.py")
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

    def __init__(self, source: Path, instructions: compiling.Instructions) -> None:
        self.source, self.instructions = source, instructions
        self.headers = headers if source.stem in compiling.NEEDS_HEADERS else None
        release = compiling.release_of(source, self.headers.version) if self.headers else ()
        self.file_name = compiling.library_name(source, instructions, *release)
        super().__init__(f"{PACKAGE}.{Path(self.file_name).stem}", [str(source)], optional=True)


class BuildKernels(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        if compiling.find_compiler() is None:
            self.warn("there is no C++ compiler: kernels of the PyTorch engine are not built")
            return
        if self.inplace or self.editable_mode:
            compiling.BUILT.mkdir(exist_ok=True)
            self._leave_out_what_is_built()
        super().run()

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
            compiling.compile_ahead(ext.source, target, compiling.find_compiler(), ext.instructions, ext.headers)
        except (OSError, RuntimeError) as error:
            self.warn(f"{ext.source.name} could not be built: {str(error).splitlines()[0]}")


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
    named = [name for name in os.environ.get("BURNISH_INSTALLED_KERNELS", "native").split(",") if name != "none"]
    levels = {level.name: level for level in compiling.LEVELS if level.machine == platform.machine()}
    known = {"native": compiling.native(), **levels}
    if unknown := set(named) - {*known, "portable"}:
        choices = ", ".join([*known, "portable"])
        sys.exit(f"BURNISH_INSTALLED_KERNELS names {', '.join(sorted(unknown))}: give none, or some of {choices}")
    named = list(dict.fromkeys(level for name in named for level in (levels if name == "portable" else [name])))
    if not sys.platform.startswith("linux"):
        return []
    # Those that include PyTorch's headers take longest: the other cores compile the rest meanwhile.
    sources = sorted(compiling.find_sources(ENGINES), key=lambda source: (source.stem not in compiling.NEEDS_HEADERS, source))
    sources = [source for source in sources if headers or source.stem not in compiling.NEEDS_HEADERS]
    return [Kernel(source, known[name]) for name in named for source in sources]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels, "build_py": BuildWithClients, "bdist_wheel": Wheel})
