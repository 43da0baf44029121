"""A model bound to training or evaluation, as a function from data and state to outputs and updated statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.errors import ConfigurationError, InputError
from burnish.graph import garbage_kept, name_sources
from burnish.graph.uses import is_used, remove_unused
from burnish.importer.pytorch.exported import ExportedModule, Extents
from burnish.modes import batch_normalizations, bind_frozen, bind_training, numbered_draws
from burnish.norms import ExtentRule, NormPolicy, RunningVariance, extent_rules
from burnish.norms import get as policy_of
from burnish.random import KEY_DTYPE, KEY_SHAPE
from burnish.rewriting.change_dtypes import compute_in_float32
from burnish.rewriting.fold_constants import fold_constants
from burnish.rewriting.precision import MixedPrecision
from burnish.rewriting.stages import HOISTED, RECOGNIZED, RECOGNIZED_IN_MODE, RECOGNIZED_TO_TRAIN
from burnish.torch.autocast import precision_of
from burnish.torch.differentiable import DifferentiableGraph, separate_outputs

KEY, STEP = "rng/key", "step"
WORDS = 1 << 32


@dataclass(frozen=True)
class Binding:
    """The mode and the state that a model is bound to.

    Attributes:
        state: names of the initializers that become inputs of the graph: parameters, buffers, running statistics.
        policies: policy of each batch normalization layer, by node name; None binds the model to evaluation.
        running_variance: kind of variance that running statistics hold.
        precision: mixed precision, if products are computed in sixteen bits.
        held_rows: by parameter name, the rows with gradient zero.
        moving: names of state that is already among the inputs of the model, after its own inputs.
        written: state that a call writes to, mapped to the model's output with the next value; these outputs are the last.
        extents: what the model assumes about open extents of its inputs.
    """

    state: Sequence[str]
    policies: Mapping[str, NormPolicy] | None
    running_variance: RunningVariance = RunningVariance.ONNX
    precision: MixedPrecision | None = None
    held_rows: Mapping[str, Sequence[int]] = field(default_factory=dict)
    moving: Collection[str] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    extents: Extents = field(default_factory=Extents)


class Misfit(NamedTuple):
    """An extent of an input that a graph does not accept.

    If ``axis`` is None, the rank differs. If ``taken`` is None, the axis is open but ``forward`` branches on its extent.
    """

    name: str
    axis: int | None
    given: int
    taken: int | None

    def __str__(self) -> str:
        if self.taken is None:
            return f"the input '{self.name}' has extent {self.given} along axis {self.axis}, for which forward goes another way"
        if self.axis is None:
            return f"the input '{self.name}' has {self.given} axes, and the graph takes {self.taken}"
        return f"the input '{self.name}' has extent {self.given} along axis {self.axis}, and the graph takes {self.taken}"


class BoundGraph:
    """A model in one mode.

    Args:
        model: a canonical model whose state has no values (``forget_values``); it is not changed.
        binding: the mode and the state.
        engine: the engine that runs it.
        name: name of the graph in errors.

    Attributes:
        data: names of the model's inputs, in order.
        outputs: names of the model's outputs.
        updated: names of the buffers and running statistics that a call updates.
        draws: True if the graph draws random numbers.
        counts: True if the graph needs the number of the step.
    """

    @garbage_kept()
    def __init__(self, model: ir.Model, binding: Binding, engine: TorchEngine, name: str):
        model = model.clone()
        RECOGNIZED.run(model, None)
        self.name = name
        self.data = [value.name or "" for value in model.graph.inputs if value.name not in binding.moving]
        self.outputs = [value.name or "" for value in model.graph.outputs][: len(model.graph.outputs) - len(binding.written)]
        _lift(model.graph, binding.state)
        fold_constants(model)
        name_sources(model.graph)
        self._asked = [] if binding.policies is None else _asked_of(model.graph, binding.policies, self.data)
        self.updated = [*binding.written, *_bind(model, binding, self.data)]
        separate_outputs(model.graph)
        given = [value.name or "" for value in model.graph.inputs]
        self.draws, self.counts = KEY in given, STEP in given
        self.state = [name for name in given if name not in {*self.data, KEY, STEP}]
        self._extents = [_extents_of(value) for value in model.graph.inputs[: len(self.data)]]
        self._fitting: list[torch.Size] | None = None
        self._assumed = binding.extents
        self._settled: set[frozenset[Misfit]] = set()
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
            data: the inputs of the model, in order.
            state: the entries of ``self.state``, in order. Updated entries are written to in place.
            step: number of the step, if ``counts``.

        Returns:
            The outputs, in order; autograd continues from them.
        """
        inputs = [*data, *state]
        try:
            is_right = [tensor.dtype for tensor in inputs] == self._computed
        except AttributeError:
            is_right = False  # not tensors
        if not is_right:
            state = [pairs(tensor) if tensor.is_complex() else tensor for tensor in state]
            inputs = [*data, *state]
            self._refuse_inputs(inputs)
        self.refuse_extents(data)
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

    def refuse_extents(self, data: Sequence[torch.Tensor]) -> None:
        """Raise InputError if a batch has an extent that batch normalization does not allow."""
        for index, axis, rule in self._asked:
            if not rule.allows(extent := data[index].shape[axis]):
                raise InputError(
                    f"'{self.data[index]}' has {extent} along axis {axis}, and {rule.reason}: give batches of another size, or "
                    "put the layer into evaluation mode"
                )

    def fits(self, data: Sequence[torch.Tensor]) -> bool:
        """True if the graph accepts the extents of the inputs.

        Raises:
            InputError: an input is sparse or nested.
        """
        for name, tensor in zip(self.data, data, strict=True):
            if tensor.layout is not torch.strided or tensor.is_nested:
                raise InputError(
                    f"the input '{name}' is {'nested' if tensor.is_nested else f'sparse ({tensor.layout})'}, and the graph "
                    f"'{self.name}' takes dense tensors: give it "
                    + ("torch.nested.to_padded_tensor of it and a mask" if tensor.is_nested else "its to_dense()")
                )
        shapes = [tensor.shape for tensor in data]
        if shapes != self._fitting:
            if self.misfits(data) or ((doubts := self.doubts(data)) and doubts not in self._settled):
                return False
            self._fitting = shapes
        return True

    def misfits(self, data: Sequence[torch.Tensor]) -> list[Misfit]:
        found = []
        for name, tensor, extents in zip(self.data, data, self._extents, strict=True):
            if extents is not None and tensor.dim() != len(extents):
                found.append(Misfit(name, None, tensor.dim(), len(extents)))
            elif extents is not None:
                pairs = enumerate(zip(tensor.shape, extents, strict=True))
                found.extend(Misfit(name, axis, given, taken) for axis, (given, taken) in pairs if taken not in (None, given))
        return found or self._places(self._assumed.unequal(self._shapes(data)), data)

    def doubts(self, data: Sequence[torch.Tensor]) -> frozenset[Misfit]:
        """Return the extents of inputs for which ``forward`` may take another branch."""
        return frozenset(self._places(self._assumed.doubtful(self._shapes(data)), data))

    def settle(self, doubts: frozenset[Misfit]) -> None:
        """Accept these extents from now on."""
        self._settled.add(doubts)

    def _shapes(self, data: Sequence[torch.Tensor]) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in zip(self.data, data, strict=True)}

    def _places(self, axes: Iterable[tuple[str, int]], data: Sequence[torch.Tensor]) -> list[Misfit]:
        shapes = self._shapes(data)
        return [Misfit(name, axis, shapes[name][axis], None) for name, axis in axes]

    def is_open(self, places: Iterable[tuple[str, int | None]]) -> bool:
        extents = dict(zip(self.data, self._extents, strict=True))
        return all(axis is not None and (known := extents.get(name)) is not None and known[axis] is None for name, axis in places)

    def _refuse_inputs(self, inputs: Sequence[Any]) -> None:
        for tensor, dtype, name in zip(inputs, self._computed, (*self.data, *self.state), strict=False):
            if not isinstance(tensor, torch.Tensor):
                raise ConfigurationError(
                    f"'{name}' is of the type {type(tensor).__name__}, and the graph '{self.name}' takes a tensor there: give it "
                    f"one of {dtype}, for example by torch.as_tensor"
                )
            if tensor.is_complex():
                raise ConfigurationError(
                    f"'{name}' is complex ({tensor.dtype}), and the graph '{self.name}' computes with real numbers "
                    f"({dtype}): make the "
                    "module again from a complex example, or give it the real and the imaginary part (torch.view_as_real)"
                )
            if tensor.dtype != dtype:
                raise ConfigurationError(
                    f"'{name}' is {tensor.dtype}, and the graph '{self.name}' computes with {dtype}: give it that dtype, for "
                    f"example by .to({dtype}), or make the module again from one of the other dtype"
                )

    def check_gradients(self) -> None:
        """Raise GradientError if the graph cannot be differentiated with respect to a floating-point input."""
        self._graph.check_gradients()

    def __deepcopy__(self, memo: dict[int, object]) -> BoundGraph:
        return self  # it holds no state


def _extents_of(value: ir.Value) -> list[int | None] | None:
    """Return the extents of an input, None for an open one; None if the rank is unknown."""
    if value.shape is None:
        return None
    return [extent if isinstance(extent, int) else None for extent in value.shape]


def bind_export(
    exported: ExportedModule, engine: TorchEngine, training: bool, name: str, precision: str | None = None
) -> BoundGraph:
    """Return the graph of one mode of an exported module, without its values; it draws and writes as the module does."""
    binding = Binding(
        (*exported.parameters, *exported.buffers),
        {layer: policy_of(policy) for layer, policy in exported.norm_policies.items()} if training else None,
        RunningVariance(exported.running_variance),
        precision_of(precision),
        exported.held_rows,
        exported.moving,
        exported.written if training else exported.written_in_evaluation,
        exported.extents if training else exported.extents_in_evaluation,
    )
    model = exported.model if training or exported.inference is None else exported.inference
    return BoundGraph(model, binding, engine, name)


def draw_key(device: torch.device) -> torch.Tensor:
    """Draw a random key from PyTorch's CPU generator, so that ``torch.manual_seed`` makes the graph's draws repeatable."""
    return torch.randint(WORDS, KEY_SHAPE, dtype=torch.int64).to(device=device, dtype=torch.uint32)


def pairs(value: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as real and imaginary parts; unlike ``view_as_real``, its gradient may have any strides."""
    return torch.stack((value.real, value.imag), -1)


def forget_values(graph: ir.Graph, state: Iterable[str]) -> None:
    """Remove the values of state from a graph, in place: PyTorch holds them, and no pass can treat them as constants."""
    for name in state:
        if (value := graph.initializers.get(name)) is not None and value.const_value is not None:
            value.shape, value.dtype = ir.Shape(value.const_value.shape.numpy()), value.const_value.dtype
            value.const_value = None


def _lift(graph: ir.Graph, state: Iterable[str]) -> None:
    """Turn initializers into inputs of the graph, in place; unused ones are dropped."""
    for name in state:
        value = graph.initializers.pop(name, None)
        if value is not None and is_used(value):
            graph.inputs.append(value)


def _asked_of(graph: ir.Graph, policies: Mapping[str, NormPolicy], data: Sequence[str]) -> list[tuple[int, int, ExtentRule]]:
    """Return batch normalization's requirements on open axes: position of the input, axis, and rule."""
    shapes = {value.name: value.shape for value in graph.inputs}
    places: dict[str | None, tuple[int, int]] = {}
    for index, shape in enumerate(map(shapes.get, data)):
        for axis, dimension in enumerate(() if shape is None else shape.dims):
            if not isinstance(dimension, int):
                places.setdefault(dimension.value, (index, axis))
    rules = extent_rules({node: policies[node.name or ""] for node in batch_normalizations(graph)})
    return [(*places[rule.dimension], rule) for rule in rules if rule.dimension in places]


def _bind(model: ir.Model, binding: Binding, data: Sequence[str]) -> list[str]:
    """Bind a model to its mode, in place; return the names of the updated statistics, the last outputs."""
    graph = model.graph
    weights = [value for value in graph.inputs if value.name not in set(data)]
    compute_in_float32(model, keep_outputs=True)
    RECOGNIZED_TO_TRAIN.run(model, None)
    HOISTED.run(model, None)
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
        updated = bind_training(graph, policies, binding.running_variance, key, lambda: step, numbered_draws(graph, data))
    RECOGNIZED_IN_MODE.run(model, None)
    moving = {statistic.name or "": value for statistic, value in updated.items() if statistic.is_graph_input()}
    graph.outputs.extend(moving.values())
    remove_unused(model)
    for value in (key, step):
        if not is_used(value):
            graph.inputs.remove(value)
    return list(moving)
