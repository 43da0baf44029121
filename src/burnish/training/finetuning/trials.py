"""The program of a stage as it is compiled to try it: the run goes on with it, at another rate, and need not compile it again."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from burnish import optim
from burnish.compiler.compilation import STEPS_PER_EPOCH
from burnish.errors import ObjectiveWarning, UntrainedWeightsWarning
from burnish.importer.reading import read_model
from burnish.optim.base import Rate, RatedOptimizer
from burnish.program import Program
from burnish.program.weights import Weights
from burnish.training.finetuning.transfer import Transfer

SAID_BY_THE_RUN = (ObjectiveWarning, UntrainedWeightsWarning)
"""What is not said of a program that only takes trial steps."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A program that was compiled to be tried.

    Attributes:
        transfer: gives what it was compiled of, as long as that is needed elsewhere.
        program: at a constant rate, which the run replaces (``Program.with_optimizer``).
        seconds: that it took.
        unsaid: warnings that are said when a run takes the program.
    """

    transfer: weakref.ref[Transfer]
    program: Program
    seconds: float
    unsaid: tuple[warnings.WarningMessage, ...]

    @classmethod
    def of(cls, transfer: Transfer, compiled: Callable[[], Program]) -> Trial:
        """Compile a program, and keep what only concerns those who train it."""
        begin = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program = compiled()
        seconds = time.monotonic() - begin
        unsaid = tuple(each for each in caught if issubclass(each.category, SAID_BY_THE_RUN))
        _say(tuple(each for each in caught if each not in unsaid))
        return cls(weakref.ref(transfer), program, seconds, unsaid)

    def is_of(self, transfer: Transfer) -> bool:
        """Whether a run that trains this, whatever steps its epochs have, has this program."""
        return self.transfer() is transfer and STEPS_PER_EPOCH not in self.program.options

    def read_from(self, path: Path) -> Trial:
        """Return the same with weights that need no memory once a session has taken them over, as a file holds them.

        Args:
            path: of the model that the program was compiled of.
        """
        weights, held = self.program.weights, read_model(path).graph.initializers
        if not isinstance(weights, Weights):
            return self
        moved = weights.read_from({name: value.const_value for name, value in held.items() if value.const_value is not None})
        moved.release()
        return replace(self, program=self.program.changed(weights=moved))

    def optimizer(self, rate: Rate) -> optim.Optimizer:
        """Return the optimizer of the program at another rate, a number or a schedule, for ``Program.with_optimizer``."""
        return _at_rate(optim.get(self.program.options["optimizer"]), rate)

    def taken(self) -> Program:
        """Return the program for a run that trains it, and give the warnings that concern it."""
        _say(self.unsaid)
        return self.program


def _at_rate(optimizer: optim.Optimizer, rate: Rate) -> optim.Optimizer:
    if isinstance(optimizer, RatedOptimizer):
        return replace(optimizer, lr=rate)
    return replace(optimizer, optimizer=_at_rate(optimizer.optimizer, rate))  # type: ignore[attr-defined, type-var]


def _say(caught: tuple[warnings.WarningMessage, ...]) -> None:
    for each in caught:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
