"""Contender: onnxruntime-training 1.19.2, the last of its packages. Started by ``compare.py`` in an environment of its own.

What it takes to train these models with it:

- its Python front (``onnxruntime.training``) imports PyTorch, so that the graph of gradients is asked for below it;
- the evaluation model that the front makes does not load for batch normalization ("number of op outputs should be 1 when
  Training_mode = False"), so that there is none;
- its SGD has no momentum: the update is in standard operators behind the gradients;
- the gradient of layer normalization reads optional outputs, which an exported model does not name;
- running statistics stay as they are: its gradient graph has no outputs for them.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi._pybind_state import GradientGraphBuilder, get_optimized_model

from contenders import Step, serve
from job import endless, read_batches, read_job
from onnx_step import LOSS, TrainingStep, add_loss, initializers_to_inputs, parameters_of, untied


def name_statistics(model: onnx.ModelProto) -> None:
    """Ask layer normalization for its optional outputs."""
    for node in model.graph.node:
        if node.op_type == "LayerNormalization" and len(node.output) == 1:
            node.output.extend([f"{node.output[0]} mean", f"{node.output[0]} inverse deviation"])


def main() -> None:
    job = read_job()

    def build() -> tuple[Step, dict[str, Any]]:
        batches = endless(read_batches(job))
        model = untied(onnx.load(job["onnx"]))
        add_loss(model)
        name_statistics(model)
        names = parameters_of(model)
        values = initializers_to_inputs(model, names)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        optimized = get_optimized_model(model.SerializeToString(), set(names), options)
        builder = GradientGraphBuilder(optimized, {LOSS}, set(names), LOSS, options)
        builder.build()
        differentiated = onnx.load_from_string(builder.get_model())
        step = TrainingStep(differentiated, {name: f"{name}_grad" for name in names}, values, job["optimizer"], job["threads"])
        return lambda: step(*next(batches)), {"versions": {"onnxruntime-training": onnxruntime.__version__}}

    serve(build)


if __name__ == "__main__":
    main()
