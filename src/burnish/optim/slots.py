"""Slots: the state that optimizers keep from step to step, declared with the facts that other code needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STATE = "opt/"
"""Prefix of the optimizer's state entries in a program."""


class Slot(str):
    """The name of optimizer state: ``<slot>/<initializer>`` for each parameter, or only ``<slot>``.

    An optimizer, a wrapper or a schedule lists its own as ``slots``. With several groups or transforms, the name is
    ``<slot>:<group or transform>``.

    Attributes:
        per_parameter: True if each parameter has one.
        is_average: True for an average of the parameter; evaluation and export may use it instead, and every worker keeps it.
        is_anchor: True for a fixed value that updates keep the parameter close to; a federated client sets it to the parameter at
            the start of a round.
        is_partial: True if each worker may have a separate part; the state of the run is their sum.
        of_method: True if the optimizer's formulas depend on it together with the step: resetting all such slots resets the step
            too. False for wrappers of an optimizer.
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
        """Return the name of its state entry, for the parameter of an initializer if it is per parameter."""
        return f"{STATE}{self}/{name}" if self.per_parameter else f"{STATE}{self}"


def slot_of(entry: str, slots: Sequence[Slot] = ()) -> Slot:
    """Return the slot of an optimizer's state entry, with its declaration if ``slots`` has one."""
    name = entry.removeprefix(STATE).partition("/")[0].partition(":")[0]
    return next((slot for slot in slots if slot == name), Slot(name, per_parameter="/" in entry.removeprefix(STATE)))


def parameter_of(entry: str) -> str | None:
    """Return the initializer that an optimizer's state entry belongs to; None for state of no single parameter."""
    return entry.removeprefix(STATE).partition("/")[2] or None


def slots_of(optimizer: Any) -> tuple[Slot, ...]:
    """Return the slots of an optimizer, its inner optimizers and their schedules, each once."""
    slots: dict[Slot, None] = {}
    while optimizer is not None:
        slots |= dict.fromkeys((*getattr(optimizer, "slots", ()), *getattr(getattr(optimizer, "lr", None), "slots", ())))
        optimizer = getattr(optimizer, "optimizer", None)
    return tuple(slots)
