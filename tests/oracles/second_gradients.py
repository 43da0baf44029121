"""The gradient of a gradient of a sample of the operator tables, against differences of the gradient in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
import onnx_ir as ir

import burnish
from burnish.graph import BURNISH_DOMAIN
from oracles.gradient_harness import carrying_outputs, cast_inputs, differentiated, feeds_of, forward_graph
from oracles.model_differences import Function, function_in_float64, gradient_problem, run
from oracles.operator_cases import Case


@dataclass
class SecondGradients:
    """The first gradients of a case in float64, and what to differentiate them by.

    Attributes:
        as_emitted: the model of the first gradients, as ``burnish.grad`` returns it.
        of: the outputs of it that are differentiated again.
        wrt: the inputs that they are differentiated by.
        feeds: a value for each of its inputs.
    """

    as_emitted: ir.Model
    of: list[str]
    wrt: list[str]
    feeds: dict[str, np.ndarray]

    @classmethod
    def of_case(cls, case: Case, rng: np.random.Generator) -> SecondGradients | None:
        """Differentiate the first output that carries a cotangent by every input that the case names.

        None for an output of unknown rank, which a model cannot have.
        """
        graph, values, outputs = forward_graph(case.spec, case.sample, "float64")
        chosen = outputs[carrying_outputs(case.sample, outputs)[0]]
        if chosen.shape is None:
            return None
        graph.outputs.append(chosen)
        graph.opset_imports.pop(BURNISH_DOMAIN, None)
        forward = ir.Model(graph, ir_version=10)
        names = [
            str(value.name) for index, value in enumerate(values) if value is not None and index in differentiated(case.sample)
        ]
        first = burnish.grad(forward, names, str(chosen.name))
        feeds = feeds_of(case.sample, cast_inputs(case.sample, "float64"), {})
        feeds = {value.name: feeds[value.name] for value in first.graph.inputs if value.name in feeds}
        cotangent = f"cotangent:{chosen.name}"
        wrt = [name for name in names if name in feeds]
        if any(value.name == cotangent for value in first.graph.inputs):
            feeds[cotangent] = rng.standard_normal(np.shape(run(ir.to_proto(forward), feeds)[str(chosen.name)]))
            wrt.append(cotangent)
        return cls(first, [f"grad:{name}" for name in names], wrt, feeds)

    @cached_property
    def first(self) -> onnx.ModelProto:
        return ir.to_proto(self.as_emitted)

    @cached_property
    def function(self) -> Function | None:
        """The first gradients as a function in float64."""
        return function_in_float64(self.first, self.feeds, self.wrt, self.of)

    def problem(self, of: str, rng: np.random.Generator) -> str:
        """What is wrong with the second gradients of one first gradient; nothing where they are right."""
        assert self.function is not None
        second = ir.to_proto(burnish.grad(self.as_emitted, self.wrt, of))
        shape = np.asarray(self.function(self.feeds)[of]).shape
        cotangent = rng.standard_normal(shape) if shape else np.ones(())
        results = run(second, {**self.feeds, f"cotangent:{of}": cotangent})
        names = {value.name for value in second.graph.output}
        for name in self.wrt:
            output = next(candidate for candidate in (f"{of}:{name}", f"{of}:{name}:of:{of}") if candidate in names)
            problem = gradient_problem(self.function, self.feeds, of, cotangent, name, np.asarray(results[output]), rng)
            if problem:
                return f"d {of} / d {name}: {problem}"
        return ""
