"""State that carries over from one program to another."""

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
"""The reason why an entry is new if the other program does not have it."""
SHOWN = 4
"""The number of entries of one slot that a message names."""


@dataclass(frozen=True)
class CarriedState:
    """A state for a program, taken from another program's state as far as it fits.

    Attributes:
        state: every entry of the program, arrays by state name.
        carried: names that were taken over.
        fresh: names that the other state does not have in this form, with the reason; they start from their initial values.
        dropped: names of the other state that this program does not have.
    """

    state: Arrays
    carried: tuple[str, ...]
    fresh: dict[str, str]
    dropped: tuple[str, ...]

    def notes(self) -> list[str]:
        """Return a sentence for each reason why entries were not carried; ``fresh`` and ``dropped`` name every entry."""
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
    """Take over from ``source`` every entry of the same name, shape and dtype.

    Optimizer slots that are new start as the init graph makes them from the carried parameters. The step counter restarts if all
    slots of the method do, because the bias corrections of a late step would be wrong for new moments. It counts updates: if only
    one of the two programs accumulates gradients, the number of completed updates continues.

    Args:
        init, signature, options: the init graph, signature and options of the program.
        start: a complete state of the program, for entries that cannot be taken over.
        source: the state of another program, arrays by state name; not modified.
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
    accumulates = any(entry.name == UPDATE_COUNT for entry in entries)
    found = dict(source)
    if accumulates and "step" in found:
        found.setdefault(UPDATE_COUNT, found["step"])
    elif not accumulates and UPDATE_COUNT in found:
        found["step"] = found.pop(UPDATE_COUNT)
    return found


def _named(names: Iterable[str]) -> str:
    """Return names as a phrase; for a slot of many parameters, the first and the number of others."""
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
