"""Save and load programs: as a folder, or as one ONNX file if the path ends in ``.onnx``."""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from burnish.files.folder import load_program, save_program
from burnish.files.training_info import load_training_model, to_training_model, write_training_model
from burnish.program import Program

SUFFIX = ".onnx"


def save(program: Program, path: Path) -> Path:
    """Write a program; see ``Program.save``."""
    return write_training_model(to_training_model(program), path) if path.suffix == SUFFIX else save_program(program, path)


def load(source: str | Path | onnx.ModelProto) -> Program:
    """Read a program; see ``Program.load``."""
    if isinstance(source, onnx.ModelProto) or os.path.isfile(source) or Path(source).suffix == SUFFIX:
        return load_training_model(source)
    return load_program(Path(source))
