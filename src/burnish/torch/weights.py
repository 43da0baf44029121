"""The state of a session, back in the module that its program was compiled from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from burnish.errors import ConfigurationError
from burnish.settings import nearest
from burnish.training import Session

PARAMETER, STATISTIC, STEP = "param/", "stat/", "step"


def load_into(module: torch.nn.Module, session: Session) -> None:
    """Write what a session trained into a module: its parameters, running statistics and counts of batches, in place.

    Optimizers and whatever else holds the module's tensors go on holding them. What the program does not have, such as a
    parameter that ``forward`` does not read, stays as it is.

    Args:
        module: the one that was compiled, or another with tensors of the same names and shapes; its dtypes and devices stay.
        session: after any number of steps.

    Raises:
        ConfigurationError: the module lacks one of the tensors, or has it in another shape; nothing is written then.
    """
    state = session.state()
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    written = {
        name: array
        for state_name, array in state.items()
        for kind in (PARAMETER, STATISTIC)
        if (name := state_name.removeprefix(kind)) != state_name
    }
    for name, array in written.items():
        _check(name, array, tensors)
    steps = int(state[STEP])
    with torch.no_grad():
        for name, array in written.items():
            tensors[name].copy_(_tensor(array))
        for name, (start, per_step) in session.program.options.get("counted_batches", {}).items():
            if name in tensors:
                tensors[name].fill_(start + steps * per_step)


def _check(name: str, array: np.ndarray, tensors: Mapping[str, torch.Tensor]) -> None:
    if name not in tensors:
        raise ConfigurationError(
            f"the module has no parameter or buffer '{name}', which the program trains; did you mean {nearest(name, tensors)}? "
            "Give the module that was compiled"
        )
    if tuple(tensors[name].shape) != array.shape:
        raise ConfigurationError(
            f"'{name}' has shape {list(tensors[name].shape)} in the module and {list(array.shape)} in the program: give the "
            "module that was compiled"
        )


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
