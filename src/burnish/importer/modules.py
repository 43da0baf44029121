"""PyTorch modules among what is loaded; PyTorch is imported where there is one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.sample_axes import AskedAxes

if TYPE_CHECKING:
    from burnish.importer.pytorch import ExportedModule


def is_module(source: object) -> bool:
    """Whether this is a ``torch.nn.Module``; nothing is imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.nn.Module)


def exported_module(
    source: object, example_inputs: Any, dynamic_shapes: Any, verify: bool = True, sample_axis: AskedAxes = None
) -> ExportedModule | None:
    """Return the export of a module, and None for any other source.

    Args:
        source: what is to be loaded.
        example_inputs, dynamic_shapes, verify: as ``burnish.load`` takes them.
        sample_axis: the axes that are open where ``dynamic_shapes`` does not say it.

    Raises:
        ConfigurationError: a module without examples, or examples without a module.
        UnsupportedOperatorError: the module cannot be exported, or its graph computes something else.
    """
    if not is_module(source):
        if example_inputs is not None or dynamic_shapes is not None:
            raise ConfigurationError(
                "example_inputs and dynamic_shapes are for a torch.nn.Module: leave them out, a model of ONNX has its inputs"
            )
        return None
    if example_inputs is None:
        raise ConfigurationError(
            f"example_inputs: what does {type(source).__name__} take? Give inputs to call it with once, "
            "example_inputs=(torch.zeros(2, 3),), or by name, example_inputs={'x': torch.zeros(2, 3)}"
        )
    from burnish.importer.pytorch import export_module, open_along

    args, kwargs = _arguments(example_inputs)
    if dynamic_shapes is None and sample_axis is not None:
        dynamic_shapes = open_along(source, args, kwargs, sample_axis)  # type: ignore[arg-type]
    exported = export_module(source, args, kwargs, dynamic_shapes)  # type: ignore[arg-type]
    if exported.moving:
        raise UnsupportedOperatorError(
            f"forward changes the buffer '{exported.moving[0]}', and a training step moves no buffers but the running statistics "
            "of batch normalization. Train the module with burnish.torch.wrap, which writes buffers back, or compute the buffer "
            "outside of the module and pass it as an input"
        )
    if verify:
        # It runs the graph, and what runs graphs stands above what imports them.
        verification = importlib.import_module("burnish.torch.verification")
        verification.verify_export(source, exported, args, kwargs, dynamic_shapes)
    return exported


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional arguments and those by name: a tuple or list is the first, a dictionary the second."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
