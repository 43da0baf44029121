"""Contender: onnxsim's compiled training loop on stock onnxruntime. Started by ``compare.py`` in an environment of its own.

It takes static shapes, a loss in the graph, SGD with momentum or Adam; Adam stands in for AdamW, whose weight decay it lacks.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import onnx
import onnxruntime
import onnxsim

from contenders import Step, serve
from job import endless, read_batches, read_job, use_cores
from onnx_step import LOSS, add_plain_loss, classes_of, one_hot, parameters_of, untied


def main() -> None:
    job = read_job()
    use_cores(job["threads"])
    classes = classes_of(onnx.load(job["onnx"]))
    batches = endless([{"x": x, "labels": one_hot(labels, classes)} for x, labels in read_batches(job)])
    optimizer = job["optimizer"]

    def build() -> tuple[Step, dict[str, Any]]:
        model = untied(onnx.load(job["onnx"]))
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = job["batch"]
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = job["batch"]
        add_plain_loss(model, job["batch"], classes)
        names = {"sgd": "sgd_momentum", "adamw": "adam"}
        loop = onnxsim.compile_training_loop(model, LOSS, parameters_of(model), optimizer=names[optimizer["name"]])
        versions = {"onnxsim": importlib.metadata.version("onnxsim"), "onnxruntime": onnxruntime.__version__}
        return lambda: loop(next(batches), lr=optimizer["lr"]), {"versions": versions}

    serve(build)


if __name__ == "__main__":
    main()
