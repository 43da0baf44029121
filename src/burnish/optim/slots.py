"""What optimizers keep from step to step, each declared with what others have to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STATE = "opt/"
"""What the names of the optimizer's state in a program begin with."""


class Slot(str):
    """The name of something that an optimizer keeps: ``<slot>/<initializer>`` of each parameter, or ``<slot>`` alone.

    An optimizer, a wrapper or a schedule lists its own as ``slots``. Of several groups, or transforms, a slot is
    ``<slot>:<which>``.

    Attributes:
        per_parameter: whether there is one for each parameter.
        is_average: whether it is an average of the parameter, which evaluation and export may take in its place, and which every
            worker keeps.
        is_anchor: whether it is a value of the parameter that updates are held near, and do not change; a federated client sets
            it to the parameter that a round begins with.
        is_partial: whether each worker may have a part of its own; the state of the run is then the sum of these.
        of_method: whether the formulas of the optimizer go by it and the step together: where all of these start anew, so does
            the step. What goes around an optimizer does not.
    """

    per_parameter: bool
    is_average: bool
    is_anchor: bool
    is_partial: bool
    of_method: bool

    def __new__(
        cls,
        name: str,
        *,
        per_parameter: bool = True,
        is_average: bool = False,
        is_anchor: bool = False,
        is_partial: bool = False,
        of_method: bool = True,
    ) -> Slot:
        slot = super().__new__(cls, name)
        slot.per_parameter, slot.is_average, slot.is_anchor = per_parameter, is_average, is_anchor
        slot.is_partial, slot.of_method = is_partial, of_method
        return slot

    def entry(self, name: str = "") -> str:
        """Return the name of the state entry that holds it, of the parameter of an initializer where each has one."""
        return f"{STATE}{self}/{name}" if self.per_parameter else f"{STATE}{self}"


def slot_of(entry: str, slots: Sequence[Slot] = ()) -> Slot:
    """Return the slot of an entry of the optimizer's state: as it was declared, where it is among ``slots``."""
    name = entry.removeprefix(STATE).partition("/")[0].partition(":")[0]
    return next((slot for slot in slots if slot == name), Slot(name, per_parameter="/" in entry.removeprefix(STATE)))


def parameter_of(entry: str) -> str | None:
    """Return the initializer of the parameter that an entry of the optimizer's state belongs to; None for what belongs to all."""
    return entry.removeprefix(STATE).partition("/")[2] or None


def slots_of(optimizer: Any) -> tuple[Slot, ...]:
    """Return what an optimizer and those inside it declare, and their schedules; each once."""
    slots: dict[Slot, None] = {}
    while optimizer is not None:
        slots |= dict.fromkeys((*getattr(optimizer, "slots", ()), *getattr(getattr(optimizer, "lr", None), "slots", ())))
        optimizer = getattr(optimizer, "optimizer", None)
    return tuple(slots)
