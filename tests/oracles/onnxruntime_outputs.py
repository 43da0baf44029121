"""What stock ONNX Runtime computes for a model, without graph optimizations: the reference for rewrites of a graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime


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
