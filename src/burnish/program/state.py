"""State by name: whether it fits a program, and the file it is kept in.

The file is a safetensors file with a metadata header. It is written under another name, flushed to the disk and renamed:
a reader finds the earlier file or the new one, never a part of either. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from burnish.errors import BurnishError, CheckpointError, ConfigurationError
from burnish.optim.average import AVERAGE
from burnish.program.signature import Entry, Signature

Arrays = dict[str, np.ndarray]


def check_state(
    entries: Iterable[Entry], state: Mapping[str, np.ndarray], error: type[BurnishError], source: str, remedy: str
) -> None:
    """Raise ``error`` unless ``state`` holds exactly these entries, each with its dtype and shape.

    Args:
        entries: the state entries of a program.
        state: arrays by state name.
        error: the class to raise.
        source: what the state is, as the subject of the message.
        remedy: what the user can do, as a sentence without its full stop.
    """
    differences = state_differences(entries, state)
    if differences:
        raise error(f"{source} does not fit the program: {'; '.join(differences)}. {remedy}")


def state_differences(entries: Iterable[Entry], state: Mapping[str, np.ndarray]) -> list[str]:
    """Return what is missing, unknown or of another dtype or shape, each as a phrase; empty when the state fits."""
    expected = {entry.name: entry for entry in entries}
    differences = []
    missing = [name for name in expected if name not in state]
    unknown = [name for name in state if name not in expected]
    if missing:
        differences.append(f"missing {_listed(missing)}")
    if unknown:
        differences.append(f"unknown {_listed(unknown)}")
    unfit = []
    for name, entry in expected.items():
        if name not in state:
            continue
        array = state[name]
        if not isinstance(array, np.ndarray | np.generic):
            unfit.append(f"'{name}' is a {type(array).__name__}, not an array")
        elif not shape_fits(array.shape, entry.extents):
            unfit.append(f"'{name}' has shape {list(array.shape)}, expected {list(entry.extents)}")
        elif array.dtype != entry.numpy_dtype:
            unfit.append(f"'{name}' has dtype {array.dtype}, expected {entry.numpy_dtype}")
    return differences + unfit[:5] + ([f"and {len(unfit) - 5} more"] if len(unfit) > 5 else [])


def shape_fits(actual: tuple[int, ...], expected: tuple[int | str | None, ...]) -> bool:
    """Whether an array of shape ``actual`` may stand where ``expected`` is declared; what is no integer there is open."""
    return len(actual) == len(expected) and all(
        not isinstance(wanted, int) or wanted == extent for extent, wanted in zip(actual, expected, strict=True)
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def averages(signature: Signature, parameters: str) -> dict[str, str]:
    """Return ``param/<initializer>`` -> the state entry of its average, for every parameter that has one.

    Raises:
        ConfigurationError: ``parameters`` is another word than ``average``, or no optimizer of the program keeps one.
    """
    if parameters != "average":
        raise ConfigurationError(f"parameters must be None, for those of the state, or 'average', not {parameters!r}")
    prefix = f"opt/{AVERAGE}/"
    found = {f"param/{entry.name.removeprefix(prefix)}": entry.name for entry in signature.state if entry.name.startswith(prefix)}
    if not found:
        raise ConfigurationError(
            "parameters='average': the program's optimizer keeps no average of them; wrap it in burnish.optim.ema(...) or "
            "burnish.optim.swa(...), which program.with_optimizer(...) does for one that is compiled"
        )
    return found


def file_path(path: str | os.PathLike[str], example: str) -> Path:
    """Return a path to write a file to or to read it from.

    Raises:
        CheckpointError: it is no path, or that of a folder; the message proposes ``example``.
    """
    try:
        found = Path(path)
    except TypeError:
        raise CheckpointError(f"{path!r} is not a path: give the name of a file, such as '{example}'") from None
    if found.is_dir():
        raise CheckpointError(f"'{found}' is a folder: give the name of a file, such as '{found / example}'")
    return found


def write_state_file(path: Path, state: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays and a text header into one safetensors file, whole or not at all.

    Raises:
        CheckpointError: the file cannot be written; an earlier one is as it was.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in state.items()}
    with replacing(path) as partial:
        save_file(arrays, partial, metadata=dict(metadata))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; what was written there then takes the place of ``path`` in one step.

    Partial files that earlier processes left when they were killed while writing ``path`` are removed then.

    Raises:
        CheckpointError: writing failed; ``path`` is as it was before.
    """
    partial = partial_path(path)
    try:
        yield partial
        flush_to_disk(partial)
        os.replace(partial, path)
        flush_to_disk(path.parent)
        remove_left_behind(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"'{path}' could not be written: {error}. An earlier file there is untouched. "
            "Free space on the disk, or choose a folder you can write to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def partial_path(path: Path, ending: str = "partial") -> Path:
    """Return a new name beside ``path`` for what is not in its place yet, or not any more."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{ending}")


def remove_left_behind(path: Path) -> None:
    """Remove what processes that were killed left under the names that ``partial_path`` gives for ``path``."""
    named = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.(partial|earlier)")
    with contextlib.suppress(OSError):
        for other in [other for other in path.parent.iterdir() if named.fullmatch(other.name)]:
            if other.is_dir():
                shutil.rmtree(other, ignore_errors=True)
            else:
                other.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk, where the system offers that."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state_file(path: Path, kind: str) -> tuple[Arrays, dict[str, str]]:
    """Read a safetensors file: arrays by name, and its text header. Sizes are checked before memory is taken.

    Args:
        path: the file.
        kind: what it should be, for the message: ``checkpoint``.

    Raises:
        CheckpointError: the file is missing, truncated, or not a safetensors file.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no {kind} '{path}': check the path, or start without it")
    try:
        with safe_open(path, framework="np") as file:
            metadata = dict(file.metadata() or {})
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"'{path}' is not a whole {kind}: it is truncated, damaged or another kind of file ({error}). "
            "Use an earlier one, or start without it"
        ) from error
