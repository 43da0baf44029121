"""What stock ONNX Runtime computes for a model, without graph optimizations: the reference for rewrites of a graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as runtime_errors

RUNTIME = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
NEWEST_RUNTIME = (1, 29)
"""From here on nothing is left out of a comparison; an older one lacks kernels, or computes some wrong."""
NO_KERNEL = (
    runtime_errors.Fail,
    runtime_errors.InvalidGraph,
    runtime_errors.NotImplemented,
    runtime_errors.RuntimeException,
)


def onnxruntime_outputs(model: onnx.ModelProto | ir.Model | str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a model once, on one thread; returns its outputs by name."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if isinstance(model, ir.Model):
        model = ir.to_proto(model)
    source = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))
