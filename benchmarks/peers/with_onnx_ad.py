"""Contender: onnx-ad's reverse mode on stock onnxruntime. Started by ``compare.py`` in an environment of its own.

Convolutions need static shapes. It differentiates with respect to inputs, so that parameters become inputs, and it has no
optimizers: the update is in standard operators behind the gradients.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import onnx
import onnx_ad
import onnxruntime
from onnx import helper, numpy_helper

from contenders import Step, serve
from job import endless, read_batches, read_job
from onnx_step import (
    LOSS,
    TrainingStep,
    add_plain_loss,
    classes_of,
    fix_batch,
    initializers_to_inputs,
    one_hot,
    parameters_of,
    untied,
)


def main() -> None:
    job = read_job()
    classes = classes_of(onnx.load(job["onnx"]))
    batches = endless([(x, one_hot(labels, classes)) for x, labels in read_batches(job)])

    def build() -> tuple[Step, dict[str, Any]]:
        model = fix_batch(untied(onnx.load(job["onnx"])), job["batch"])
        add_plain_loss(model, job["batch"], classes)
        names = parameters_of(model)
        values = initializers_to_inputs(model, names)
        model = onnx.shape_inference.infer_shapes(model)
        adjoint = onnx_ad.reverse(model, inputs=names, outputs=[LOSS], prefix="adjoint_", dim="seeds", layout="onnx")
        graph = adjoint.graph
        # One seed, 1: the last axis of every adjoint counts the seeds.
        seed = next(value for value in graph.input if value.name.startswith("adjoint_"))
        graph.input.remove(seed)
        graph.initializer.append(numpy_helper.from_array(np.array([1], np.float32), seed.name))
        graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), "last axis"))
        gradients = {}
        for name in names:
            gradients[name] = f"gradient {name}"
            graph.node.append(helper.make_node("Squeeze", [f"adjoint_{name}", "last axis"], [gradients[name]]))
        step = TrainingStep(adjoint, gradients, values, job["optimizer"], job["threads"])
        versions = {"onnx-ad": importlib.metadata.version("onnx-ad"), "onnxruntime": onnxruntime.__version__}
        return lambda: step(*next(batches)), {"versions": versions}

    serve(build)


if __name__ == "__main__":
    main()
