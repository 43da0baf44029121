"""What a run was computed with: versions, machine, memory of this process."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("burnish", "onnxruntime", "onnx", "numpy", "torch")


def environment() -> dict[str, str]:
    """Return the versions of what computes, and what kind of machine this is; nothing that tells whose it is."""
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
    """Return what a run computes on, in words; ``described`` is what ``Session.describe`` returns."""
    kernels = f"kernels for {described['level']}"
    if described["kernels"] is None:
        kernels = f"no kernels, as {described['kernels_reason']}"
    threads = "1 thread" if described["threads"] == 1 else f"{described['threads']} threads"
    return f"{described['engine']}: {kernels}; {threads}; {described['precision']}"


def resident_bytes() -> int | None:
    """Return the memory of this process that is resident now, in bytes; None where the system does not say (Linux does)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int | None:
    """Return the most memory of this process that was resident, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
