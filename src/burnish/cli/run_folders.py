"""The folders of runs: named after the model or by ``--name``, with a number if taken, and found again to resume."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from burnish.cli import launch
from burnish.cli.console import output
from burnish.cli.train_options import Results
from burnish.errors import ConfigurationError

if TYPE_CHECKING:
    from burnish.distributed.connection.process_group import ProcessGroup

RUNS = Path("runs")
STAGES = "stages"
CONFIGURATION = "run.toml"
"""The file with the options in the folder of a run."""


def folder_asked(model: Path, results: Results, suffix: str = "") -> Path:
    """Return the folder given by a command, or ``runs/<name>``; a new run adds a number if it is taken.

    Args:
        model: model that gives the default name.
        results: options of the command.
        suffix: suffix of that name.

    Raises:
        typer.BadParameter: ``--name`` is not a single folder name, or a folder is given too.
    """
    name = results.name
    if name is None:
        return results.folder or RUNS / f"{model.stem}{suffix}"
    if results.folder is not None and "folder" in results.named and not results.resume:
        raise typer.BadParameter(
            f"--name {name} names a folder in runs/, and --output {results.folder} another: give one of them"
        )
    if name in (".", "..") or Path(name).name != name or "\\" in name:
        raise typer.BadParameter(f"--name {name}: give the name of one folder in runs/, or a path by --output")
    return results.folder or RUNS / name


def numbered(base: Path) -> list[Path]:
    """Return the existing run folders of one name, ``base``, ``base-2`` and so on, the newest last."""
    with suppress(OSError):
        names = [path.name for path in base.parent.iterdir()]
        numbers = sorted(number for name in names if (number := _number(base, name)) is not None)
        return [_numbered(base, number) for number in numbers]
    return []


def newest(base: Path) -> Path:
    """Return the newest folder of a name in which a run has begun; ``base`` if there is none."""
    return next((folder for folder in reversed(numbered(base)) if configuration_in(folder) is not None), base)


def configuration_in(run: Path) -> Path | None:
    """Return the options file of the run in a folder (with several stages or seeds, the first), or None."""
    seeds = sorted(run.glob("seed-*"), key=lambda path: (len(path.name), path.name))
    places = [folder / within / CONFIGURATION for folder in (run, *seeds) for within in ("", f"{STAGES}/1")]
    return next((path for path in places if _is_file(path)), None)


@contextmanager
def claimed(base: Path, results: Results) -> Iterator[Path]:
    """Yield the folder of a run. A new run gets a unique folder, however many start at once.

    A folder that is given, resumed or overwritten is used unchanged. A new one that stays empty is removed.

    Args:
        base: result of ``folder_asked``.
        results: options of the command.

    Raises:
        ConfigurationError: the folder cannot be created.
    """
    if results.folder is not None or results.resume or results.overwrite:
        yield base
        return
    if (begun := _of_launch(base)) is not None:
        yield begun
        return
    makes_parent = not base.parent.exists()
    folder = _made(base)
    if folder != base:
        output().print(f"{folder}: the folder of this run, as '{base}' is another's")
    try:
        yield folder
    finally:
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()
            if makes_parent:
                base.parent.rmdir()


@contextmanager
def claimed_together(group: ProcessGroup, base: Path, results: Results) -> Iterator[Path]:
    """Yield the folder of a run on all workers; the first one claims it."""
    from burnish.training.workers import on_first

    with ExitStack() as stack:
        yield Path(on_first(group, lambda: str(stack.enter_context(claimed(base, results))), "the folder of the run"))


def _of_launch(base: Path) -> Path | None:
    """The folder in which an earlier start of the same launch has begun."""
    if not (launch.run_id() or launch.is_restart()):
        return None
    from burnish.training.run_files import read_record

    folders = numbered(base)[::-1]
    named = (folder for folder in folders if launch.run_id() and read_record(folder).get("launch") == launch.run_id())
    return next(named, folders[0] if folders and launch.is_restart() and not launch.run_id() else None)


def _made(base: Path) -> Path:
    """Create the next free folder of a name for this process."""
    while True:
        last = numbered(base)
        folder = _numbered(base, 1 + (_number(base, last[-1].name) or 0 if last else 0))
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:  # another run has just created it
            if not folder.parent.is_dir():
                raise ConfigurationError(f"'{folder.parent}' is a file, and no folder: choose another place (--output)") from None
        except OSError as error:
            raise ConfigurationError(
                f"The folder of the run, '{folder}', cannot be made: {error.strerror or error}: choose another place (--output)"
            ) from error
        else:
            return folder


def _numbered(base: Path, number: int) -> Path:
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


def _number(base: Path, name: str) -> int | None:
    if name == base.name:
        return 1
    found = re.fullmatch(re.escape(base.name) + r"-([1-9]\d{0,8})", name, re.ASCII)
    return int(found[1]) if found and found[1] != "1" else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder without permission
        return False
