"""Contender: onnxsim's compiled training loop on stock onnxruntime. Started by ``compare.py`` in an environment of its own.

It takes static shapes (hence its own simplification before, without fusions), a loss in the graph, SGD with momentum or Adam,
which stands in for AdamW. It has no rule for Flatten, which is rewritten.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxsim
from onnx import helper, numpy_helper

from contenders import Step, serve
from job import endless, read_batches, read_job, use_cores
from onnx_step import LOSS, add_plain_loss, classes_of, fix_batch, one_hot, parameters_of, untied


def flattens_to_reshapes(model: onnx.ModelProto) -> None:
    """Write Flatten, which it has no rule for, as the Reshape it is: to [batch, the rest]."""
    for node in model.graph.node:
        if node.op_type == "Flatten":
            shape = f"{node.output[0]} shape"
            model.graph.initializer.append(numpy_helper.from_array(np.array([0, -1], np.int64), shape))
            node.CopyFrom(helper.make_node("Reshape", [node.input[0], shape], list(node.output)))


def main() -> None:
    job = read_job()
    use_cores(job["threads"])
    classes = classes_of(onnx.load(job["onnx"]))
    batches = endless([{"x": x, "labels": one_hot(labels, classes)} for x, labels in read_batches(job)])
    optimizer = job["optimizer"]

    def build() -> tuple[Step, dict[str, Any]]:
        model, _ = onnxsim.simplify(fix_batch(untied(onnx.load(job["onnx"])), job["batch"]), perform_optimization=False)
        flattens_to_reshapes(model)
        add_plain_loss(model, job["batch"], classes)
        names = {"sgd": "sgd_momentum", "adamw": "adam"}
        loop = onnxsim.compile_training_loop(model, LOSS, parameters_of(model), optimizer=names[optimizer["name"]])
        versions = {"onnxsim": importlib.metadata.version("onnxsim"), "onnxruntime": onnxruntime.__version__}
        return lambda: loop(next(batches), lr=optimizer["lr"]), {"versions": versions}

    serve(build)


if __name__ == "__main__":
    main()
