"""What became of a case."""

from __future__ import annotations

import re
import traceback
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import burnish


class Kind(StrEnum):
    """From best to worst; see ``DEFECTS``."""

    TRAINED = "trained"  # a step ran
    LOADED = "loaded"  # and no more was asked for
    REFUSED = "refused"  # by an error of burnish that names something
    UNNAMED = "refused without a name"  # by an error of burnish that does not say what is wrong where
    UNREADABLE = "not read again"  # what burnish wrote, it does not read
    SILENT = "accepted silently"  # a file that does not agree with its digest; or one that is read in two ways
    FOREIGN = "foreign exception"  # an exception that is none of burnish's
    MEMORY = "out of memory"
    HANG = "hang"
    CRASH = "crash"


DEFECTS = (Kind.UNNAMED, Kind.UNREADABLE, Kind.SILENT, Kind.FOREIGN, Kind.MEMORY, Kind.HANG, Kind.CRASH)
"""What no file may lead to."""

_NAMED = re.compile(
    r"'[^']+'|\"[^\"]+\""  # a name
    r"|node name: [^)\s]|Name: \S+ OpType"  # as the standard's own checks name nodes
    r"|\bthe (bytes|ModelProto|onnx_ir\.Model)\b"  # the source
    r"|^The init graph of the program"
    r"|^nothing would train: the model has no weights"  # and so no name to give
    r"|^the loss \w|^The loss |^the dimension|"
    r"^(recompute|norm|trainable|outputs|metrics|loss|precision|optimizer): |\bopset -?\d"  # an option, a version
)
_LAST_RESORT = "worth reporting"
"""What the messages say that catch whatever nobody thought of."""


@dataclass
class Outcome:
    """What became of a case, and where.

    Attributes:
        number, seed: of the case, and what it was made from.
        kind: the worst of its stages, or how far it came.
        stage: what was being done: ``load``, ``compile``, ``grad``, ``step``, ...
        error: the class of the error; the signal of a crash.
        message: of the error, one line.
        place: where it was raised.
        seconds: all that the case took.
    """

    number: int
    seed: str
    kind: Kind
    stage: str = ""
    error: str = ""
    message: str = ""
    place: str = ""
    seconds: float = 0.0

    @property
    def is_defect(self) -> bool:
        return self.kind in DEFECTS

    @property
    def group(self) -> tuple[str, ...]:
        """The same for outcomes that have one cause, as far as can be told."""
        return (self.kind.value, self.stage, self.error, self.place)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        return cls(**{**values, "kind": Kind(values["kind"])})


def kind_of(error: BaseException) -> Kind:
    """What an exception means that left a function of burnish."""
    if any(isinstance(cause, MemoryError) for cause in _chain(error)) and not isinstance(error, burnish.errors.EngineError):
        return Kind.MEMORY
    if not isinstance(error, burnish.errors.BurnishError):
        return Kind.FOREIGN
    message = str(error)
    return Kind.REFUSED if _NAMED.search(message) and _LAST_RESORT not in message else Kind.UNNAMED


def place_of(error: BaseException) -> str:
    """Where an exception was raised first: the innermost line of burnish, and the innermost of all."""
    frames = traceback.extract_tb(_chain(error)[-1].__traceback__)
    own = [frame for frame in frames if f"{Path('src') / 'burnish'}" in frame.filename or "/burnish/" in frame.filename]
    shown = ([own[-1]] if own else []) + ([frames[-1]] if frames and (not own or frames[-1] is not own[-1]) else [])
    return " < ".join(f"{Path(frame.filename).name}:{frame.name}" for frame in reversed(shown))


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what led to it."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain
