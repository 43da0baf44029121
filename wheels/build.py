"""Builds the files of a release: a source distribution, wheels with kernels, and a wheel without, for systems that have none.

``python build.py [KIND...]`` empties ``dist`` and writes into it: ``sdist``, and wheels that are built from it for
``x86_64``, ``aarch64`` (on x86-64 with the compiler of ``python -m emulation.setting_up``) and ``any``; all four by default. Each
file is then checked by twine, check-wheel-contents and auditwheel.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
DIST = PROJECT / "dist"
NEWEST_GLIBC = 28
"""Wheels load where glibc is 2.28 or newer, as ONNX Runtime's do."""
OF_PYTORCH = ("libtorch_cpu.so", "libc10.so")
"""Libraries that kernels of the PyTorch engine call. They are in PyTorch's package, which a program has imported by then."""
CROSS_COMPILERS = {"aarch64": PROJECT / ".emulation" / "arm-c++"}
KINDS = ("sdist", "x86_64", "aarch64", "any")


def main(*kinds: str) -> None:
    """Build and check; the source distribution always, as wheels are made of it.

    Raises:
        SystemExit: a kind is unknown, its compiler is missing, or a build or a check fails.
    """
    if unknown := set(kinds) - set(KINDS):
        sys.exit(f"{', '.join(sorted(unknown))}: give some of {', '.join(KINDS)}, or nothing for all")
    shutil.rmtree(DIST, ignore_errors=True)
    source = timed("sdist", build_sdist)
    for kind in kinds or KINDS:
        if kind != "sdist":
            timed(kind, build_wheel, source, kind)
    check()
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.relative_to(PROJECT)}")


def timed(kind, build, *arguments):
    begin = time.monotonic()
    built = build(*arguments)
    print(f"{built.name}: built in {time.monotonic() - begin:.0f} s", flush=True)
    return built


def build_sdist() -> Path:
    run(sys.executable, "-m", "build", "--sdist", "--outdir", str(DIST), str(PROJECT), quiet=True)
    (built,) = DIST.glob("*.tar.gz")
    return built


def build_wheel(source: Path, kind: str) -> Path:
    """Build a wheel from the source distribution, with kernels of all levels of a kind of processor, or ``any`` with none."""
    settings = {"BURNISH_INSTALLED_KERNELS": "none" if kind == "any" else "portable"}
    if kind not in ("any", platform.machine()):
        compiler = CROSS_COMPILERS.get(kind)
        if compiler is None or not compiler.exists():
            sys.exit(f"there is no compiler here for {kind}: build on such a machine, or for aarch64 run make test-arm first")
        settings |= {"_PYTHON_HOST_PLATFORM": f"linux-{kind}", "CXX": str(compiler)}
    with tempfile.TemporaryDirectory() as folder:
        # Without a cache: pip would hand out a wheel that it built of a file of the same name before.
        options = ("--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir", folder)
        run(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *options, str(source), **settings)
        (wheel,) = Path(folder).glob("*.whl")
        if kind == "any":
            return Path(shutil.move(wheel, DIST))
        excluded = [word for library in OF_PYTORCH for word in ("--exclude", library)]
        # It tags the wheel for the oldest systems that its symbols allow; check() holds it to ours.
        run("auditwheel", "repair", "--only-plat", *excluded, "--wheel-dir", str(DIST), str(wheel), quiet=True)
    (built,) = DIST.glob(f"*{kind}.whl")
    return built


def check() -> None:
    """Check that package indexes take every file in ``dist``, and other systems every wheel.

    Raises:
        SystemExit: one fails.
    """
    files = sorted(map(str, DIST.iterdir()))
    wheels = [file for file in files if file.endswith(".whl")]
    run("twine", "check", "--strict", *files)
    if wheels:
        run("check-wheel-contents", *wheels)
    for wheel in wheels:
        if not wheel.endswith("-any.whl"):
            run("auditwheel", "show", wheel)
            hold_to_older_systems(wheel)


def hold_to_older_systems(wheel: str) -> None:
    """``auditwheel show`` counts PyTorch's libraries as missing ones: its parts are read here."""
    done = subprocess.run(["auditwheel", "show", "--json", wheel], env=environment(), capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    newest = re.fullmatch(r"manylinux_2_(\d+)_\w+", shown["sym_tag"])
    if newest is None or int(newest[1]) > NEWEST_GLIBC:
        sys.exit(f"{wheel} needs a newer system than glibc 2.{NEWEST_GLIBC}: {shown['sym_tag']}, {shown['versioned_symbols']}")
    if missing := set(shown["external_libs"]) - set(OF_PYTORCH):
        sys.exit(f"{wheel} needs libraries that no package brings: {', '.join(sorted(missing))}")


def environment(**settings: str) -> dict[str, str]:
    """Return the environment variables of a command, with the programs of this Python's environment first."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | settings


def run(*command: str, quiet: bool = False, **settings: str) -> None:
    """Run a command; a quiet one prints only if it fails.

    Raises:
        SystemExit: it fails.
    """
    print("+", *command, flush=True)
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(command, env=environment(**settings), stdout=output, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout or ''}{command[0]} ended with {done.returncode}")


if __name__ == "__main__":
    main(*sys.argv[1:])
