"""PyTorch modules as models: what a module computes becomes one ``onnx_ir.Model``, and what ONNX cannot say of it lies beside.

This room imports PyTorch; nothing outside imports it before a module is there. What is compiled from a module is in
``burnish.compiler``, and how its weights come back in ``burnish.torch``.
"""

from burnish.importer.pytorch.capture import shapes_by_name
from burnish.importer.pytorch.export import export_module
from burnish.importer.pytorch.exported import ExportedModule, Structure

__all__ = ["ExportedModule", "Structure", "export_module", "shapes_by_name"]
