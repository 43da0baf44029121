"""The files of a run: its checkpoints (the latest, a rolling set of earlier ones, the best), and its record and results."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.errors import CheckpointError
from burnish.files.file_writing import replacing
from burnish.files.folder import MANIFEST
from burnish.training.checkpoint import open_checkpoint
from burnish.training.run_results import EVALUATION_PREFIX, STAGES, TABLE, read_rows
from burnish.training.tables import remove_unused, unfinished
from burnish.untrusted_files import read_json_file

if TYPE_CHECKING:
    from burnish.training.session import Session


LATEST, BEST = "latest.safetensors", "best.safetensors"
_NUMBERED = re.compile(r"step-(\d+)\.safetensors")
# Partial files of a killed process: our own, and those that safetensors writes first.
_LEFT_BEHIND = re.compile(r"\.(latest|best|step-\d+)\.safetensors\.[0-9a-f]{8}\.partial|\.tmp[A-Za-z0-9]{6}")


class CheckpointFolder:
    """The folder ``checkpoints`` of a run. Every file in it is complete; files are replaced, never overwritten.

    ``latest.safetensors`` is the last state, ``step-<steps>.safetensors`` the last ``keep`` of them (the newest is a hard link to
    ``latest`` if the file system has them), ``best.safetensors`` the best, which may be a link too.

    Args:
        folder: the folder, created with the first file.
        keep: size of the rolling set; 1 keeps only ``latest``.
        journal: True to save with a journal, as ``Session.save_checkpoint``.
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
        """True if there is a run to resume."""
        return self.latest.exists() or bool(self.numbered)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the newest complete checkpoint; empty if there is none."""
        for path in (self.latest, *self.numbered):
            try:
                with open_checkpoint(path) as checkpoint:
                    return checkpoint.metadata
            except CheckpointError:
                continue
        return {}

    def clear(self) -> None:
        """Remove the checkpoints of an earlier run, and partial files of a killed process."""
        for path in (self.latest, self.best, *self.numbered, *self._left_behind()):
            path.unlink(missing_ok=True)
        remove_unused(self.folder)

    def save(self, session: Session, extra: Mapping[str, Any], is_best: bool = False) -> None:
        """Write the latest checkpoint, and drop the oldest of the rolling set.

        Args:
            session: session with the state.
            extra: values stored with it.
            is_best: True if the best checkpoint was just written with this state and ``extra``: the latest becomes a link to it.

        Raises:
            CheckpointError: the state has NaN or infinite values, or a file cannot be written; earlier ones are untouched.
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
        """Write the best checkpoint, replacing an earlier one."""
        session.save_checkpoint(self.best, extra, self.journal)

    def restore(self, session: Session) -> tuple[dict[str, Any], Path, list[str]]:
        """Restore the newest complete checkpoint, and remove partial files of a killed process.

        Returns:
            The ``extra`` stored with it, its file, and a sentence on each newer file skipped, and on dropped parts of a journal.

        Raises:
            CheckpointError: there is none, or none is complete; the message is that of the newest.
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
    """Give a file a second name, replacing another file; a copy if the file system has no hard links.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with replacing(path) as partial:
        partial.unlink()  # a hard link cannot replace a file
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)


AVERAGE = "average"
RECORD = "run.json"
RESULTS = "results"
"""Key of the record with the paths, relative to the folder, of further results."""
WITHOUT_RECORD = ("tuned.onnx", "takeover.json", "tokenizer.json")
WITH_RECORD = (*WITHOUT_RECORD, "run.toml", "report.html", "profile.csv", "profile.trace.json", "events")
"""Files that a run may write besides the program, checkpoints and figures; a new run replaces them."""
LOGGED = ("events.out.tfevents.", "adapter_config.json", "adapter_model.safetensors")
"""Prefixes of files in folders of TensorBoard and PEFT."""


def is_run(path: Path) -> bool:
    """Return True if a path is the folder of a run."""
    return (path / "checkpoints").is_dir() and (path / "program").is_dir()


def checkpoint_of(source: Path, best: bool | None = None) -> Path:
    """Return the checkpoint of a run, or a checkpoint itself.

    Args:
        source: the folder of a run, or a checkpoint.
        best: for a run, True for the best epoch, False for the latest state; None: the exported one.

    Raises:
        CheckpointError: there is none.
    """
    if not source.exists():
        raise CheckpointError(f"'{source}': there is no such run or checkpoint; give the folder that burnish train wrote")
    if best is None:
        best = source.is_dir() and exported_best(source)
    checkpoint = source / "checkpoints" / (BEST if best else LATEST) if source.is_dir() else source
    if not checkpoint.exists() and (source / MANIFEST).is_file():
        raise CheckpointError(
            f"'{source}' is a program that is compiled and not trained: train it (burnish train {source}) and export the "
            f"folder of the run; its model as it is stands in '{source / 'predict.onnx'}'"
        )
    if not checkpoint.exists():
        raise CheckpointError(
            f"'{source}' holds no {checkpoint.name}: the run has not saved anything yet, or this is the folder of no run; "
            "give the folder that burnish train wrote, or an ONNX file"
        )
    return checkpoint


def program_beside(checkpoint: Path) -> Path | None:
    """Return the program in the run folder of a checkpoint, or None."""
    return next((folder / "program" for folder in checkpoint.absolute().parents[:2] if (folder / "program").is_dir()), None)


def exported_parameters(run: Path) -> str | None:
    """Return the kind of weights that a run exported: ``average``, or None for the parameters (also if not recorded)."""
    return AVERAGE if read_record(run).get("parameters") == AVERAGE else None


def exported_best(run: Path) -> bool:
    """Return True if a run exported its best epoch, as fine-tuning with evaluation data does, instead of its last."""
    return exported_epoch(_ending(run).get("tuned")) is not None and (run / "checkpoints" / BEST).is_file()


def exported_epoch(figures: Any) -> dict[str, Any] | None:
    """Return the epoch that a run exported as its best, from the figures of ``take_best``.

    Returns:
        ``epoch``, ``metric`` and ``value``, and ``stage`` for an earlier stage; None if the last epoch was exported.
    """
    if not isinstance(figures, dict) or figures.get("data") != "evaluation":
        return None
    metric = next((name for name in figures if name not in ("data", "epoch", "stage")), None)
    if metric is None:
        return None
    places = {name: figures[name] for name in ("epoch", "stage") if name in figures}
    return {**places, "metric": metric, "value": figures[metric]}


def exported_figures(run: Path, names: Sequence[str]) -> dict[str, float] | None:
    """Return evaluation figures of the epoch that a run exported as its best.

    Args:
        run: folder of the run.
        names: names of the loss and the metrics.

    Returns:
        The figures in ``metrics.csv`` of the run or its stage; None if the run exported its last epoch.

    Raises:
        CheckpointError: the table cannot be read, or lacks them.
    """
    exported = exported_epoch(_ending(run).get("tuned"))
    if exported is None:
        return None
    path = (run / STAGES / str(exported["stage"]) if "stage" in exported else run) / TABLE
    columns = {name: EVALUATION_PREFIX + name for name in names}
    for row in read_rows(path):
        figures = {name: row.get(column) for name, column in columns.items()}
        if row["epoch"] == exported["epoch"] and None not in figures.values():
            return {name: value for name, value in figures.items() if value is not None}
    raise CheckpointError(
        f"'{path}' has no figures of epoch {exported['epoch']}, which '{run}' exported: evaluate the run by burnish evaluate"
    )


def best_of(run: Path) -> dict[str, Any] | None:
    """Return the best epoch of the run in a folder, as in ``TrainingResult.best``; None if it is not recorded."""
    best = _ending(run).get("best")
    return best if isinstance(best, dict) and {"epoch", "metric", "value"} <= best.keys() else None


def _ending(run: Path) -> dict[str, Any]:
    ending = read_record(run).get("result")
    return ending if isinstance(ending, dict) else {}


def remove_results(run: Path, also: Sequence[str] = ()) -> None:
    """Remove the results of a run from its folder, except checkpoints and figures, and the names in ``also``."""
    record = read_record(run)
    listed = record.get(RESULTS, [])
    named = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    inside = [name for name in named if ".." not in Path(name).parts and not Path(name).is_absolute()]
    for path in (run / name for name in dict.fromkeys([*(WITH_RECORD if record else WITHOUT_RECORD), *inside, *also])):
        if not path.is_dir():
            path.unlink(missing_ok=True)
            weights = re.compile(re.escape(path.name) + r"-[0-9a-f]{16}\.data")
            beside = [child for child in path.parent.iterdir() if weights.fullmatch(child.name)] if path.parent.is_dir() else []
        else:
            beside = [child for child in path.iterdir() if child.name.startswith(LOGGED)]
        for child in beside:
            child.unlink(missing_ok=True)
        if path.is_dir():
            with contextlib.suppress(OSError):  # the folder may hold other files
                path.rmdir()


def files_of(run: Path) -> list[str]:
    """Return the model and the data of a run, as its record names them."""
    record = read_record(run)
    return [record[name] for name in ("model", "data") if isinstance(record.get(name), str)]


def read_record(run: Path) -> dict[str, Any]:
    """Return the record of ``burnish train`` in the folder of a run; empty if it cannot be read."""
    try:
        record = read_json_file(run / RECORD)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
