"""ONNX Runtime without kernels of burnish's own: what computes to the bit as clients in other languages do."""

from __future__ import annotations

from burnish.engines.onnxruntime import OnnxRuntimeEngine

STANDARD = OnnxRuntimeEngine(kernels=False)
