"""The folders of runs: named after the model or by ``--name``, numbered if that name is taken, and found again to go on."""

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
"""The file in the folder of a run with its options."""


def folder_asked(model: Path, results: Results, suffix: str = "") -> Path:
    """Return the folder that a command names, else ``runs/<name>``, which a new run takes with a number if it is taken.

    Args:
        model: whose name the folder has by default.
        results: the options of the command.
        suffix: of that name.

    Raises:
        typer.BadParameter: ``--name`` is no name of one folder, or a folder is named too.
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
    """Return the folders of runs of one name, ``base``, ``base-2`` and so on, as far as they are there, the newest last."""
    with suppress(OSError):
        names = [path.name for path in base.parent.iterdir()]
        numbers = sorted(number for name in names if (number := _number(base, name)) is not None)
        return [_numbered(base, number) for number in numbers]
    return []


def newest(base: Path) -> Path:
    """Return the newest folder of a name in which a run has begun; ``base`` if there is none."""
    return next((folder for folder in reversed(numbered(base)) if configuration_in(folder) is not None), base)


def configuration_in(run: Path) -> Path | None:
    """Return the file with the options of the run in a folder, of several stages or seeds the first; None if it holds none."""
    seeds = sorted(run.glob("seed-*"), key=lambda path: (len(path.name), path.name))
    places = [folder / within / CONFIGURATION for folder in (run, *seeds) for within in ("", f"{STAGES}/1")]
    return next((path for path in places if _is_file(path)), None)


@contextmanager
def claimed(base: Path, results: Results) -> Iterator[Path]:
    """Yield the folder of a run. A new one has a folder that no other run has or gets, however many start at once.

    A folder that the command names, goes on in or overwrites is taken as it is. A new one that stays empty is removed.

    Args:
        base: as ``folder_asked`` returns it.
        results: the options of the command.

    Raises:
        ConfigurationError: the folder cannot be made.
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
        with suppress(OSError):  # something is in it
            folder.rmdir()
            if makes_parent:
                base.parent.rmdir()


@contextmanager
def claimed_together(group: ProcessGroup, base: Path, results: Results) -> Iterator[Path]:
    """Yield the folder of a run on all workers, which the first one claims."""
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
    """Make the next folder of a name, which is this process's alone."""
    while True:
        last = numbered(base)
        folder = _numbered(base, 1 + (_number(base, last[-1].name) or 0 if last else 0))
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:  # another run has just made it
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
    except OSError:  # a folder that cannot be entered
        return False
