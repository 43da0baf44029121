"""Checkpoints: the whole state of a training run in one safetensors file, written atomically.

The file's header has a digest of the whole file, the format version, the identity of the program, the step, the engine and the
caller's values (the position in the data). Nothing is unpickled.

A checkpoint of adapters (``burnish.surgery.lora``) leaves out state that no step changes, and its header has the hash of that.

A checkpoint with a journal holds the state that every step changes, and names a base and the records of changed rows in the
folder ``journal`` next to it (``burnish.training.tables``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.engines.non_finite_loss import first_non_finite
from burnish.engines.row_writes import written_by_rows
from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.digest import DIGEST, FORMAT_VERSION, check_version
from burnish.files.file_writing import OWN_FOLDER, file_path
from burnish.files.identity import adapter_base, graph_hashes, program_hash
from burnish.files.row_journal import JournalledState, JournalPlace, RowJournal
from burnish.files.state_file import NAMES, StateFile, encoded, write_state_file
from burnish.program import Program
from burnish.program.state import Kind, LazyArrays, blocks, check_state, chosen, kind_of, read_into, state_differences
from burnish.untrusted_files import UNREADABLE, read_json

if TYPE_CHECKING:
    from burnish.program.carry_over import CarriedState


FORMAT = "burnish checkpoint"
EXAMPLE = "last.safetensors"
JOURNAL = "journal"
"""Header entry with the place in a journal, and folder of journals next to checkpoints."""
BASE = "base"
"""Header entry with the hash of the weights under adapters."""


@dataclass(frozen=True)
class ProgramIdentity:
    """The identity of a program: a hash of graphs and signature, and a hash of each graph."""

    program: str
    graphs: dict[str, str]

    @classmethod
    def of(cls, program: Program) -> ProgramIdentity:
        graphs = graph_hashes(program)
        return cls(program_hash(graphs, program.signature), graphs)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file.

    Attributes:
        state: arrays by state name; an open checkpoint reads each on request.
        step: number of steps taken.
        identity: identity of the program that wrote it.
        engine: name of the engine that wrote it.
        extra: JSON-compatible values of the caller.
        metadata: entries for the ``metadata_props`` of an exported model.
        journal: the journal and the place in it; None for a state in one file.
        base: hash of the weights under adapters, which are not in the file; None for a whole state.
    """

    state: Mapping[str, np.ndarray]
    step: int
    identity: ProgramIdentity
    engine: str
    extra: dict[str, Any]
    metadata: dict[str, str] = field(default_factory=dict)
    journal: JournalPlace | None = None
    base: str | None = None


def _json_text(what: str, path: Path, values: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(values))
        read_json(text)  # some written JSON cannot be read again: deeply nested lists, lone surrogates
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{what} of the checkpoint '{path}' is not JSON: {error}. Give numbers, strings, lists and dicts of them"
        ) from error
    return text


def write_checkpoint(
    path: str | Path,
    state: Mapping[str, np.ndarray],
    *,
    step: int,
    identity: ProgramIdentity,
    engine: str,
    extra: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    check: Callable[[str, np.ndarray], None] | None = None,
    journal: JournalPlace | None = None,
    base: str | None = None,
) -> None:
    """Write a checkpoint atomically; an earlier file is replaced only by a complete one.

    Args:
        path: file name, by convention ending in ``.safetensors``.
        state: arrays by state name; lazy arrays are in memory one at a time.
        step: number of steps taken.
        identity: identity of the program.
        engine: name of the engine.
        extra: JSON-compatible values that ``read_checkpoint`` returns.
        metadata: entries for the ``metadata_props`` of an exported model.
        check: as in ``write_state_file``.
        journal: place in a journal with the remaining state; ``state`` is then without it.
        base: hash of the remaining state, which never changes; ``state`` is then without it.

    Raises:
        CheckpointError: the file cannot be written.
        ConfigurationError: ``extra`` or ``metadata`` is not JSON-compatible, or could not be read again.
    """
    path = file_path(path, EXAMPLE)
    extra_text = _json_text("extra", path, extra or {})
    metadata_text = _json_text("metadata", path, metadata or {})
    is_new_folder = not path.parent.exists()
    try:
        path.parent.mkdir(mode=OWN_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"The folder of '{path}' cannot be made: {error}. Choose a folder you can write to") from error
    header = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "step": str(step),
        "program": identity.program,
        "graphs": json.dumps(identity.graphs),
        "engine": engine,
        "extra": extra_text,
        **({"metadata": metadata_text} if metadata else {}),
        **({} if journal is None else {JOURNAL: journal.as_json()}),
        **({} if base is None else {BASE: base}),
    }
    try:
        write_state_file(path, state, header, check=check)
    except BaseException:
        if is_new_folder:
            with contextlib.suppress(OSError):  # the folder may hold other files
                path.parent.rmdir()
        raise


def finite_check(path: str | Path, names: Collection[str]) -> Callable[[str, np.ndarray], None]:
    """Return a ``check`` for ``write_checkpoint``: CheckpointError for NaN or infinite values in these state entries."""

    def check(name: str, part: np.ndarray) -> None:
        if name in names and first_non_finite({name: part}) is not None:
            raise CheckpointError(
                f"No checkpoint was written to '{path}': '{name}' holds NaN or infinite values. An earlier file there is "
                "untouched: restore it and lower the learning rate (lr), or clip the gradients"
            )

    return check


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint without comparing it with a program.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, not a checkpoint, or of another format version.
    """
    with open_checkpoint(path) as checkpoint:
        return replace(checkpoint, state=dict(checkpoint.state))


@contextlib.contextmanager
def open_checkpoint(path: str | Path, is_known: Callable[[JournalPlace], bool] | None = None) -> Iterator[Checkpoint]:
    """Open a checkpoint without comparing it with a program; its arrays are read on request.

    The file was read once before, and matches its digest.

    Args:
        path: the file.
        is_known: for a checkpoint with a journal, returns True if most of its base is not needed; the digest of the base is then
            not checked.

    Raises:
        CheckpointError: as in ``read_checkpoint``; also when an array is read.
    """
    path = file_path(path, EXAMPLE)
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(StateFile(path, "checkpoint"))
        checkpoint = _described(path, file)
        if checkpoint.journal is not None:
            checkpoint = replace(checkpoint, state=opened.enter_context(_journalled(path, file, checkpoint.journal, is_known)))
        yield checkpoint


@contextlib.contextmanager
def _journalled(
    path: Path, head: StateFile, place: JournalPlace, is_known: Callable[[JournalPlace], bool] | None
) -> Iterator[JournalledState]:
    folder = path.parent / JOURNAL
    if not (folder / place.base).is_file():
        raise CheckpointError(
            f"The checkpoint '{path}' goes on from '{folder / place.base}', which is not there: keep the folder '{JOURNAL}' "
            "beside it, or use a whole checkpoint, which is saved without journal"
        )
    with StateFile(folder / place.base, "base of a journal") as base:
        described = _described(folder / place.base, base, is_known is None or not is_known(place))
        if base.metadata.get(DIGEST) != place.base_digest or described.identity.program != head.metadata["program"]:
            raise CheckpointError(
                f"'{folder / place.base}' is not the base that the checkpoint '{path}' goes on from: use an earlier checkpoint"
            )
        with JournalledState(head, base, RowJournal(folder / place.rows, place.base, place.end, base.kind)) as state:
            yield state


def place_of(path: Path) -> JournalPlace | None:
    """Return the place in a journal that a checkpoint names, or None; nothing else is read.

    Raises:
        CheckpointError: the file is not a checkpoint.
    """
    with StateFile(path, "checkpoint") as file:
        try:
            return JournalPlace.from_json(file.metadata[JOURNAL]) if JOURNAL in file.metadata else None
        except UNREADABLE as error:
            raise CheckpointError(f"The header of the checkpoint '{path}' is damaged ({error!r})") from error


def _described(path: Path, file: StateFile, checked: bool = True) -> Checkpoint:
    header = file.metadata
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"'{path}' is a safetensors file, but not a burnish checkpoint: give a file that save_checkpoint wrote. "
            "To start from foreign weights, load them into the model before it is compiled"
        )
    try:
        check_version(
            header["version"], f"The checkpoint '{path}'", "go on with the burnish that wrote it, or train again without it"
        )
        if checked:
            file.check_digest()
        identity = ProgramIdentity(header["program"], dict(read_json(header["graphs"])))
        metadata = {str(key): str(value) for key, value in read_json(header.get("metadata", "{}")).items()}
        extra = dict(read_json(header["extra"]))
        journal = JournalPlace.from_json(header[JOURNAL]) if JOURNAL in header else None
        return Checkpoint(file, int(header["step"]), identity, header["engine"], extra, metadata, journal, header.get(BASE))
    except UNREADABLE as error:
        raise CheckpointError(
            f"The header of the checkpoint '{path}' is damaged ({error!r}): use an earlier checkpoint"
        ) from error


def check_checkpoint(path: str | Path, checkpoint: Checkpoint, program: Program, identity: ProgramIdentity) -> None:
    """Raise CheckpointError unless the checkpoint belongs to this program and has exactly its state."""
    subject = f"The checkpoint '{path}'"
    remedy = "Compile the model with the options that it was made with, or start without it"
    if checkpoint.identity.program != identity.program:
        differences = state_differences(program.signature.state, checkpoint.state)
        if tables := _other_rows(checkpoint, program):
            named = "; ".join(f"'{name}' has {theirs:,} rows there and {own:,} here" for name, theirs, own in tables)
            raise CheckpointError(
                f"{subject} is of a model with another vocabulary: {named}. Compile the model that it was made with; or give the "
                "model that is exported from it that number of rows, which keeps those that it has, and compile that: "
                f"burnish.surgery.resize_table(model, '{tables[0][0]}', {tables[0][2]})"
            )
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


def with_base(
    path: str | Path, checkpoint: Checkpoint, base: AdapterBase, present: Mapping[str, np.ndarray]
) -> Mapping[str, np.ndarray]:
    """Return the state of a checkpoint, with the base added if it leaves one out.

    Args:
        path: path of the checkpoint.
        checkpoint: the open checkpoint.
        base: base of the program that gets the state.
        present: state that has the base.

    Raises:
        CheckpointError: the base differs, or the program has no adapters.
    """
    if checkpoint.base is None:
        return checkpoint.state
    own = base.hash(present)
    if own is None:
        raise CheckpointError(
            f"The checkpoint '{path}' holds adapters alone, and the program has none: compile the model that it was made "
            "with, with its adapters (burnish.surgery.lora)"
        )
    if own != checkpoint.base:
        raise CheckpointError(
            f"The checkpoint '{path}' holds adapters of another model: the weights beside them had the SHA-256 "
            f"{checkpoint.base[:16]}..., and those of this program have {own[:16]}.... Compile the file that they were trained "
            "on; or take the adapters over to this one all the same: session.restore(path, strict=False)"
        )
    return OnBase(checkpoint.state, chosen(present, base.names))


def carried_from(path: str | Path, checkpoint: Checkpoint, program: Program, present: Mapping[str, np.ndarray]) -> CarriedState:
    """Carry over the state that a checkpoint of another program shares with this one.

    Args:
        path: path of the checkpoint.
        checkpoint: the checkpoint.
        program: program that gets the state.
        present: state of the program, kept for entries that are not carried over.

    Raises:
        CheckpointError: no parameter is shared.
    """
    from burnish.program.carry_over import carry_over

    state = checkpoint.state
    if checkpoint.base is not None:  # the weights under its adapters are the present ones
        state = {**chosen(present, AdapterBase(program).names), **state}
    carried = carry_over(program.init, program.signature, program.options, present, state)
    if not any(name.startswith("param/") and name in checkpoint.state for name in carried.carried):
        raise CheckpointError(
            f"The checkpoint '{path}' is of another model: it has no parameter that this program has, in name, shape and "
            "dtype. Compile the model that it was made with"
        )
    return carried


def _other_rows(checkpoint: Checkpoint, program: Program) -> list[tuple[str, int, int]]:
    """Tables updated by rows that differ only in their number of rows: initializer, rows in the checkpoint, rows here."""
    by_rows = written_by_rows(program.signature["step"])
    tables = []
    for entry in program.signature.state:
        if entry.name in by_rows and entry.name.startswith("param/") and entry.name in checkpoint.state:
            _, shape = kind_of(checkpoint.state, entry.name)
            own = entry.extents
            if len(shape) == len(own) and shape[1:] == own[1:] and shape[0] != own[0] and isinstance(own[0], int):
                tables.append((entry.name.removeprefix("param/"), shape[0], own[0]))
    return tables


class AdapterBase:
    """The state entries of a program that ``adapter_base`` names, and their hash.

    Args:
        program: the program.

    Attributes:
        names: names of these entries.
    """

    def __init__(self, program: Program):
        self.names = adapter_base(program)
        self._hash: str | None = None

    def left_out_of(self, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the remaining state; lazy arrays stay lazy."""
        base = set(self.names)
        return chosen(state, (name for name in state if name not in base)) if base else state

    def hash(self, state: Mapping[str, np.ndarray]) -> str | None:
        """Return the SHA-256 of names, dtypes, shapes and bits, which no step changes; None without a base.

        ``docs/program-format.md`` has their encoding.
        """
        if self._hash is None and self.names:
            digest = hashlib.sha256()
            for name in sorted(self.names):
                dtype, shape = kind_of(state, name)
                for text in (name.encode(), NAMES[dtype].encode()):
                    digest.update(struct.pack("<Q", len(text)) + text)
                digest.update(struct.pack(f"<{1 + len(shape)}Q", len(shape), *shape))
                for block in blocks(state[name]):
                    digest.update(encoded(block))
            self._hash = digest.hexdigest()
        return self._hash

    def forget(self) -> None:
        """Forget the hash after another state was loaded."""
        self._hash = None


class OnBase(LazyArrays):
    """The state of a checkpoint of adapters, completed by its base.

    Args:
        adapters: state in the checkpoint.
        base: the remaining state.
    """

    def __init__(self, adapters: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray]):
        self._parts = (adapters, base)

    def _part(self, name: str) -> Mapping[str, np.ndarray]:
        for part in self._parts:
            if name in part:
                return part
        raise KeyError(name)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._part(name)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for part in self._parts for name in part)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def kind(self, name: str) -> Kind:
        return kind_of(self._part(name), name)

    def read_into(self, name: str, target: np.ndarray, is_zero: bool = False) -> None:
        read_into(self._part(name), name, target)
