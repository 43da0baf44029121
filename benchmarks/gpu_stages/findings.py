"""What the machine has: card, driver, PyTorch, the versions that differ from those burnish asks for, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import torch

from gpu_stages.setting import Report, Setting

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
NEEDED = ("torch", "onnx", "onnx-ir", "numpy", "safetensors", "rich", "typer")
LOWEST_TORCH = (2, 11)
NO_GPU = "PyTorch finds no CUDA GPU here: --device cpu --tiny runs the stages without one"
# What a stage uses where it is there, and what goes without it.
OPTIONAL = {
    "triton": "compile='inductor' and torch.compile",
    "pytest": "the tests that need a GPU, as tests",
    "onnxruntime": "the stage onnxruntime",
}


def run(setting: Setting, report: Report) -> None:
    """Tell what there is."""
    found: dict[str, Any] = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    found["python"] = platform.python_version()
    found["versions"] = {name: version for name in (*NEEDED, *OPTIONAL) if (version := _version(name)) is not None}
    found["other_versions_than_asked_for"] = _outside_of_pins()
    found["missing"] = missing(setting)
    if setting.on_gpu:
        found |= _card() if torch.cuda.is_available() else {"cannot_run": NO_GPU}
    report.found(found)


def missing(setting: Setting) -> list[str]:
    """What is not there, and what goes without it."""
    lacks = [f"{name} (needed)" for name in NEEDED if _version(name) is None]
    lacks += [f"{name} ({use})" for name, use in OPTIONAL.items() if importlib.util.find_spec(name) is None]
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))):
        lacks.append("a C++ compiler (Inductor on the CPU)")
    if _numbers(torch.__version__) < LOWEST_TORCH:
        lacks.append(f"PyTorch 2.11 or later (here is {torch.__version__})")
    if setting.on_gpu and not torch.cuda.is_available():
        lacks.append("a CUDA GPU, or a PyTorch that is built for CUDA")
    return lacks


def _card() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    version = torch.backends.cudnn.version()
    return {
        "card": properties.name,
        "cards": torch.cuda.device_count(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
        "cuda_of_pytorch": torch.version.cuda,
        "cudnn": version,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
    }


def _driver() -> str:
    """The driver's version, and the power limit and clock that the card runs with."""
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown: nvidia-smi does not answer"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:2])


def _outside_of_pins() -> list[str]:
    """Packages below the versions that ``pyproject.toml`` asks for; they are named, and nothing is refused."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    differing = []
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["torch"]]:
        name, _, lowest = requirement.partition(">=")
        version = _version(name)
        if version is not None and _numbers(version) < _numbers(lowest):
            differing.append(f"{name} {version} (asked for: {lowest})")
    return differing
