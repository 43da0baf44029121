"""The default engine: stock ONNX Runtime on the CPU.

This package sets ONNX Runtime's options, passes it data and explains its failures; the computation is in the program's graphs.
"""

import onnxruntime  # noqa: F401  # where it is missing, this package is what cannot be imported

from burnish.engines.onnxruntime.engine import OnnxRuntimeEngine
from burnish.engines.onnxruntime.optimizations import OptimizationWarning
from burnish.engines.onnxruntime.runner import OnnxRuntimeRunner

__all__ = ["OnnxRuntimeEngine", "OnnxRuntimeRunner", "OptimizationWarning"]
