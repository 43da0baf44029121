"""The gradients of a batch, beside training: for histograms of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.engines.base import LoadedModel
from burnish.program import Role
from burnish.training.inputs import BatchCheck
from burnish.training.session import Session


class Gradients:
    """Computes gradients of batches in the present state of a session; the state stays.

    It loads the program's graph ``grad`` when it is first asked, beside the session's own: that takes as much memory as a step.
    """

    def __init__(self, session: Session):
        self._session = session
        self._loaded: LoadedModel | None = None

    def __call__(self, batch: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the gradient of each parameter that trains, by its name; of a table that is read by rows, none.

        Args:
            batch: as ``Session.step`` takes it.
            state: of the session, as ``Session.state`` returns it.

        Raises:
            InputError: the batch does not fit the program.
            EngineError: the engine cannot compute it.
        """
        program, session = self._session.program, self._session
        signature = program.signature["grad"]
        if self._loaded is None:
            self._loaded = session.engine.load(program.grad)
        inputs = dict(BatchCheck(signature)(batch))
        inputs |= {entry.name: state[entry.name] for entry in signature.inputs if entry.is_state}
        for entry in signature.inputs_of(Role.HYPERPARAMETER):
            inputs[entry.name] = np.asarray(entry.default, entry.numpy_dtype)
        outputs = self._loaded(inputs)
        trained = {f"grad:{name.partition('/')[2]}" for name in program.signature["step"].updates if name.startswith("param/")}
        return {name.removeprefix("grad:"): array for name, array in outputs.items() if name in trained}
