"""The choice between several ways to compute the same, measured once on a machine and remembered in a file.

Ways differ in the order of summation, and so in the last bits of their results. If another run made another choice, training
could not be resumed bit for bit. So if the file is disabled or cannot be written, nothing is measured, and the usual way is
taken.

The file is JSON, in the folder of the engine's other files. ``BURNISH_KERNEL_CHOICES`` names another file, or is ``off``.
Malformed content is ignored and replaced. If several processes need the same choice at once, one of them measures it under a
lock.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from burnish.kernels.building import cache_folder, locked, own_cache_folder
from burnish.kernels.compiling import model_name
from burnish.untrusted_files import read_json_file

VARIABLE = "BURNISH_KERNEL_CHOICES"
FORMAT = 1

MOST_CHOICES = 4096
LARGEST_FILE = 1 << 22
"""The number of choices to keep, latest first, and the largest file to read, in bytes."""

FAST_ENOUGH = 2e-4
"""Seconds of the usual way up to which no other is considered."""

GAIN = 0.8
"""Another way must need at most this share of the usual one's time, so that noise decides nothing."""

HOPELESS, SLOWER = 8.0, 2.0
"""Factors by which a way may be slower than the best: in a trial with a part of the operands, and in a full run."""

NOISE = 1e-2
"""Seconds added to these limits: the first run of a shape includes setup, and another process may occupy the core."""

ROUNDS, LONG = 8, 0.4
"""The number of additional runs of the best ways, and the seconds after which there are no more."""

ENOUGH = 3
"""The number of additional runs after which the usual way is kept if no other reaches ``GAIN``."""

_log = logging.getLogger("burnish")
_measuring = threading.Lock()
_remembered: dict[tuple[Path, str], dict[str, str]] = {}
"""Choices that this process has read or made, by file and circumstances."""


def choose(key: str, ways: Sequence[str], sources: Sequence[Path], measure: Callable[[], str]) -> str:
    """Return the name of the way to take.

    Args:
        key: description of the computation: operation, sizes, element type, threads.
        ways: names of all ways, the usual one first.
        sources: files that implement them: a change of these discards choices.
        measure: a function that returns the fastest way.

    Returns:
        The remembered way, or the result of ``measure``, which is then remembered; the usual way if it cannot be.
    """
    path = file()
    if path is None:
        return ways[0]
    where = circumstances(tuple(sources))
    with _measuring:
        here = _remembered.setdefault((path, where), {})
        if here.get(key) in ways:
            return here[key]
        try:
            here |= _read(path).get(where, {})  # files are replaced atomically: reading takes no lock, nor a writable folder
            if here.get(key) in ways:
                return here[key]
            if path.parent == cache_folder():
                own_cache_folder()
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_suffix(".lock")):
                choices = _read(path)
                here |= choices.get(where, {})
                if here.get(key) not in ways:
                    here[key] = measure()
                    choices.setdefault(where, {})[key] = here[key]
                    _write(path, choices)
        except OSError as error:
            here[key] = ways[0]
            _warn(str(error))
        return here[key]


def quickest(ways: Mapping[str, Callable[[], object]], trials: Mapping[str, Callable[[], object]] | None = None) -> str:
    """Run all ways, and return the name of the fastest; the first one is the usual one.

    Args:
        ways: functions to run, by name.
        trials: the same with a part of the operands, run first: a way that is far slower there gets no full run.

    Raises:
        RuntimeError: all ways fail. If only some fail, they are excluded.
    """
    usual = next(iter(ways))
    left = ways
    if trials is not None:
        left = {name: ways[name] for name in _near(_again(_first_runs(trials), trials), HOPELESS)}
    start = _clock()
    best = _first_runs(left)
    for number in range(1, ROUNDS + 1):
        best = _again(best, left)
        if best.get(usual, math.inf) <= FAST_ENOUGH:
            return usual
        settled = number >= ENOUGH and best.get(usual, math.inf) * GAIN < min(best.values())
        if settled or len(_near(best, SLOWER)) == 1 or _clock() - start > LONG:
            break
    winner = min(best, key=best.__getitem__)
    return usual if best.get(usual, math.inf) * GAIN < best[winner] else winner


def _first_runs(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    found: dict[str, float] = {}
    failure: Exception | None = None
    for name, run in ways.items():
        try:
            found[name] = _seconds(run)
        except (RuntimeError, MemoryError) as error:  # such as missing memory
            failure = error
    if not found:
        assert failure is not None
        raise failure
    return found


def _again(found: Mapping[str, float], ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    return {**found, **{name: min(found[name], _seconds(ways[name])) for name in _near(found, SLOWER)}}


def _near(found: Mapping[str, float], limit: float) -> list[str]:
    least = limit * min(found.values()) + NOISE
    return [name for name, seconds in found.items() if seconds <= least]


def _seconds(run: Callable[[], object]) -> float:
    start = _clock()
    run()
    return _clock() - start


def _clock() -> float:
    """Return the processor time of this thread in seconds, which hardly depends on other load.

    The thread takes part in all parallel work of PyTorch, and mostly waits for other threads without sleeping.
    """
    return time.thread_time()


def file() -> Path | None:
    """Return the file with the choices; None if it is disabled."""
    named = os.environ.get(VARIABLE)
    if named == "off":
        return None
    return Path(named) if named else cache_folder() / "kernel-choices.json"


@functools.cache
def circumstances(sources: tuple[Path, ...]) -> str:
    """Return a name for everything else that choices depend on: the processor, PyTorch, and the implementations."""
    parts = [model_name(), torch.backends.cpu.get_cpu_capability(), torch.__version__]
    parts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("ONEDNN_", "DNNL_", "MKL_"))]
    parts += [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, dict[str, str]]:
    try:
        if path.stat().st_size > LARGEST_FILE:
            return {}
        held = read_json_file(path)
    except FileNotFoundError:
        return {}
    except ValueError:
        return {}
    choices: Any = held.get("choices") if isinstance(held, dict) and held.get("format") == FORMAT else None
    if not isinstance(choices, dict) or not all(isinstance(found, dict) for found in choices.values()):
        return {}
    if not all(isinstance(way, str) for found in choices.values() for way in found.values()):
        return {}
    return choices


def _write(path: Path, choices: dict[str, dict[str, str]]) -> None:
    """Write a file atomically, without the oldest choices if there are too many."""
    entries = [(where, key, way) for where, found in choices.items() for key, way in found.items()]
    kept: dict[str, dict[str, str]] = {}
    for where, key, way in entries[-MOST_CHOICES:]:
        kept.setdefault(where, {})[key] = way
    descriptor, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as target:
            json.dump({"format": FORMAT, "choices": kept}, target, indent=1)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@functools.cache
def _warn(reason: str) -> None:
    _log.warning("burnish: the choices between kernels cannot be remembered (%s), so the usual ones are taken", reason)
