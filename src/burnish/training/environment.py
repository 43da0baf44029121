"""The environment of a run: versions, machine, memory; and the diagnosis of ``burnish doctor``."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from burnish import engines
from burnish.engines.base import described
from burnish.engines.registry import ENTRY_POINT_GROUP
from burnish.errors import EngineError
from burnish.kernels import building, compiling
from burnish.version import __version__

PACKAGES = ("burnish", "onnxruntime", "onnx", "numpy", "torch")


def environment() -> dict[str, str]:
    """Return the versions of packages and the kind of machine; nothing identifies its owner."""
    described = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            described[name] = version(name)
        except PackageNotFoundError:
            continue
    described["system"] = f"{platform.system()} {platform.machine()}"
    described["processors"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return described


def session_line(described: Mapping[str, Any]) -> str:
    """Return the engine, kernels, threads and precision of a run in words; ``described`` is from ``Session.describe``."""
    kernels = f"kernels for {described['level']}"
    if described["kernels"] is None:
        kernels = f"no kernels, as {described['kernels_reason']}"
    threads = "1 thread" if described["threads"] == 1 else f"{described['threads']} threads"
    return f"{described['engine']}: {kernels}; {threads}; {described['precision']}"


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None if the system does not report it (Linux does)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int | None:
    """Return the peak resident memory of this process in bytes; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_while(run: Callable[[], object]) -> int | None:
    """Call ``run``; return the bytes by which the resident memory rose at most, or None if unknown.

    Only Linux reports it: a process can reset its peak there.
    """
    before = resident_bytes()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        before = None
    run()
    if before is None:
        return None
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    peak = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
    return None if peak is None else max(0, 1024 * peak - before)


RUNS_ON = {"onnxruntime": "onnxruntime", "torch": "torch", "reference": "numpy"}
"""The package of each engine of burnish, by the engine's name."""


def diagnose() -> dict[str, Any]:
    """Return the engines, kernels and machine that sessions find, JSON-compatible.

    Missing kernels of the PyTorch engine are built, as in its first session.

    Returns:
        - ``burnish``, ``python``, ``platform``: versions, and the system.
        - ``cpu``: name of the processor; ``level``: its best instructions that kernels are made for.
        - ``engines``: by name, ``version`` of its package or None, ``kernels``: path of a library or None, and ``reason``: reason
          for a missing engine or missing kernels, or None.
        - ``compiler``: path of the C++ compiler, or None; ``cache``: folder of the kernels built on demand.
        - ``threads``: cores that this process may use; ``memory_limit``: bytes that it may use, or None if the system does not
          report it.
        - ``advice``: recommended changes, one sentence each.
    """
    found: dict[str, dict[str, Any]] = {}
    advice: list[str] = []
    for name in engines.available():
        version = kernels = reason = None
        try:
            engine = engines.get(name)
        except EngineError as error:
            reason = str(error)
        else:
            version = _version_of(name)
            description = described(engine)
            kernels, reason = description["kernels"], description["kernels_reason"]
            advice += filter(None, [description["kernels_remedy"]])
        found[name] = {"version": version, "kernels": kernels, "reason": reason}
    folder = building.cache_folder()
    if problem := building.distrust(folder / "any"):
        advice.append(problem)
    if building.is_switched_off():
        advice.append("BURNISH_KERNELS=off in the environment keeps kernels from running: take it away (unset BURNISH_KERNELS)")
    return {
        "burnish": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": compiling.model_name(),
        "level": compiling.cpu_level(),
        "engines": found,
        "compiler": compiling.find_compiler(),
        "cache": str(folder),
        "threads": building.cores(),
        "memory_limit": memory_limit(),
        "advice": advice,
    }


def _version_of(engine: str) -> str:
    """The version of an engine's package; for an engine from a plugin, the version of the plugin."""
    if engine in RUNS_ON:
        return str(sys.modules[RUNS_ON[engine]].__version__)
    (entry,) = entry_points(group=ENTRY_POINT_GROUP, name=engine)
    return "unknown" if entry.dist is None else entry.dist.version


def memory_limit() -> int | None:
    """Return the bytes of memory that this process may use: the machine's, or a container's limit; None if unknown."""
    limits = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(file).read_text(encoding="ascii")))
        except (OSError, ValueError):  # another system, or no limit ("max")
            continue
    return min(limits, default=None)
