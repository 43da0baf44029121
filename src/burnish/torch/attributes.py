"""Where a tensor of an ONNX file stands in a module: under the path that the dots in its name spell."""

from __future__ import annotations

import torch


def place_for(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Return the submodule and the attribute that a tensor is to be registered as.

    A name with dots is that of a tensor in submodules, which are made, so that ``state_dict`` has the name as it is. Where a name
    cannot be one, the tensor belongs to the module itself, and its dots become underscores.

    Args:
        module: what is to hold the tensor.
        name: of the tensor in its file.
    """
    *path, last = name.split(".")
    owner = module
    for part in path:
        inner = owner._modules.get(part)
        if inner is None and (not part or hasattr(owner, part)):
            return module, _free(module, name)
        if inner is None:
            inner = torch.nn.Module()
            owner.add_module(part, inner)
        owner = inner
    if not last or hasattr(owner, last):
        return module, _free(module, name)
    return owner, last


def _free(module: torch.nn.Module, name: str) -> str:
    """A name that is no attribute of a module yet."""
    name = name.replace(".", "_") or "_"
    while hasattr(module, name):
        name += "_"
    return name
