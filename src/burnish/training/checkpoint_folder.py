"""The checkpoints of a run: the latest, a rolling set of earlier ones, and the best."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.errors import CheckpointError
from burnish.files.file_writing import replacing
from burnish.training.checkpoint import open_checkpoint
from burnish.training.journal import remove_unused, unfinished
from burnish.training.session import Session

LATEST, BEST = "latest.safetensors", "best.safetensors"
_NUMBERED = re.compile(r"step-(\d+)\.safetensors")
# What is under way when a process is killed: our own partial files, and those that safetensors writes before them.
_LEFT_BEHIND = re.compile(r"\.(latest|best|step-\d+)\.safetensors\.[0-9a-f]{8}\.partial|\.tmp[A-Za-z0-9]{6}")


class CheckpointFolder:
    """The folder ``checkpoints`` of a run. Every file in it is whole; none is written over, only replaced.

    ``latest.safetensors`` is the last state, ``step-<steps>.safetensors`` the last ``keep`` of them (the newest is the same
    file as ``latest``, not a copy, where the file system can do that), ``best.safetensors`` the best, which may be the same file
    too.

    Args:
        folder: made when the first file is written.
        keep: how many checkpoints of the rolling set to keep; 1 keeps ``latest`` alone.
        journal: save them as ``Session.save_checkpoint`` does with ``journal``.
    """

    def __init__(self, folder: Path, keep: int = 1, journal: bool = False):
        self.folder = folder
        self.keep = keep
        self.journal = journal

    @property
    def latest(self) -> Path:
        return self.folder / LATEST

    @property
    def best(self) -> Path:
        return self.folder / BEST

    @property
    def numbered(self) -> list[Path]:
        """The rolling set, newest first."""
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        steps = {path: int(match[1]) for path in files if (match := _NUMBERED.fullmatch(path.name))}
        return sorted(steps, key=steps.__getitem__, reverse=True)

    @property
    def exists(self) -> bool:
        """Return whether there is a run to resume here."""
        return self.latest.exists() or bool(self.numbered)

    @property
    def metadata(self) -> dict[str, str]:
        """What the newest whole checkpoint says of its model's data; nothing where there is none."""
        for path in (self.latest, *self.numbered):
            try:
                with open_checkpoint(path) as checkpoint:
                    return checkpoint.metadata
            except CheckpointError:
                continue
        return {}

    def clear(self) -> None:
        """Remove the checkpoints of an earlier run, and what a killed process left half written."""
        for path in (self.latest, self.best, *self.numbered, *self._left_behind()):
            path.unlink(missing_ok=True)
        remove_unused(self.folder)

    def save(self, session: Session, extra: Mapping[str, Any], is_best: bool = False) -> None:
        """Write the latest checkpoint, and drop the oldest of the rolling set.

        Args:
            session: whose state is saved.
            extra: kept with it.
            is_best: the best checkpoint was just written of this state with this ``extra``: the latest is then the same file.

        Raises:
            CheckpointError: the state holds NaN or infinite values, or a file cannot be written; earlier ones are untouched.
        """
        if is_best and not self.journal:
            _link(self.best, self.latest)
        else:
            session.save_checkpoint(self.latest, extra, self.journal)
        if self.keep > 1:
            _link(self.latest, self.folder / f"step-{session.step_count:08d}.safetensors")
        for path in self.numbered[self.keep if self.keep > 1 else 0 :]:
            path.unlink(missing_ok=True)

    def save_best(self, session: Session, extra: Mapping[str, Any]) -> None:
        """Write the best checkpoint, in place of an earlier one."""
        session.save_checkpoint(self.best, extra, self.journal)

    def restore(self, session: Session) -> tuple[dict[str, Any], Path, list[str]]:
        """Restore the newest checkpoint that is whole, and remove what a killed process left half written.

        Returns:
            The ``extra`` that it was saved with, its file, and a sentence on each newer file that was passed over, and on what
            was dropped of a journal.

        Raises:
            CheckpointError: there is none, or none is whole; the message is that of the newest.
        """
        first: CheckpointError | None = None
        passed_over: list[str] = []
        for path in self._left_behind():
            path.unlink(missing_ok=True)
        for path in (self.latest, *self.numbered):
            try:
                extra = session.restore(path)
            except CheckpointError as error:
                first = first or error
                if path.exists():
                    passed_over.append(f"Passed over: {error}")
            else:
                if (dropped := unfinished(path)) is not None:
                    passed_over.append(dropped)
                remove_unused(self.folder)
                return extra, path, passed_over
        assert first is not None
        raise first

    def _left_behind(self) -> list[Path]:
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        return [path for path in files if _LEFT_BEHIND.fullmatch(path.name)]


def _link(source: Path, path: Path) -> None:
    """Give a file another name, in place of what has it; a copy, where the file system has no hard links.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with replacing(path) as partial:
        partial.unlink()  # a link takes the place of no file
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)
