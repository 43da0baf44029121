"""The frozen base that adapters stand on: the part of a state that checkpoints name and do not hold."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping

import numpy as np

from burnish.files.identity import adapter_base
from burnish.files.state_file import NAMES, encoded
from burnish.program import Program
from burnish.program.state import Kind, LazyArrays, blocks, chosen, kind_of, read_into


class AdapterBase:
    """The state entries of a program that ``adapter_base`` names, and their hash.

    Args:
        program: the program.

    Attributes:
        names: of these entries.
    """

    def __init__(self, program: Program):
        self.names = adapter_base(program)
        self._hash: str | None = None

    def left_out_of(self, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the rest of a state; arrays that are made on request are not made."""
        base = set(self.names)
        return chosen(state, (name for name in state if name not in base)) if base else state

    def hash(self, state: Mapping[str, np.ndarray]) -> str | None:
        """Return the SHA-256 of names, dtypes, shapes and bits, which no step changes; None where there is no base.

        ``docs/program-format.md`` says how these are written one after the other.
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
        """Forget the hash: another state was loaded."""
        self._hash = None


class OnBase(LazyArrays):
    """The state of a checkpoint of adapters, and the base that it goes with.

    Args:
        adapters: what the checkpoint holds.
        base: the rest.
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
