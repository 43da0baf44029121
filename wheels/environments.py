"""Installs each file of ``dist`` into clean environments, and tries it there with ``trial.py``.

``python environments.py [PART...]`` tries the environments with one of the parts in their names, or all. Caches are empty, and
no compiler is on the PATH unless the name says so. It tries every ``python3.N`` on this machine from 3.11 on; Python 3.14 of
Debian's unstable distribution, unpacked, with the C library of that distribution; and Debian's Python for Arm under emulation.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
DIST = PROJECT / "dist"
sys.path[:0] = [str(PROJECT / "tests")]

from emulation import setting_up  # noqa: E402
from emulation.setting_up import ARM, ARM_TORCH, program  # noqa: E402

VERSIONS = range(11, 20)
TORCH = ("3.11", "torch==2.13.0")
"""The Python that this release of PyTorch has a build without CUDA for, on the package index."""
ENGINES = ("onnxruntime", "reference")
TIMEOUT = 1800


@dataclass(frozen=True)
class Environment:
    """An environment to try a file in.

    Attributes:
        name: of the file's kind and of the Python.
        file: to install.
        kernels: the kernels that ``trial.py`` has to find: ``installed`` or ``none``.
        engines: to try.
        set_up: installs the file in a folder, with PATH in the environment as it has to be; returns the command of its Python,
            and further settings.
        compiler: whether there is one on the PATH.
    """

    name: str
    file: Path
    kernels: str
    engines: tuple[str, ...]
    set_up: Callable[[Path, Path, dict[str, str]], tuple[list[str], dict[str, str]]]
    compiler: bool = False


def environments() -> Iterator[Environment]:
    """Every file with every Python that can be had.

    Raises:
        SystemExit: ``dist`` is empty.
    """
    files = sorted(DIST.glob("burnish-*"))
    if not files:
        sys.exit("dist is empty: run make release-candidate first")
    pythons = {f"3.{minor}": path for minor in VERSIONS if (path := working(f"python3.{minor}"))}
    for file in files:
        kind = "sdist" if file.name.endswith(".tar.gz") else file.stem.split("-")[-1]
        own = kind.endswith(os.uname().machine)
        for version, python in pythons.items():
            engines = (*ENGINES, "torch") if version == TORCH[0] else ENGINES
            if kind == "sdist":
                yield Environment(f"sdist python{version}", file, "none", engines, in_venv(python))
                yield Environment(f"sdist compiler python{version}", file, "installed", engines, in_venv(python), compiler=True)
            elif own or kind == "any":
                yield Environment(f"{kind} python{version}", file, "installed" if own else "none", engines, in_venv(python))
        if own:
            yield Environment(f"{kind} unstable python3.14", file, "installed", ENGINES, in_unstable)
        if kind.endswith("aarch64") and not own:
            yield Environment(f"{kind} emulated", file, "installed", (*ENGINES, "torch"), in_emulator)


def working(name: str) -> str | None:
    """The path of a Python that can make environments."""
    path = shutil.which(name)
    if path and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0:
        return path
    return None


def in_venv(python: str) -> Callable[[Path, Path, dict[str, str]], tuple[list[str], dict[str, str]]]:
    """An environment as ``venv`` makes it. Of the packages that burnish asks for, uv installs copies that it has already."""

    def set_up(folder: Path, file: Path, settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        run([python, "-m", "venv", str(folder / "venv")], os.environ)
        own = str(folder / "venv" / "bin" / "python")
        if Path(python).name.endswith(TORCH[0]):
            run([own, "-m", "pip", "install", "--quiet", TORCH[1]], os.environ)
        dependencies = ["--requirements", str(PROJECT / "pyproject.toml"), "--extra", "demo"]
        run([sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", own, *dependencies], os.environ)
        run([own, "-m", "pip", "install", "--quiet", "--no-cache-dir", f"{file}[demo]"], settings)
        return [own], {}

    return set_up


def in_emulator(folder: Path, file: Path, settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Debian's Python for Arm under QEMU, with PyTorch for Arm.

    Raises:
        RuntimeError: they are missing.
    """
    if not setting_up.READY.exists():
        raise RuntimeError("the emulation of Arm is not set up: make test-wheels does it")
    python = ARM / "python"
    install_for(python.resolve().name.removeprefix("python"), "aarch64", folder / "packages", file)
    first, *rest = program("qemu-aarch64")
    emulator = [shutil.which(first) or first, *rest, "-E", "LD_LIBRARY_PATH=", "-cpu", "neoverse-n1", "-L", str(ARM)]
    packages = f"{folder / 'packages'}:{ARM_TORCH}"
    return [*emulator, str(python)], {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}


def in_unstable(folder: Path, file: Path, settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Python 3.14 of Debian's unstable distribution, with a C library that is newer than this machine's."""
    root = setting_up.fetch_unstable("3.14")
    install_for("3.14", "x86_64", folder / "packages", file)
    libraries = root / "usr" / "lib" / "x86_64-linux-gnu"
    loader = [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
    return [*loader, str(root / "usr" / "bin" / "python3.14")], {"PYTHONPATH": str(folder / "packages")}


def install_for(version: str, machine: str, target: Path, file: Path) -> None:
    """Install a wheel and its dependencies for a Python that this machine's pip does not run on."""
    platforms = [word for minor in (17, 26, 27, 28, 31, 34) for word in ("--platform", f"manylinux_2_{minor}_{machine}")]
    options = ["--quiet", "--python-version", version, "--only-binary", ":all:", *platforms, "--target", str(target)]
    run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, f"{file}[demo]"], os.environ)


def run(command: list[str], settings: os._Environ[str] | dict[str, str]) -> str:
    """Run a command; returns its output.

    Raises:
        RuntimeError: it fails.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": TIMEOUT}
    done = subprocess.run(command, env=settings, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def attempt(environment: Environment) -> dict:
    """Install and try; returns the last line of ``trial.py``.

    Raises:
        RuntimeError: something fails.
    """
    with tempfile.TemporaryDirectory(prefix="burnish-trial-") as name:
        folder = Path(name)
        settings = {"PATH": os.environ["PATH"] if environment.compiler else str(folder / "venv" / "bin"), "HOME": name}
        settings |= {"BURNISH_CACHE": str(folder / "cache"), "LANG": "C.UTF-8"}
        python, further = environment.set_up(folder, environment.file, settings)
        arguments = [str(PROJECT / "wheels" / "trial.py"), environment.kernels, *environment.engines]
        found = json.loads(run([*python, *arguments], settings | further).splitlines()[-1])
    if bool(compiler := found["doctor"]["compiler"]) != environment.compiler:
        raise RuntimeError(f"the compiler on the PATH is {compiler}")
    return found


def main(*parts: str) -> None:
    """Try all, or the ones that are named.

    Raises:
        SystemExit: one fails, or none has such a name.
    """
    chosen = [each for each in environments() if not parts or any(part in each.name for part in parts)]
    if not chosen:
        sys.exit(f"no environment has {' or '.join(parts)} in its name")
    failed = 0
    for environment in chosen:
        begin = time.monotonic()
        try:
            found = attempt(environment)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            failed += 1
            print(f"FAILED  {environment.name}: {error}", flush=True)
            continue
        doctor, runs = found["doctor"], found["ran_on"]["onnxruntime"]
        kernels = f"kernels for {runs['level']}" if runs["kernels"] else f"no kernels, as {runs['kernels_reason']}"
        system = f"Python {doctor['python']}, {found['libc']}, {', '.join(found['ran_on'])}"
        print(f"passed  {environment.name}, {time.monotonic() - begin:.0f} s: {system}; {kernels}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
