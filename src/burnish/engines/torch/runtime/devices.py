"""The devices that PyTorch has here, by name."""

from __future__ import annotations

import torch

from burnish.errors import EngineError


def device_of(name: object, refusal: str = "The torch engine cannot use the device") -> torch.device:
    """Return the device of a name, on which PyTorch was seen to compute.

    Args:
        name: such as ``cpu``, ``cuda`` or ``cuda:1``.
        refusal: how the message of an error begins, in front of the name.

    Raises:
        EngineError: PyTorch knows no such device, has none here, or cannot compute on it; or ``name`` is no string.
    """
    if not isinstance(name, str | torch.device):
        raise EngineError(f"{refusal} {name!r}: it is no name. Give one, such as 'cpu', 'cuda' or 'cuda:1', or leave device out")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).add(1).item()
    except Exception as error:  # PyTorch raises what comes to hand, down to a module that is not there
        raise EngineError(f"{refusal} '{name}': {_reason(error)}. Leave device out for the CPU") from error
    if device.type == "cpu" and device.index:
        raise EngineError(f"{refusal} '{name}': the CPU is one device. Leave device out for it")
    return torch.device("cpu") if device.type == "cpu" else device


def _reason(error: Exception) -> str:
    """The first sentence of what PyTorch says, if it says something that helps."""
    text = str(error)
    if not text or isinstance(error, ImportError | NotImplementedError) or "INTERNAL ASSERT" in text:
        return f"PyTorch {torch.__version__} as it is installed here does not have it"
    return text.splitlines()[0].split(". ")[0].rstrip(".")
