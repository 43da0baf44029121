"""The choice between several ways to compute the same: measured once on a machine, and remembered in a file.

Ways differ in the order in which they add up, and so in the last bits of what they give. A choice that another run would not find
again could therefore not be resumed bit for bit. So a way is only measured where the choice is remembered: where the file is
switched off or cannot be written, the usual way is taken.

The file is JSON, in the folder that holds the engine's other files. ``BURNISH_KERNEL_CHOICES`` names another file, or is ``off``.
What is not of its form counts as nothing remembered, and is replaced. Processes that want the same choice at once measure it
once: one holds the lock, the others read what it found.
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
"""Choices that are kept, the latest of them, and bytes of a file that is read."""

FAST_ENOUGH = 2e-4
"""Seconds of the usual way up to which it stays."""

GAIN = 0.8
"""Another way is taken where it needs at most this share of the usual one's time: noise decides nothing."""

HOPELESS, SLOWER = 8.0, 2.0
"""By how many times a way may be slower than the best, in a trial with a part of the operands, and in a run with all of them."""

NOISE = 1e-2
"""Seconds that a run may take longer besides: what is made for a shape is made in the first, and another process may have the
core for a while."""

ROUNDS, LONG = 8, 0.4
"""Further runs of those that are near the best, and seconds after which there are no more."""

ENOUGH = 3
"""Further runs after which the usual way stays where no other is quicker by as much as ``GAIN``."""

_log = logging.getLogger("burnish")
_measuring = threading.Lock()
_remembered: dict[tuple[Path, str], dict[str, str]] = {}
"""By file and circumstances, what this process has read or found."""


def choose(key: str, ways: Sequence[str], sources: Sequence[Path], measure: Callable[[], str]) -> str:
    """The way to take, by its name.

    Args:
        key: what is computed: operation, sizes, element type, threads.
        ways: the names of all there are, the usual one first.
        sources: files that implement them: choices are forgotten when they change.
        measure: finds the quickest.

    Returns:
        The way that is remembered, or the one that ``measure`` finds, which is remembered then; the usual one where it cannot be.
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
            here |= _read(path).get(where, {})  # files come there whole: this takes no lock, nor a folder to write to
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
    """Run all ways, and return the name of the quickest; the first one is the usual one.

    Args:
        ways: what is to be run, by name.
        trials: the same with a part of the operands, run first: a way that is far behind there is not run as a whole.

    Raises:
        RuntimeError: the usual way fails, and so do all others. A way that fails where another does not is out.
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
    """The seconds of each way that does not fail."""
    found: dict[str, float] = {}
    failure: Exception | None = None
    for name, run in ways.items():
        try:
            found[name] = _seconds(run)
        except (RuntimeError, MemoryError) as error:  # such as memory that is not there
            failure = error
    if not found:
        assert failure is not None
        raise failure
    return found


def _again(found: Mapping[str, float], ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The shorter of what was found and another run, for those that are near the best; the others are as they were."""
    return {**found, **{name: min(found[name], _seconds(ways[name])) for name in _near(found, SLOWER)}}


def _near(found: Mapping[str, float], limit: float) -> list[str]:
    """Those that take at most so many times as long as the best, or a little more."""
    least = limit * min(found.values()) + NOISE
    return [name for name, seconds in found.items() if seconds <= least]


def _seconds(run: Callable[[], object]) -> float:
    start = _clock()
    run()
    return _clock() - start


def _clock() -> float:
    """Seconds that this thread has run for, so that it matters little who else has the cores: it takes part in all that PyTorch's
    threads share, and waits for them without sleeping, but for a while."""
    return time.thread_time()


def file() -> Path | None:
    """Where choices are remembered; None where they are switched off."""
    named = os.environ.get(VARIABLE)
    if named == "off":
        return None
    return Path(named) if named else cache_folder() / "kernel-choices.json"


@functools.cache
def circumstances(sources: tuple[Path, ...]) -> str:
    """What choices depend on beside their key, as one name: the processor, PyTorch, and the ways themselves."""
    parts = [model_name(), torch.backends.cpu.get_cpu_capability(), torch.__version__]
    parts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("ONEDNN_", "DNNL_", "MKL_"))]
    parts += [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, dict[str, str]]:
    """The choices of a file; none where there is no such file, or where it is not of the form."""
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
    """Write a file whole or not at all; of too many choices the oldest are left out."""
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
