"""A model bound to training or evaluation, as a function of tensors: data and state in, outputs and next statistics out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.errors import ConfigurationError
from burnish.graph import garbage_kept, name_sources
from burnish.graph.uses import is_used
from burnish.modes import batch_normalizations, bind_frozen, bind_training
from burnish.norms import NormPolicy, RunningVariance
from burnish.passes import (
    compute_in_float32,
    fold_constants,
    has_sixteen_bit_values,
    hoist_gather,
    recognize_attention,
    recognize_normalization,
    recognize_training_normalization,
    remove_unused,
)
from burnish.passes.precision import MixedPrecision
from burnish.random import KEY_DTYPE, KEY_SHAPE
from burnish.torch.differentiable import DifferentiableGraph, separate_outputs

KEY, STEP = "rng/key", "step"
WORDS = 1 << 32


@dataclass(frozen=True)
class Binding:
    """What a model is bound to.

    Attributes:
        state: names of the initializers that are inputs of the graph: parameters, buffers, running statistics.
        policies: by the name of its node, the policy of each batch normalization layer; None binds the model to evaluation.
        running_variance: which variance running statistics hold.
        precision: mixed precision, where products are computed in sixteen bits.
        held_rows: by the name of a parameter, the rows whose gradient is zero.
        moving: names of state that is among the inputs of the model already, after its own.
        written: those that a call writes to, with the output of the model that is the next value; these outputs are its last.
    """

    state: Sequence[str]
    policies: Mapping[str, NormPolicy] | None
    running_variance: RunningVariance = RunningVariance.ONNX
    precision: MixedPrecision | None = None
    held_rows: Mapping[str, Sequence[int]] = field(default_factory=dict)
    moving: Collection[str] = ()
    written: Mapping[str, str] = field(default_factory=dict)


class BoundGraph:
    """A model in one mode.

    Args:
        model: a canonical model whose state has no values (``forget_values``); left as it is.
        binding: the mode, and what of the model is state.
        engine: what runs it.
        name: of the graph, in errors.

    Attributes:
        data: the names of the inputs of the model, in their order.
        outputs: the names of its outputs.
        updated: the names of the buffers and running statistics that a call moves on.
        draws: whether it draws at random.
        counts: whether it asks for the number of the step.
    """

    @garbage_kept()
    def __init__(self, model: ir.Model, binding: Binding, engine: TorchEngine, name: str):
        model = recognize_normalization(model.clone())
        self.name = name
        self.data = [value.name or "" for value in model.graph.inputs if value.name not in binding.moving]
        self.outputs = [value.name or "" for value in model.graph.outputs][: len(model.graph.outputs) - len(binding.written)]
        _lift(model.graph, binding.state)
        fold_constants(model)
        name_sources(model.graph)
        self.updated = [*binding.written, *_bind(model, binding, self.data)]
        separate_outputs(model.graph)
        given = [value.name or "" for value in model.graph.inputs]
        self.draws, self.counts = KEY in given, STEP in given
        self.state = [name for name in given if name not in {*self.data, KEY, STEP}]
        self.dtypes = [TORCH_DTYPES.get(value.dtype) for value in model.graph.inputs if value.dtype is not None]
        self._updated = [self.state.index(name) for name in self.updated]
        self._computed = self.dtypes[: len(self.data) + len(self.state)]
        self._graph = DifferentiableGraph(
            model, engine, name, binding.held_rows, self.updated, len(self.updated), frozenset(binding.written)
        )

    def __call__(
        self, data: Sequence[torch.Tensor], state: Sequence[torch.Tensor], step: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Run the graph.

        Args:
            data: the inputs of the model, in their order.
            state: the entries of ``self.state``, in their order. Those that are updated are written to.
            step: the number of the step, where ``counts``.

        Returns:
            The outputs, in their order; autograd goes on from them.
        """
        inputs = [*data, *state]
        try:
            is_right = [tensor.dtype for tensor in inputs] == self._computed
        except AttributeError:
            is_right = False  # no tensors
        if not is_right:
            self._refuse_inputs(inputs)
        if self.draws:
            inputs.append(draw_key(inputs[0].device))
        if self.counts:
            assert step is not None
            inputs.append(step)
        results = self._graph(*inputs)
        if not self._updated:
            return results
        count = len(self.outputs)
        with torch.no_grad():
            torch._foreach_copy_([state[index] for index in self._updated], list(results[count:]))
        return results[:count]

    def _refuse_inputs(self, inputs: Sequence[Any]) -> None:
        for tensor, dtype, name in zip(inputs, self._computed, (*self.data, *self.state), strict=False):
            if not isinstance(tensor, torch.Tensor):
                raise ConfigurationError(
                    f"'{name}' is of the type {type(tensor).__name__}, and the graph '{self.name}' takes a tensor there: give it "
                    f"one of {dtype}, for example by torch.as_tensor"
                )
            if tensor.dtype != dtype:
                raise ConfigurationError(
                    f"'{name}' is {tensor.dtype}, and the graph '{self.name}' computes with {dtype}: give it that dtype, for "
                    f"example by .to({dtype}), or make the module again from one of the other dtype"
                )

    def check_gradients(self) -> None:
        """Raise GradientError where a floating-point input cannot be differentiated by."""
        self._graph.check_gradients()

    def __deepcopy__(self, memo: dict[int, object]) -> BoundGraph:
        return self  # which holds no state


def draw_key(device: torch.device) -> torch.Tensor:
    """A key of random numbers, drawn from PyTorch's generator on the CPU: ``torch.manual_seed`` repeats what is drawn of it."""
    return torch.randint(WORDS, KEY_SHAPE, dtype=torch.int64).to(device=device, dtype=torch.uint32)


def forget_values(graph: ir.Graph, state: Iterable[str]) -> None:
    """Leave the values of some initializers to PyTorch, in place: no pass takes them for constants, and they are held once."""
    for name in state:
        if (value := graph.initializers.get(name)) is not None and value.const_value is not None:
            value.shape, value.dtype = ir.Shape(value.const_value.shape.numpy()), value.const_value.dtype
            value.const_value = None


def _lift(graph: ir.Graph, state: Iterable[str]) -> None:
    """Make initializers inputs of the graph, in place; those that nothing reads are dropped."""
    for name in state:
        value = graph.initializers.pop(name, None)
        if value is not None and is_used(value):
            graph.inputs.append(value)


def _bind(model: ir.Model, binding: Binding, data: Sequence[str]) -> list[str]:
    """Bind a model to its mode, in place; return the names of the statistics that it updates, which are outputs after its own."""
    graph = model.graph
    weights = [value for value in graph.inputs if value.name not in set(data)]
    if has_sixteen_bit_values(model):
        compute_in_float32(model, keep_outputs=True)
    recognize_training_normalization(model)
    hoist_gather(model)
    if binding.precision is not None:
        binding.precision.narrow(model, weights)
    key = ir.Value(name=KEY, type=ir.TensorType(KEY_DTYPE), shape=ir.Shape(KEY_SHAPE))
    step = ir.Value(name=STEP, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.inputs.extend((key, step))
    updated: dict[ir.Value, ir.Value] = {}
    if binding.policies is None:
        bind_frozen(graph, key, lambda: step, data)
    else:
        policies = {node: binding.policies[node.name or ""] for node in batch_normalizations(graph)}
        updated = bind_training(graph, policies, binding.running_variance, key, lambda: step, data)
    recognize_attention(model)
    moving = {statistic.name or "": value for statistic, value in updated.items() if statistic.is_graph_input()}
    graph.outputs.extend(moving.values())
    remove_unused(model)
    for value in (key, step):
        if not is_used(value):
            graph.inputs.remove(value)
    return list(moving)
