"""Checkpoints: the whole state of a training run in one safetensors file, written whole or not at all.

The file's text header holds the format version, the identity of the program, the step, the engine, a checksum of the arrays and
what the caller adds (the position in the data). Nothing is unpickled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from burnish.errors import CheckpointError, ConfigurationError
from burnish.program import Program
from burnish.program.persistence import graph_hashes, program_hash
from burnish.program.state import check_state, file_path, read_state_file, state_differences, write_state_file

FORMAT = "burnish checkpoint"
FORMAT_VERSION = 1
EXAMPLE = "last.safetensors"


@dataclass(frozen=True)
class ProgramIdentity:
    """What tells one program from another: a hash of the graphs and the signature, and one of each graph."""

    program: str
    graphs: dict[str, str]

    @classmethod
    def of(cls, program: Program) -> ProgramIdentity:
        graphs = graph_hashes(program)
        return cls(program_hash(graphs, program.signature), graphs)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        state: arrays by state name.
        step: how many steps had been taken.
        identity: of the program that it was made with.
        engine: the name of the engine that it was made on.
        extra: what the caller added: JSON-compatible values.
        metadata: entries for the ``metadata_props`` of an exported model.
    """

    state: dict[str, np.ndarray]
    step: int
    identity: ProgramIdentity
    engine: str
    extra: dict[str, Any]
    metadata: dict[str, str] = field(default_factory=dict)


def write_checkpoint(
    path: str | Path,
    state: Mapping[str, np.ndarray],
    *,
    step: int,
    identity: ProgramIdentity,
    engine: str,
    extra: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint, whole or not at all; an earlier file of this name is replaced only by a whole one.

    Args:
        path: a file name, by convention ending in ``.safetensors``.
        state: arrays by state name.
        step: how many steps have been taken.
        identity: of the program.
        engine: name of the engine.
        extra: JSON-compatible values that ``read_checkpoint`` gives back.
        metadata: entries for the ``metadata_props`` of an exported model.

    Raises:
        CheckpointError: the file cannot be written.
        ConfigurationError: ``extra`` is not JSON-compatible.
    """
    path = file_path(path, EXAMPLE)
    try:
        extra_text = json.dumps(dict(extra or {}))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"extra of the checkpoint '{path}' is not JSON: {error}. Give numbers, strings, lists and dicts of them"
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"The folder of '{path}' cannot be made: {error}. Choose a folder you can write to") from error
    header = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "step": str(step),
        "program": identity.program,
        "graphs": json.dumps(identity.graphs),
        "engine": engine,
        "checksum": _checksum(state),
        "extra": extra_text,
        **({"metadata": json.dumps(dict(metadata))} if metadata else {}),
    }
    write_state_file(path, state, header)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint without comparing it with a program.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, not a checkpoint, or of a newer format.
    """
    path = file_path(path, EXAMPLE)
    state, header = read_state_file(path, "checkpoint")
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"'{path}' is a safetensors file, but not a burnish checkpoint: give a file that save_checkpoint wrote. "
            "To start from foreign weights, load them into the model before it is compiled"
        )
    try:
        version = int(header["version"])
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"'{path}' is of checkpoint format {version}, and this burnish reads up to {FORMAT_VERSION}: update burnish"
            )
        if "checksum" in header and header["checksum"] != _checksum(state):
            raise CheckpointError(f"'{path}' is damaged: its arrays are not those that were written. Use an earlier checkpoint")
        identity = ProgramIdentity(header["program"], dict(json.loads(header["graphs"])))
        metadata = {str(key): str(value) for key, value in json.loads(header.get("metadata", "{}")).items()}
        return Checkpoint(state, int(header["step"]), identity, header["engine"], dict(json.loads(header["extra"])), metadata)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The header of the checkpoint '{path}' is damaged ({error!r}): use an earlier checkpoint"
        ) from error


def _checksum(state: Mapping[str, np.ndarray]) -> str:
    """CRC-32 of names and contents, in the order of the names: a file system may give back other bits than it was given."""
    total = 0
    for name in sorted(state):
        content = np.ascontiguousarray(state[name]).reshape(-1).view(np.uint8)
        total = zlib.crc32(content.data, zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def check_checkpoint(path: str | Path, checkpoint: Checkpoint, program: Program, identity: ProgramIdentity) -> None:
    """Raise CheckpointError unless the checkpoint was made with this program and holds exactly its state."""
    subject = f"The checkpoint '{path}'"
    remedy = "Compile the model with the options that it was made with, or start without it"
    if checkpoint.identity.program != identity.program:
        differences = state_differences(program.signature.state, checkpoint.state)
        if differences:
            raise CheckpointError(
                f"{subject} was made with another program: {'; '.join(differences)}. {remedy}, or take over what fits: "
                "session.restore(path, strict=False), or burnish train --start-from"
            )
        changed = [name for name, value in identity.graphs.items() if checkpoint.identity.graphs.get(name) != value]
        what = f"these graphs differ: {', '.join(changed)}" if changed else "the signatures differ"
        raise CheckpointError(
            f"{subject} was made with another program: its state has the same names and shapes, but {what}. {remedy}, or take "
            "over its state alone: session.load_state(burnish.training.read_checkpoint(path).state)"
        )
    check_state(program.signature.state, checkpoint.state, CheckpointError, subject, "It is damaged: use an earlier checkpoint")
