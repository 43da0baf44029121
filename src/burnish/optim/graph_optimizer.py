"""An update that comes as a graph: an optimizer whose formulas a file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, replace_uses


@dataclass(frozen=True)
class GraphOptimizer:
    """An optimizer whose update is a graph, put as it is into the graphs of a program.

    Attributes:
        graph: of standard operators; its inputs are some of ``param/*``, ``grad:*``, ``opt/*`` and the names of the
            hyperparameters, its outputs ``next:param/*`` and ``next:opt/*`` for every parameter and slot.
        initial: state by slot and initializer -> first value.
        rates: hyperparameter -> default, None for one that has to be tensors with every step.
    """

    name = "training_info"
    graph: ir.Graph
    initial: Mapping[str, np.ndarray]
    rates: Mapping[str, float | None]

    def hyperparameters(self) -> dict[str, float | None]:
        return dict(self.rates)

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: builder.op("Identity", builder.constant(array)) for name, array in self.initial.items()}

    def update(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
        hyperparameters: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        tensors = {f"param/{name}": tensor for name, tensor in params.items()}
        tensors |= {f"grad:{name}": tensor for name, tensor in gradients.items()}
        tensors |= {f"opt/{name}": tensor for name, tensor in state.items()}
        copy = self.graph.clone()
        for value in copy.inputs:
            tensor = tensors.get(value.name or "") or builder.cast(
                hyperparameters[value.name or ""], value.dtype or ir.DataType.FLOAT
            )
            replace_uses(value, tensor.value)
        for value in list(copy.initializers.values()):
            assert value.const_value is not None
            constant = builder.constant(value.const_value.numpy())
            replace_uses(value, constant.value)
        names = [output.name or "" for output in self.graph.outputs]
        results = dict(zip(names, list(copy.outputs), strict=True))
        copy.outputs.clear()
        for node in list(copy):
            copy.remove(node)
            node.name = None
            for output in node.outputs:
                output.name = None
            builder.graph.append(node)
        following = {name: builder.tensor(results[f"next:param/{name}"]) for name in params}
        return following, {name: builder.tensor(results[f"next:opt/{name}"]) for name in state}

    def options(self) -> dict[str, Any]:
        """The name alone: the formulas are in the graphs of the program."""
        return {"name": self.name}
