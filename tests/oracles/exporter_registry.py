"""The registry of PyTorch's exporter, made once: the exporter looks through all of its operators for each export anew."""

from __future__ import annotations

import sys
from functools import cache

REGISTRATION = "torch.onnx._internal.exporter._registration"


@cache
def keep_registry() -> None:
    """Let every further export in this process begin with a copy of the first one's registry. Needs the exporter imported."""
    registration = sys.modules[REGISTRATION]
    kind = registration.ONNXRegistry
    of_opset = cache(kind.from_torchlib)

    def copied(cls: type, opset_version: int = registration._constants.TORCHLIB_OPSET) -> object:
        first, registry = of_opset(opset_version), cls()
        registry._opset_version = first._opset_version
        # An export adds functions of its own to the lists.
        registry.functions = {target: list(functions) for target, functions in first.functions.items()}
        return registry

    kind.from_torchlib = classmethod(copied)
