"""Fetches what runs kernels on other processors: QEMU, a compiler for Arm, and Python with burnish's dependencies for Arm.

``python -m emulation.setting_up`` puts them into ``.emulation``, on Debian and Ubuntu for x86-64. It needs no administrator:
packages are unpacked there, not installed. ``fetch_unstable`` does the same with a newer Python for this machine's processor.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".emulation"
HOST = FOLDER / "host"
"""Programs of this machine's: the emulator and the compiler."""
ARM = FOLDER / "arm"
"""The root folder of the emulated Arm machine."""
ARM_PACKAGES = FOLDER / "arm-packages"
"""What is installed for its Python."""
ARM_TORCH = FOLDER / "arm-torch"
COMPILER = FOLDER / "arm-c++"
SETTINGS = FOLDER / "apt" / "settings"
"""Of Debian's package tools, while something is fetched."""
DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
READY = FOLDER / "ready"
"""What was fetched; written last."""

PROGRAMS = ("g++-aarch64-linux-gnu", "qemu-user")
PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxruntime", "safetensors", "typer", "rich", "pytest", "hypothesis")
TORCH = "torch==2.10.0"
"""The last for Arm without CUDA on the package index, and the first that kernels of the PyTorch engine run with."""
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (17, 26, 27, 28, 31, 34)]
MACHINE = """processor\t: {number}
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
"""Of /proc/cpuinfo on a Neoverse N1: libraries read there what the processor can do, and QEMU would show them this machine's."""


def wanted() -> list[str]:
    """The Python packages, in the versions that this environment has."""
    return [f"{name}=={version(name)}" for name in PACKAGES]


def is_ready() -> bool:
    """Whether everything was fetched, for the packages of this environment."""
    return READY.exists() and READY.read_text(encoding="utf-8").split() == [*wanted(), TORCH]


def fetch() -> None:
    """Fetch everything anew.

    Raises:
        SystemExit: a program is missing that it takes, or a package cannot be had.
    """
    _check_programs()
    shutil.rmtree(FOLDER, ignore_errors=True)
    # The system need not list packages for Arm.
    _configure_apt('APT::Architectures {"amd64"; "arm64";};')
    _unpack(_needed_here(), HOST)
    _make_compiler()
    python = _python()
    _unpack(_needed_on_arm(python), ARM)
    if not (ARM / "lib").exists():
        (ARM / "lib").symlink_to("usr/lib")
    (ARM / "proc").mkdir()
    (ARM / "proc" / "cpuinfo").write_text("".join(MACHINE.format(number=number) for number in range(2)), encoding="utf-8")
    (ARM / "python").symlink_to(f"usr/bin/python{python}")
    _install(ARM_PACKAGES, python, wanted())
    _install(ARM_TORCH, python, ["--no-deps", TORCH])
    shutil.rmtree(FOLDER / "apt")
    READY.write_text("\n".join([*wanted(), TORCH]), encoding="utf-8")


def fetch_unstable(python: str) -> Path:
    """A root folder with a version of Python as Debian's unstable distribution has it, and the libraries that it needs.

    Raises:
        SystemExit: a program is missing that it takes, or the distribution has no such Python.
    """
    root = FOLDER / f"unstable-python{python}"
    if not root.exists():
        _check_programs()
        debian = re.search(r"^\S+/debian/?$", _run("apt-get", "indextargets", "--format", "$(REPO_URI)"), re.MULTILINE)
        if debian is None:
            sys.exit("the system's package lists are not Debian's, whose unstable distribution is wanted")
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / "unstable.list").write_text(f"deb [signed-by={DEBIAN_KEYS}] {debian[0]} unstable main\n", encoding="utf-8")
        (FOLDER / "no-packages").touch()
        _configure_apt(
            f'Dir::Etc::SourceList "{FOLDER}/unstable.list";',
            'Dir::Etc::SourceParts "-";',
            f'Dir::State::status "{FOLDER}/no-packages";',
        )
        partial = FOLDER / "unstable-partial"
        shutil.rmtree(partial, ignore_errors=True)
        _unpack(_dependencies(f"python{python}-minimal", f"libpython{python}-stdlib", "libstdc++6"), partial)
        partial.rename(root)
        shutil.rmtree(FOLDER / "apt")
    return root


def _check_programs() -> None:
    if missing := [name for name in ("apt-get", "apt-cache", "dpkg") if shutil.which(name) is None]:
        sys.exit(f"the emulation needs {', '.join(missing)}: set it up on Debian or Ubuntu, whose packages it takes")


def _configure_apt(*further: str) -> None:
    """Configure lists and packages of its own, because only an administrator can change the system's, and fetch the lists."""
    shutil.rmtree(FOLDER / "apt", ignore_errors=True)
    for folder in ("lists/partial", "cache/archives/partial"):
        (FOLDER / "apt" / folder).mkdir(parents=True)
    own = (f'Dir::State::Lists "{FOLDER}/apt/lists";', f'Dir::Cache "{FOLDER}/apt/cache";', 'APT::Sandbox::User "";')
    SETTINGS.write_text("\n".join([*own, *further, ""]), encoding="utf-8")
    _run("apt-get", "-qq", "update")


def _run(*command: str, folder: Path | None = None) -> str:
    environment = os.environ | {"LC_ALL": "C"} | ({"APT_CONFIG": str(SETTINGS)} if SETTINGS.exists() else {})
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with {done.returncode}")
    return done.stdout


def _needed_here() -> list[str]:
    """The packages of programs that this machine has not installed."""
    steps = _run("apt-get", "--simulate", "--no-install-recommends", "install", *PROGRAMS)
    return re.findall(r"^Inst (\S+)", steps, re.MULTILINE)


def _dependencies(*packages: str) -> list[str]:
    hidden = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    lines = _run("apt-cache", "depends", "--recurse", *(f"--no-{kind}" for kind in hidden), *packages)
    architecture = packages[0].partition(":")[2]
    names = {line for line in lines.splitlines() if not line.startswith((" ", "|", "<"))}
    return sorted(name for name in names if name.partition(":")[2] == architecture)


def _python() -> str:
    """The version of Python that the distribution has."""
    found = re.search(r"Depends: python(3\.\d+)-minimal", _run("apt-cache", "depends", "python3-minimal:arm64"))
    if found is None or tuple(map(int, found[1].split("."))) < (3, 11):
        sys.exit("the distribution has no Python 3.11 or newer for Arm")
    return found[1]


def _needed_on_arm(python: str) -> list[str]:
    return _dependencies(f"python{python}-minimal:arm64", f"libpython{python}-stdlib:arm64", "libstdc++6:arm64")


def _unpack(packages: Sequence[str], folder: Path) -> None:
    folder.mkdir()
    if not packages:
        return
    downloads = FOLDER / "apt" / f"of-{folder.name}"
    downloads.mkdir()
    _run("apt-get", "-qq", "download", *packages, folder=downloads)
    for package in sorted(downloads.glob("*.deb")):
        _run("dpkg", "-x", str(package), str(folder))


def program(name: str) -> list[str]:
    """The command of a program that was unpacked, with the libraries beside it, or that is installed."""
    path = HOST / "usr" / "bin" / name
    if not path.exists():
        return [name]
    return ["env", f"LD_LIBRARY_PATH={HOST}/usr/lib/x86_64-linux-gnu", str(path)]


def _make_compiler() -> None:
    command = program("aarch64-linux-gnu-g++")
    if len(command) > 1:
        command.append(f"--sysroot={HOST}")
    COMPILER.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    COMPILER.chmod(0o755)


def _install(folder: Path, python: str, packages: Sequence[str]) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--quiet", "--disable-pip-version-check", "--python-version", python, "--only-binary", ":all:", *platforms]
    _run(sys.executable, "-m", "pip", "install", *options, "--target", str(folder), *packages)


if __name__ == "__main__":
    if not is_ready():
        fetch()
    print(f"{FOLDER.name} is ready")
