"""What the folder of a run holds: checkpoints, the program beside them, and a record of the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burnish.errors import CheckpointError
from burnish.formats.folder import MANIFEST
from burnish.training.checkpoint_folder import BEST, LATEST

AVERAGE = "average"
RECORD = "run.json"


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run."""
    return (path / "checkpoints").is_dir() and (path / "program").is_dir()


def checkpoint_of(source: Path, best: bool = False) -> Path:
    """Return the checkpoint of a run, or a checkpoint itself.

    Args:
        source: the folder of a run, or a checkpoint.
        best: of a run, the best epoch instead of the latest state.

    Raises:
        CheckpointError: there is none.
    """
    if not source.exists():
        raise CheckpointError(f"'{source}': there is no such run or checkpoint; give the folder that burnish train wrote")
    checkpoint = source / "checkpoints" / (BEST if best else LATEST) if source.is_dir() else source
    if not checkpoint.exists() and (source / MANIFEST).is_file():
        raise CheckpointError(
            f"'{source}' is a program that is compiled and not trained: train it (burnish train {source}) and export the "
            f"folder of the run; its model as it is stands in '{source / 'predict.onnx'}'"
        )
    if not checkpoint.exists():
        raise CheckpointError(f"'{source}' holds no {checkpoint.name}: the run has not saved anything yet")
    return checkpoint


def program_beside(checkpoint: Path) -> Path | None:
    """Return the program that the run of a checkpoint keeps in its folder, or None where there is none."""
    return next((folder / "program" for folder in checkpoint.absolute().parents[:2] if (folder / "program").is_dir()), None)


def exported_parameters(run: Path) -> str | None:
    """Return what the run in a folder exported: the parameters (None, also where it does not say), or their ``average``."""
    return AVERAGE if read_record(run).get("parameters") == AVERAGE else None


def read_record(run: Path) -> dict[str, Any]:
    """Return what ``burnish train`` recorded of a run in its folder; empty where nothing can be read."""
    try:
        record = json.loads((run / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
