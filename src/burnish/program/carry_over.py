"""What of one program's state another program can go on with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish import optim
from burnish.optim.accumulate import UPDATES
from burnish.optim.loss_scale import LossScaled
from burnish.optim.slots import slot_of
from burnish.program.initialization import run_init
from burnish.program.signature import Entry, Role, Signature
from burnish.program.state import Arrays, shape_fits

UPDATE_COUNT = UPDATES.entry()
NOT_THERE = "the other state has none"
"""Why an entry starts anew that the other program does not have."""
SHOWN = 4
"""Entries of one slot that a message names one by one."""


@dataclass(frozen=True)
class CarriedState:
    """A state for a program, made of another program's as far as that fits.

    Attributes:
        state: every entry of the program, arrays by state name.
        carried: names that were taken over.
        fresh: names that the program has and the other state did not, or not so: they start anew; with the reason.
        dropped: names of the other state that this program has no place for.
    """

    state: Arrays
    carried: tuple[str, ...]
    fresh: dict[str, str]
    dropped: tuple[str, ...]

    def notes(self) -> list[str]:
        """Return what could not be carried, a sentence for each reason; ``fresh`` and ``dropped`` name every entry."""
        sentences = []
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.fresh.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            sentences.append(f"{_named(names)} {'starts' if len(names) == 1 else 'start'} anew: {reason}")
        if self.dropped:
            sentences.append(f"{_named(self.dropped)} {'was' if len(self.dropped) == 1 else 'were'} left out: no such state here")
        return sentences


def carry_over(
    init: ir.Model,
    signature: Signature,
    options: Mapping[str, Any],
    start: Mapping[str, np.ndarray],
    source: Mapping[str, np.ndarray],
) -> CarriedState:
    """Take over from ``source`` every entry that a program has too, of the same shape and dtype.

    Slots of the optimizer that start anew do so from the parameters that were taken over, as the init graph makes them. The step
    counter starts anew where all of the method's slots do: with moments that start anew, the corrections of a late step would
    be wrong for them. It counts updates: where only one of the two programs accumulates gradients, the number of updates that
    were done goes on.

    Args:
        init, signature, options: of the program.
        start: a whole state of it, where entries that cannot be taken over start.
        source: the state of another program, arrays by state name; left as it is.
    """
    entries = signature.state
    source = _with_updates(source, entries)
    expected = {entry.name: entry for entry in entries}
    fresh: dict[str, str] = {}
    for name, entry in expected.items():
        if name not in source:
            fresh[name] = NOT_THERE
        elif not shape_fits(source[name].shape, entry.extents):
            fresh[name] = f"the other has shape {list(source[name].shape)}, here it is {list(entry.extents)}"
        elif source[name].dtype != entry.numpy_dtype:
            fresh[name] = f"the other has dtype {source[name].dtype}, here it is {entry.numpy_dtype}"
    declared = (*optim.slots_by_options(options.get("optimizer", {})), *LossScaled.slots)
    kept = (name for name, entry in expected.items() if entry.role is Role.OPTIMIZER)
    slots = [name for name in kept if slot_of(name, declared).of_method]
    if slots and fresh.keys() >= set(slots):
        for name, entry in expected.items():
            if name not in fresh and (entry.role is Role.STEP or name == UPDATE_COUNT):
                fresh[name] = f"the optimizer's state does ('{slots[0]}')"
    carried = tuple(name for name in expected if name not in fresh)
    state = {name: np.array(source[name] if name in carried else start[name]) for name in expected}
    if any(expected[name].role is Role.OPTIMIZER for name in fresh):
        initial = run_init(init, signature["init"], state, seed=0)
        state |= {name: np.array(initial[name]) for name in fresh if expected[name].role is Role.OPTIMIZER}
    return CarriedState(state, carried, fresh, tuple(name for name in source if name not in expected))


def _with_updates(source: Mapping[str, np.ndarray], entries: Iterable[Entry]) -> dict[str, np.ndarray]:
    """The state with the number of updates under the name that a program has for it."""
    accumulates = any(entry.name == UPDATE_COUNT for entry in entries)
    found = dict(source)
    if accumulates and "step" in found:
        found.setdefault(UPDATE_COUNT, found["step"])
    elif not accumulates and UPDATE_COUNT in found:
        found["step"] = found.pop(UPDATE_COUNT)
    return found


def _named(names: Iterable[str]) -> str:
    """Names as a phrase; of a slot that many parameters have, the first and how many more there are."""
    by_slot: dict[str, list[str]] = {}
    for name in names:
        by_slot.setdefault(name.rpartition("/")[0] if name.startswith("opt/") and name.count("/") > 1 else name, []).append(name)
    phrases: list[str] = []
    for slot, members in by_slot.items():
        shown = members if len(members) <= SHOWN else members[:1]
        phrases += [f"'{name}'" for name in shown]
        if len(members) > len(shown):
            phrases[-1] += f" and {len(members) - 1} more '{slot}/...'"
    return ", ".join(phrases)
