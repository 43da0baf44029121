"""Time of a training step beside PyTorch eager and torch.compile.

The first losses of each contender are held to PyTorch's before its time counts. Contenders whose memory allows it are alive
together and take turns, so that a card whose clock drifts slows all of them alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpu_stages.models import BERT_BASE, GPT2_SMALL, RESNET50, Model, sized
from gpu_stages.setting import OK, SKIPPED, Report, Setting, Skipped
from gpu_stages.trainers import (
    AUTOTUNED,
    BURNISH,
    BURNISH_INDUCTOR,
    BURNISH_LAUNCHED,
    COMPILED,
    EAGER,
    Contender,
    Measured,
    check_losses,
    enter,
    let_go,
    take_turn,
    timed,
)

ROUNDS, TURN_SECONDS = 5, 0.6
TINY_ROUNDS, TINY_TURN_SECONDS = 2, 0.01
# Of the largest peak so far that must be free for another contender to come in.
HEADROOM = 1.3


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: in the sizes that are timed.
        precision: ``float32``, ``TF32`` or ``bfloat16``.
        batch: samples in a step.
    """

    model: Model
    precision: str
    batch: int

    @property
    def title(self) -> str:
        return f"{self.model.title}, {self.precision}, batch {self.batch}"

    def row_of(self, contender: str) -> str:
        return f"{self.title}: {contender}"

    def measured_in(self, setting: Setting) -> tuple[Model, int]:
        """The model and the batch that stand for it."""
        return sized(self.model, setting.tiny), 4 if setting.tiny else self.batch


# The figures that are asked for first come first: a run may be cut off.
CASES = (
    Case(RESNET50, "bfloat16", 256),
    Case(BERT_BASE, "bfloat16", 32),
    Case(GPT2_SMALL, "bfloat16", 8),
    Case(RESNET50, "TF32", 256),
    Case(RESNET50, "float32", 64),
    Case(RESNET50, "bfloat16", 64),
    Case(RESNET50, "TF32", 64),
    Case(RESNET50, "float32", 256),
)
FIRST = (EAGER, COMPILED, BURNISH, BURNISH_INDUCTOR)
# Seconds until a contender is timed, on a GPU: a compiler takes most of them.
COMPILED_SECONDS, LAUNCHED_SECONDS = 45.0, 15.0
# Minutes of compilation each: after all others.
LAST = (AUTOTUNED, BURNISH_LAUNCHED)


def run(setting: Setting, report: Report) -> None:
    """Time all cases with the contenders that compile fast, then with the others."""
    for contenders in (FIRST, LAST):
        for case in CASES:
            Comparison(case, setting, report).run(contenders)


class Comparison:
    """One case with some contenders; PyTorch eager is the first one of all."""

    def __init__(self, case: Case, setting: Setting, report: Report):
        self._case, self._setting, self._report = case, setting, report
        self._model, self._batch = case.measured_in(setting)
        self._expected: list[float] | None = None
        self._alive: list[Measured] = []
        self._largest = 0

    def run(self, contenders: tuple[Contender, ...]) -> None:
        """Let all contenders in that were not measured yet, and take turns."""
        missing = [each for each in contenders if self._report.measured(self._case.row_of(each.title)) is None]
        reference = self._report.measured(self._case.row_of(EAGER.title))
        self._expected = None if reference is None else reference["losses"]
        for contender in missing:
            if self._setting.tiny and self._stands_for_another(contender):
                continue
            if not self._has_room():
                self._take_turns()
            self._let_in(contender)
        self._take_turns()
        torch.compiler.reset()

    def _stands_for_another(self, contender: Contender) -> bool:
        """Whether in tiny sizes another case runs the same lines; the row then names it."""
        case = self._case
        same = next(each for each in CASES if (each.model, each.precision) == (case.model, case.precision))
        reason = None
        if same is not case or (case.precision == "TF32" and not self._setting.on_gpu):
            reason = f"in tiny sizes {CASES[0].title} stands for it"
        elif contender is BURNISH_INDUCTOR:
            reason = "in tiny sizes the perceptron of the stage launches is compiled by Inductor"
        elif contender.compiles and case.model is not BERT_BASE and not contender.gpu:
            reason = f"in tiny sizes {CASES[1].title} is compiled"
        if reason is not None:
            self._report.row(self._case.row_of(contender.title), SKIPPED, {"reason": reason})
        return reason is not None

    def _let_in(self, contender: Contender) -> None:
        name = self._case.row_of(contender.title)
        needs = COMPILED_SECONDS if contender.compiles else LAUNCHED_SECONDS
        measured = self._report.case(name, partial(self._opened, contender), needs if self._setting.on_gpu else 0.0)
        if measured is None and self._alive and self._alive[-1].title == contender.title:
            self._alive.pop().trainer.close()
        let_go(self._setting.device)

    def _opened(self, contender: Contender) -> dict[str, Any]:
        """Open a contender, hold its losses to the first one's and time it alone, in case the run is cut off."""
        before = self._reserved()
        measured = enter(contender, self._model, self._batch, self._case.precision, self._setting)
        self._alive.append(measured)
        if contender is EAGER:
            self._expected = measured.figures["losses"]
        elif self._expected is None:
            raise Skipped("there are no losses of PyTorch eager to hold it to")
        else:
            check_losses(measured.figures["losses"], self._expected, self._case.precision)
        self._largest = max(self._largest, self._reserved() - before)
        take_turn(measured, self._turn_seconds)
        return timed(measured, self._batch)

    def _take_turns(self) -> None:
        """Interleave the turns of those who are alive, tell their figures and let them go."""
        for _ in range(TINY_ROUNDS if self._setting.tiny else ROUNDS):
            for measured in self._alive:
                take_turn(measured, self._turn_seconds)
        together = [measured.title for measured in self._alive]
        for measured in self._alive:
            del measured.turns[0]  # the one that it took alone
            self._report.row(self._case.row_of(measured.title), OK, timed(measured, self._batch) | {"beside": together})
        for measured in self._alive:
            measured.trainer.close()
        self._alive = []
        let_go(self._setting.device)

    @property
    def _turn_seconds(self) -> float:
        return TINY_TURN_SECONDS if self._setting.tiny else TURN_SECONDS

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved() if self._setting.on_gpu else 0

    def _has_room(self) -> bool:
        """Whether memory is left for another contender as large as the largest so far."""
        if not self._setting.on_gpu or not self._alive:
            return True
        return torch.cuda.mem_get_info()[0] > HEADROOM * self._largest
