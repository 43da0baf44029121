"""The error for a loss that is not finite, with the step and any earlier damage to the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from burnish.errors import NonFiniteLossError
from burnish.program.signature import GraphSignature, Role
from burnish.program.state import blocks


def check_finite_loss(
    signature: GraphSignature, outputs: Mapping[str, np.ndarray], state_before: Callable[[], Mapping[str, np.ndarray]]
) -> None:
    """Raise NonFiniteLossError if a loss among ``outputs`` is NaN or infinite.

    Args:
        signature: signature of the step graph.
        outputs: outputs of the step.
        state_before: a function that returns the state from before the step; the message gives its step and any damage.
    """
    for entry in signature.outputs_of(Role.LOSS):
        loss = outputs.get(entry.name)
        if loss is None or math.isfinite(loss.item()):
            continue
        state = state_before()
        step = next((int(state[item.name]) for item in signature.inputs_of(Role.STEP) if item.name in state), None)
        place = "" if step is None else f" at step {step}"
        message = f"The {entry.name}{place} is {loss.item()}. "
        damaged = first_non_finite(state)
        if damaged is None:
            raise NonFiniteLossError(
                message + "The state is kept as it was before this step. Look for NaN or infinite values in the batch, "
                "lower the learning rate (lr), or clip the gradients"
            )
        if step == 0:
            raise NonFiniteLossError(
                message + f"The state that this session began with holds NaN or infinite values in '{damaged}'. Where the model "
                "has them on purpose, as a mask, see that the batch leaves something beside them; else start from another state"
            )
        raise NonFiniteLossError(
            message + f"The state is kept as it was before this step, but '{damaged}' holds NaN or infinite values already, "
            "from an earlier update that overflowed. Restore an earlier checkpoint and lower the learning rate (lr), "
            "or clip the gradients"
        )


def first_non_finite(state: Mapping[str, np.ndarray]) -> str | None:
    """Return the name of the first floating-point entry that holds a NaN or an infinity, or None."""
    for name, array in state.items():
        if array.dtype.kind not in "iub" and not all(np.isfinite(block).all() for block in blocks(array)):
            return name
    return None
