"""Messages between server and clients of a federated run, in memory and as files.

Files are in the safetensors format: arrays by state name, and a text header; see ``docs/federated.md``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from burnish.errors import CheckpointError, ConfigurationError
from burnish.federated.sharing import Sharing
from burnish.files.digest import FORMAT_VERSION, check_version
from burnish.files.state_file import read_state_file, write_state_file
from burnish.program.state import Arrays
from burnish.untrusted_files import UNREADABLE, read_json
from burnish.validation import is_number, is_whole

ROUND, UPDATE = "burnish federated round", "burnish federated update"


@dataclass(frozen=True)
class Round:
    """A round, for the clients.

    Attributes:
        number: number of the round, from 1.
        program: the program's hash (``Server.program_hash``).
        state: the shared state, by name.
        sharing: the sharing rules.
        epochs: epochs of each client.
        steps: most steps; None for whole epochs.
        hyperparameters: values for each step, such as ``lr``, instead of the program's.
    """

    number: int
    program: str
    state: Mapping[str, np.ndarray]
    sharing: Sharing = field(default_factory=Sharing)
    epochs: int = 1
    steps: int | None = None
    hyperparameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {"number": self.number, "epochs": self.epochs, **({} if self.steps is None else {"steps": self.steps})}
        for name, count in counts.items():
            if not is_whole(count) or count < 1:
                raise ConfigurationError(f"Round: {name}={count!r}: give a whole number of at least one")
        for name, value in self.hyperparameters.items():
            if not is_number(value) or not math.isfinite(value):
                raise ConfigurationError(f"Round: the hyperparameter {name}={value!r} is not a finite number")

    def options(self) -> dict[str, Any]:
        """Return everything but the state, JSON-compatible."""
        rest = {"number": self.number, "program": self.program, "epochs": self.epochs, "steps": self.steps}
        return {**rest, "hyperparameters": dict(self.hyperparameters), "sharing": self.sharing.options()}

    @classmethod
    def of(cls, options: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> Round:
        """Return a round from the result of ``options`` and its state.

        Raises:
            KeyError, TypeError, ConfigurationError: invalid options.
        """
        return cls(**{**options, "sharing": Sharing(**options["sharing"])}, state=state)

    def save(self, path: str | Path) -> None:
        """Write the round to a file, atomically."""
        _write(Path(path), self.state, ROUND, self.options())

    @classmethod
    def load(cls, path: str | Path) -> Round:
        """Read a round.

        Raises:
            CheckpointError: the file is missing, damaged, or not a round.
        """
        state, options = _read(Path(path), ROUND)
        return _made(Path(path), lambda: cls.of(options, state))


@dataclass(frozen=True)
class Update:
    """A client's result of a round.

    Attributes:
        round: number of the round.
        client: number of the client.
        samples: samples trained on, with repetitions, as its weight; 0 if it did nothing.
        steps: steps taken.
        state: the shared state after training; the random key without the client's offset.
        metrics: averages over its steps, weighted by samples.
    """

    round: int
    client: int
    samples: int
    steps: int
    state: Arrays
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("round", "client", "samples", "steps"):
            count = getattr(self, name)
            if not is_whole(count) or count < 0:
                raise ConfigurationError(f"Update: {name}={count!r}: give a whole number of at least zero")

    def save(self, path: str | Path) -> None:
        """Write the update to a file, atomically."""
        options = {key: value for key, value in asdict(self).items() if key != "state"}
        _write(Path(path), self.state, UPDATE, options)

    @classmethod
    def load(cls, path: str | Path) -> Update:
        """Read an update.

        Raises:
            CheckpointError: the file is missing, damaged, or not an update.
        """
        state, options = _read(Path(path), UPDATE)
        return _made(Path(path), lambda: cls(**options, state=state))


@dataclass(frozen=True)
class Evaluation:
    """A client's evaluation of a round's state: totals that add up over clients.

    Attributes:
        round: number of the round.
        client: number of the client.
        samples: samples evaluated.
        totals: result of ``Session.evaluate_totals``.
    """

    round: int
    client: int
    samples: int
    totals: Mapping[str, np.ndarray]


def _write(path: Path, state: Mapping[str, np.ndarray], kind: str, options: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"format": kind, "version": str(FORMAT_VERSION), "options": json.dumps(options)}
    write_state_file(path, state, header)


def _read(path: Path, kind: str) -> tuple[Arrays, Any]:
    state, header = read_state_file(path, kind.removeprefix("burnish "))
    if header.get("format") != kind:
        raise CheckpointError(f"'{path}' is a safetensors file, but no {kind.removeprefix('burnish ')}: check the path")
    _made(path, lambda: check_version(header["version"], f"'{path}'", "send it again, with this burnish"))
    return state, _made(path, lambda: read_json(header["options"]))


def _made(path: Path, make: Any) -> Any:
    try:
        return make()
    except (ConfigurationError, *UNREADABLE) as error:
        raise CheckpointError(f"The header of '{path}' is damaged ({error}): ask for it again") from error
