"""A case's number makes its mutant: which seed, what is done to it, and the form in which burnish gets it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import onnx
import onnx_ir as ir

from fuzz.byte_mutations import mutate_bytes
from fuzz.mutations import mutate
from fuzz.seeds import MODEL, Seed, seeds

MOST_MUTATIONS = 6
SHARE_OF_BYTES = 0.15
"""Of the mutants, how many are changed in their bytes, and not in their parsed form."""
ODD_FILES = re.compile(rb"link\.bin|hard\.bin|pipe|sub")
"""Locations that there is something odd at."""
FILES_OF = "files"
"""The form of a mutant that is no model and no program of ``seeds``."""
FORMS = ("bytes", "bytes", "bytes", "path", "proto", "ir")


@dataclass
class Mutant:
    """What a case gives to burnish.

    Attributes:
        seed: the name of what was changed.
        files: by name.
        form: in which a model is given: ``bytes``, ``path``, ``proto`` or ``ir``.
        mutations: what was done, one text each.
        options: the source of chance for what is asked of burnish.
    """

    seed: str
    files: dict[str, bytes]
    form: str
    mutations: list[str]
    options: Random = field(repr=False)

    @property
    def is_program(self) -> bool:
        return MODEL not in self.files

    def source(self, folder: Path) -> Any:
        """Write what has to be on disk into a folder, and return what ``burnish.load`` or ``Program.load`` is given."""
        if self.form == "path":
            for name, content in self.files.items():
                (folder / name).write_bytes(content)
            if ODD_FILES.search(self.files.get(MODEL, b"")):
                _add_odd_files(folder)
            return folder if self.is_program else folder / MODEL
        content = self.files[MODEL]
        if self.form == "bytes":
            return content
        proto = onnx.ModelProto.FromString(content)
        return proto if self.form == "proto" else ir.from_proto(proto)


def make(seed: int, number: int, without: Collection[int] = ()) -> Mutant:
    """Return the mutant of a case.

    Args:
        seed: of the whole run.
        number: of the case.
        without: positions of mutations that are left out.
    """
    random = Random(f"{seed}/{number}")
    name = random.choice(list(seeds()))
    origin = seeds()[name]
    count = 1
    while count < MOST_MUTATIONS and random.random() < 0.3:
        count += 1
    in_bytes = origin.is_program or random.random() < SHARE_OF_BYTES
    form = "path" if len(origin.files) > 1 else random.choice(FORMS)
    chances = ((position, Random(f"{seed}/{number}/{position}")) for position in range(count) if position not in without)
    change = _changed_bytes if in_bytes else _changed_model
    files, done = change(origin, chances)
    if form in ("proto", "ir") and not _is_readable(files[MODEL], form):
        form = "bytes"
    return Mutant(name, files, form, done, Random(f"{seed}/{number}/options"))


def _changed_model(origin: Seed, chances: Iterator[tuple[int, Random]]) -> tuple[dict[str, bytes], list[str]]:
    model = onnx.ModelProto.FromString(origin.files[MODEL])
    done = [mutate(random, model) for _, random in chances]
    return {**origin.files, MODEL: model.SerializeToString()}, done


def _changed_bytes(origin: Seed, chances: Iterator[tuple[int, Random]]) -> tuple[dict[str, bytes], list[str]]:
    files = dict(origin.files)
    done = []
    for _, random in chances:
        name = MODEL if MODEL in files and random.random() < 0.9 else random.choice(list(files))
        if len(files) > 1 and random.random() < 0.05:
            del files[name]
            done.append(f"{name} is not there")
            if not files or (name == MODEL):
                files[MODEL if name == MODEL else name] = b""
            continue
        files[name], text = mutate_bytes(random, files[name], _bytes_of_another)
        done.append(f"{name}: {text}")
    return files, done


def _bytes_of_another(random: Random) -> bytes:
    other = random.choice(list(seeds().values()))
    return random.choice(list(other.files.values()))


def _is_readable(content: bytes, form: str) -> bool:
    """Whether the libraries themselves make an object of the bytes, as a caller of burnish would have to."""
    try:
        proto = onnx.ModelProto.FromString(content)
        if form == "ir":
            ir.from_proto(proto)
    except Exception:  # whatever they raise, nobody would have an object to give
        return False
    return True


def _add_odd_files(folder: Path) -> None:
    """What a location may name besides a file of weights: links, a folder, and a pipe that nobody writes to."""
    makers: tuple[Callable[[], Any], ...] = (
        lambda: (folder / "link.bin").symlink_to("/etc/hostname"),
        lambda: os.link(folder / "weights.bin", folder / "hard.bin"),
        lambda: os.mkfifo(folder / "pipe"),
        lambda: (folder / "sub").mkdir(),
    )
    for maker in makers:
        try:
            maker()
        except OSError:  # a file system without it, or no weights to link to
            continue
