"""State taken over from another program of the same model: what fits goes on, what does not is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from burnish.optim.accumulate import UPDATES

if TYPE_CHECKING:
    from burnish.program.program import Program

STEP = "step"
UPDATE_COUNT = f"opt/{UPDATES}"


@dataclass(frozen=True)
class CarriedState:
    """A state of a program, and where it comes from.

    Attributes:
        state: arrays by state name, for ``Session(program, state=...)``.
        fresh: entries that start anew, with the reason: name -> reason.
        dropped: entries of the earlier state that this program has no use for.
    """

    state: dict[str, np.ndarray]
    fresh: dict[str, str]
    dropped: tuple[str, ...]


def carry_state(program: Program, state: Mapping[str, np.ndarray], seed: int) -> CarriedState:
    """Return what ``program`` can go on from; see ``Program.carry_state``."""
    carried = program.initial_state(seed)
    found = dict(state)
    if UPDATE_COUNT in found and UPDATE_COUNT not in carried:
        found[STEP] = found.pop(UPDATE_COUNT)
    elif UPDATE_COUNT in carried and STEP in found:
        found.setdefault(UPDATE_COUNT, found[STEP])
    fresh = {}
    for name, initial in carried.items():
        array = np.asarray(found[name]) if name in found else None
        if array is None:
            fresh[name] = "the earlier state does not have it"
        elif array.shape != initial.shape:
            fresh[name] = f"it has shape {list(array.shape)} in the earlier state, and {list(initial.shape)} here"
        elif array.dtype != initial.dtype:
            fresh[name] = f"it has dtype {array.dtype} in the earlier state, and {initial.dtype} here"
        else:
            carried[name] = array.copy()
    return CarriedState(carried, fresh, tuple(name for name in found if name not in carried))
