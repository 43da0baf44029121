"""PyTorch modules as models: what a module computes becomes one ``onnx_ir.Model``, and what ONNX cannot say of it lies beside.

This room imports PyTorch; nothing outside imports it before a module is there. What is compiled from a module is in
``burnish.compiler``, and how its weights come back in ``burnish.torch``.
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
