"""An accelerator that burnish did not know: a target in a file, operators in numpy, and the engine that joins them."""

from pathlib import Path

import numpy as np
import onnx_ir as ir

from accelerator.operators import OPERATORS
from burnish.engines.array_runner import ArrayRunner
from burnish.engines.base import refuse_workers
from burnish.errors import EngineError
from burnish.targets import read_target


class AcceleratorEngine:
    name = "accelerator"
    target = read_target(Path(__file__).with_name("target.toml"))

    def __init__(self, operators=OPERATORS):
        self.operators = operators

    def open(self, graphs, state, *, device=None, threads=None, communicator=None):
        refuse_workers(self.name, communicator)
        if device not in (None, "accelerator"):
            raise EngineError(f"The accelerator engine has the device 'accelerator' only, not '{device}': leave device out")
        return ArrayRunner(graphs, state, lambda graph: self.load(graphs[graph]))

    def load(self, model):
        """What a compiler of an accelerator would do: here a list of calls, in the graph's order."""
        calls, outputs = [], [(value.name, value.dtype.numpy()) for value in model.graph.outputs]
        for node in model.graph:
            attributes = {name: value_of(attribute.value) for name, attribute in node.attributes.items()}
            operands = [value and value.name for value in node.inputs]
            results = [(value.name, value.dtype.numpy()) for value in node.outputs if value.name]
            calls.append((self.operators[node.op_type], attributes, operands, results))

        def run(inputs):
            values = dict(inputs) | {None: None}
            for function, attributes, operands, results in calls:
                computed = function(attributes, *[values[name] for name in operands])
                computed = computed if isinstance(computed, tuple) else (computed,)
                values |= {name: np.asarray(array, dtype) for (name, dtype), array in zip(results, computed, strict=False)}
            return {name: np.asarray(values[name], dtype) for name, dtype in outputs}

        return run


def value_of(value):
    """The value of an attribute; a tensor as an array."""
    return value.numpy() if isinstance(value, ir.TensorProtocol) else value
