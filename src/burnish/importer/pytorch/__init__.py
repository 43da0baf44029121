"""PyTorch modules as models: an ``onnx_ir.Model`` of the module, and properties that ONNX cannot express.

This package imports PyTorch, so it is imported only for modules. ``burnish.compiler`` compiles them, and ``burnish.torch`` writes
the weights back.
"""

from burnish.errors import ConfigurationError
from burnish.installing import install_command

try:
    import onnxscript  # noqa: F401
except ImportError as error:
    raise ConfigurationError(
        f"Modules of PyTorch become ONNX models by onnxscript, which is not installed: {install_command('onnxscript')}"
    ) from error

from burnish.importer.pytorch.capture import (
    before_forward,
    mode_set,
    open_along,
    open_batch,
    refuse_lazy,
    shapes_by_name,
    with_several_samples,
)
from burnish.importer.pytorch.export import export_module, traced_values
from burnish.importer.pytorch.exported import ExportedModule, Extents, Structure
from burnish.importer.pytorch.python_state import PythonState

__all__ = [
    "ExportedModule",
    "Extents",
    "PythonState",
    "Structure",
    "before_forward",
    "export_module",
    "mode_set",
    "open_along",
    "open_batch",
    "refuse_lazy",
    "shapes_by_name",
    "traced_values",
    "with_several_samples",
]
