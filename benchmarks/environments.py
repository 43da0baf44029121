"""Where contenders run: environments of their own for peers, and allocators that keep their pages."""

from __future__ import annotations

import ctypes.util
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
ENVIRONMENTS = PEERS / ".environments"
ALLOCATORS = ENVIRONMENTS / "allocators"
DEBIAN_PACKAGE = "libtcmalloc-minimal4"


def requirement_files() -> dict[str, Path]:
    """The peers that live in environments of their own, with what is installed there."""
    return {path.stem: path for path in sorted(PEERS.glob("*.txt"))}


def python_of(peer: str) -> Path | None:
    """The interpreter of a peer's environment; None where it is not installed."""
    folder = "Scripts" if sys.platform == "win32" else "bin"
    python = ENVIRONMENTS / peer / folder / "python"
    return python if python.exists() else None


def install() -> dict[str, str]:
    """Make the environments that do not stand yet, and fetch tcmalloc where a Debian package is to be had.

    Nothing outside ``benchmarks/peers/.environments`` changes, and no rights are needed.

    Returns:
        For each peer and for the allocator ``installed``, or why it is not.
    """
    outcome = {}
    for peer, requirements in requirement_files().items():
        if python_of(peer) is None:
            venv.create(ENVIRONMENTS / peer, with_pip=True)
        command = [str(python_of(peer)), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)]
        ran = subprocess.run(command, capture_output=True, text=True)
        outcome[peer] = "installed" if ran.returncode == 0 else ran.stderr.strip().splitlines()[-1]
        if ran.returncode:
            shutil.rmtree(ENVIRONMENTS / peer)
    outcome["tcmalloc"] = _install_tcmalloc()
    return outcome


def _install_tcmalloc() -> str:
    if tcmalloc() is not None:
        return "installed"
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "not found, and no apt-get to fetch it with: install gperftools to compare with it"
    ALLOCATORS.mkdir(parents=True, exist_ok=True)
    ran = subprocess.run(["apt-get", "download", DEBIAN_PACKAGE], cwd=ALLOCATORS, capture_output=True, text=True)
    packages = sorted(ALLOCATORS.glob(f"{DEBIAN_PACKAGE}*.deb"))
    if ran.returncode or not packages:
        return (ran.stderr.strip().splitlines() or ["apt-get download failed"])[-1]
    subprocess.run(["dpkg-deb", "--extract", packages[-1], ALLOCATORS], check=True)
    return "installed"


def tcmalloc() -> str | None:
    """What to preload for tcmalloc: a library that the system finds, or the one that ``install`` fetched."""
    for name in ("tcmalloc_minimal", "tcmalloc"):
        found = ctypes.util.find_library(name)
        if found is not None:
            return found
    fetched = sorted(ALLOCATORS.glob("usr/lib/**/libtcmalloc_minimal.so.*"))
    return str(fetched[0].resolve()) if fetched else None


def keeping_pages() -> tuple[str, dict[str, str]] | None:
    """An allocator that gives no pages back to the system between steps: its name and the variables that choose it.

    tcmalloc where it is found, told to release nothing. Else glibc's own with its settings: no mapping of its own for large
    blocks, no trimming, one arena (others cannot grow beyond 64 MB). None where there is neither.
    """
    library = tcmalloc()
    if library is not None and sys.platform == "linux":
        return "tcmalloc", {"LD_PRELOAD": library, "TCMALLOC_RELEASE_RATE": "0"}
    if platform.libc_ver()[0] == "glibc":
        settings = {"mmap_max": 0, "trim_threshold": 2**40, "top_pad": 2**26, "arena_max": 1}
        tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in settings.items())
        return "glibc keeping pages", {"GLIBC_TUNABLES": tunables}
    return None
