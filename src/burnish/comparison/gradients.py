"""Check of a program's gradients against central differences, in float64 on the reference engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from burnish.autodiff import differentiate
from burnish.comparison.differences import DEFAULT_PROBES, DEFAULT_RTOL, Differences, TensorCheck
from burnish.comparison.single_nodes import single_node_model
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.data.random_data import random_batches
from burnish.engines import Arrays, registry
from burnish.errors import BurnishError, ConfigurationError
from burnish.graph import FLOATING, Builder, Tensor, describe_node, place, source_of
from burnish.graph.uses import remove_unused
from burnish.losses.base import LabelSpec, LossBase, Reading, Term, floating_shape, size_of, sum_of
from burnish.operators.collectives import MARKS
from burnish.operators.quantization import STRAIGHT_THROUGH
from burnish.operators.semantic import differentiable_outputs, semantic_operators
from burnish.program import Program, Role
from burnish.rewriting.change_dtypes import compute_in_float64
from burnish.rewriting.simulate_quantization import simulate_quantization
from burnish.targets import TARGETS

STANDARD = TARGETS["onnxruntime"]
LOSS = "loss"
PREFIX = "grad:"
MOVED = 0.01
"""Relative perturbation of weights, since zeros of a fresh model lie at the kinks of functions."""

Function = Callable[[Mapping[str, np.ndarray]], Arrays]


@dataclass
class GradientCheck:
    """The check of a program's gradients.

    Attributes:
        tensors: result for each trained state entry.
        faults: nodes whose own rule disagrees with differences of that node alone, the last in the model first.
    """

    tensors: list[TensorCheck]
    faults: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return all(tensor.agrees for tensor in self.tensors)

    def message(self) -> str:
        """Return the result in one sentence."""
        worst = max((tensor.error for tensor in self.tensors), default=0.0)
        differing = [tensor.name for tensor in self.tensors if not tensor.agrees]
        if not differing:
            zero = sum(tensor.is_zero for tensor in self.tensors)
            vacuous = f"; {zero} of {len(self.tensors)} are zero throughout" if zero else ""
            return f"all gradients agree with central differences: the worst error is {worst:.1e}{vacuous}"
        named = ", ".join(f"'{name}'" for name in differing[:3]) + (
            f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        )
        place = (
            f"at fault is the gradient of {self.faults[0]}" + (f", and of {len(self.faults) - 1} more" if self.faults[1:] else "")
            if self.faults
            else "no node by itself has a wrong gradient: they go wrong together"
        )
        return f"the gradient of {named} differs from central differences: {place}"


def check_gradients(
    program: Program,
    *,
    batch_size: int = 3,
    extents: Mapping[str, int] | None = None,
    probes: int = DEFAULT_PROBES,
    rtol: float = DEFAULT_RTOL,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> GradientCheck:
    """Compare every gradient of a program with central differences in float64, on a random batch.

    Weights are slightly perturbed. Random operators repeat their draws, and quantization does not round, in line with its
    gradient. Each probe evaluates the graph twice.

    Args:
        program: program to check; use the loss ``Projection`` to weight every output with either sign.
        batch_size, extents: sizes of the random batch; see ``random_batches``.
        probes: directions per tensor: one through all elements, the others along single ones.
        rtol: tolerance relative to the gradient's size.
        seed: seed of batch, perturbations and directions.
        progress: called with each tensor's name before its check.

    Raises:
        ConfigurationError: ``probes`` or ``rtol`` is not positive, or sizes are invalid for ``random_batches``.
        EngineError: the reference engine lacks an operator or fails.
    """
    if probes < 1:
        raise ConfigurationError(f"probes={probes}: give one or more for each tensor")
    if not rtol > 0:
        raise ConfigurationError(f"rtol={rtol}: give a number above 0")
    model = _graph_of(program)
    signature = program.signature["grad"]
    named = {f"param/{entry.name.partition(':')[2]}": entry.name for entry in signature.outputs_of(Role.GRADIENT, Role.ROWS)}
    wrt = {entry.name: named[entry.name] for entry in signature.inputs_of(Role.PARAMETER) if entry.name in named}
    point = _point(program, next(random_batches(program, batch_size, seed, extents)), list(wrt), seed)
    indices = {f"param/{entry.name.partition(':')[2]}": entry.name for entry in signature.outputs_of(Role.INDICES)}
    gradients = _function(model, [LOSS, *wrt.values(), *indices.values()])(point)
    for name, places in indices.items():
        whole = np.zeros_like(point[name])
        whole[gradients[places]] = gradients[wrt[name]]
        gradients[wrt[name]] = whole
    forward = _function(model, [LOSS])
    differences = Differences(lambda arrays: float(forward(arrays)[LOSS]), point, rtol, seed)
    check = GradientCheck([])
    for name, gradient in wrt.items():
        progress(name)
        check.tensors.append(differences.judge(name, gradients[gradient].astype(np.float64), probes))
    if not check.agrees:
        check.faults = list(_faults(model, point, list(wrt), probes, rtol, seed))
    return check


def _graph_of(program: Program) -> ir.Model:
    """Return the graph ``grad`` with semantic operators, without rounding in quantization."""
    kernels = semantic_operators() - {mark.name for mark in MARKS}
    model = program.graphs.lowered_to(program.target.with_kernels(kernels)).copy_of("grad")
    simulate_quantization(model.graph, list(model.graph.inputs))
    for node in list(model.graph):
        if STRAIGHT_THROUGH.is_of(node):
            for reader, index in list(node.outputs[0].uses()):
                reader.replace_input_with(index, node.inputs[0])
    return model


def _point(program: Program, batch: Mapping[str, np.ndarray], trained: list[str], seed: int) -> Arrays:
    generator = np.random.default_rng((seed, 1))
    arrays = {**program.initial_state(seed), **batch}
    point = {}
    for entry in program.signature["grad"].inputs:
        array = np.asarray(arrays.get(entry.name, entry.default))
        if entry.dtype in FLOATING:
            array = array.astype(np.float64)
        point[entry.name] = _moved(array, generator) if entry.name in trained else array
    return point


def _moved(array: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Perturb a weight; a constant one is replaced, as in files without weights."""
    if array.ndim > 1 and array.size > 1 and np.ptp(array) == 0:
        return generator.normal(size=array.shape) * float(np.sqrt(2 * len(array) / array.size))
    size = float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0
    return np.asarray(array + MOVED * (size or 1.0) * generator.normal(size=array.shape))


def _function(model: ir.Model, outputs: list[str]) -> Function:
    """Return some values of a graph as a function of its inputs, in float64."""
    copy = model.clone()
    values = {value.name: value for value in (*copy.graph.inputs, *(value for node in copy.graph for value in node.outputs))}
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(values[name] for name in outputs)
    remove_unused(copy)
    run = registry.get("reference").load(compute_in_float64(LoweredGraphs.of_model(copy, STANDARD)["step"]))
    read = [value.name or "" for value in copy.graph.inputs]
    return lambda arrays: run({name: arrays[name] for name in read})


def _faults(model: ir.Model, point: Arrays, wrt: list[str], probes: int, rtol: float, seed: int) -> Iterator[str]:
    """Yield the nodes of the forward pass whose own rule is wrong at their present inputs."""
    nodes = _differentiated(model, wrt)
    read = {value.name or "" for node in nodes for value in (*node.inputs, *node.outputs) if value is not None and value.name}
    inputs = {value.name for value in model.graph.inputs}
    constants = {value.name for node in model.graph if node.op_type == "Constant" for value in node.outputs}
    constants |= set(model.graph.initializers)
    probed = [name for name in dict.fromkeys(read) if name not in inputs and name not in constants]
    values = {**point, **_function(model, probed)(point)}
    for node in reversed(nodes):
        try:
            agrees = _agrees_alone(node, values, probes, rtol, seed)
        except (BurnishError, KeyError):
            continue  # it cannot run alone
        if not agrees:
            source = source_of(node)
            named = describe_node(node)
            yield named if source == named else place(named, source)


def _differentiated(model: ir.Model, wrt: list[str]) -> list[ir.Node]:
    needed = {value for value in model.graph.outputs if value.name == LOSS}
    for node in reversed(list(model.graph)):
        if any(output in needed for output in node.outputs):
            needed.update(value for value in node.inputs if value is not None)
    active = {value for value in model.graph.inputs if value.name in wrt}
    nodes = []
    for node in model.graph:
        if any(value in active for value in node.inputs) and any(output in needed for output in node.outputs):
            active.update(differentiable_outputs(node))
            nodes.append(node)
    return nodes


def _agrees_alone(node: ir.Node, values: Arrays, probes: int, rtol: float, seed: int) -> bool:
    model, point = single_node_model(node, values)
    graph = model.graph
    outputs = [value for value in differentiable_outputs(next(iter(graph))) if value.name in values and values[value.name].size]
    generator = np.random.default_rng((seed, 2))
    cotangents = {value.name or "": generator.normal(size=values[value.name or ""].shape) for value in outputs}
    forward = _function(model, list(cotangents))
    wrt = [value for value in graph.inputs if value.dtype in FLOATING]
    builder = Builder(graph)
    incoming: dict[ir.Value, Tensor] = {}
    for value in outputs:
        cotangent = ir.Value(name=f"cotangent:{value.name}", type=value.type, shape=ir.Shape(values[value.name or ""].shape))
        incoming[value] = builder.tensor(cotangent)
    graph.inputs.extend(tensor.value for tensor in incoming.values())
    emitted = differentiate(builder, incoming, wrt)
    names = {}
    for value in wrt:
        tensor = emitted[value]
        if tensor is not None:
            result = builder.op("Identity", tensor).value
            result.name = f"{PREFIX}{value.name}"
            names[value.name or ""] = result.name
    fed = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in point.items()}
    found = _function(model, list(names.values()))({**fed, **{f"cotangent:{name}": array for name, array in cotangents.items()}})

    def weighed(arrays: Mapping[str, np.ndarray]) -> float:
        results = forward(arrays)
        return float(sum(np.sum(results[name] * array) for name, array in cotangents.items()))

    differences = Differences(weighed, fed, rtol, seed)
    return all(differences.judge(name, found[output], probes).agrees for name, output in names.items())


PHASE = 0.7548776662466927
"""An irrational number, whose products with squares spread evenly over the circle."""


@dataclass(frozen=True, kw_only=True)
class Projection(LossBase):
    """The loss ``sum_i sin(PHASE (i + seed)²) y_i`` over the elements of all its outputs.

    A plain sum would hide errors, since the gradient of a normalization layer is zero for it.

    Attributes:
        outputs: number of outputs it reads, in the order of ``compile``.
        seed: choice of the weights.
    """

    name: ClassVar[str] = "projection"

    outputs: int = 1
    seed: int = 0

    @property
    def readings(self) -> tuple[Reading, ...]:
        return tuple(Reading(position=index) for index in range(self.outputs))

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return no spec.

        Raises:
            ConfigurationError: an output is not floating-point, or its rank is unknown.
        """
        for prediction in predictions:
            floating_shape(self.name, prediction)
        return ()

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        total = None
        for index, prediction in enumerate(predictions):
            builder = prediction.builder
            count = size_of(prediction, ir.DataType.INT64)
            first = builder.scalar(self.seed + 1000 * index, count)
            positions = builder.cast(builder.op("Range", first, first + count, builder.scalar(1, count)), prediction.dtype)
            weights = builder.op("Sin", positions * positions * PHASE)
            weighted = prediction * builder.op("Reshape", weights, builder.op("Shape", prediction))
            summed = sum_of(weighted)
            total = summed if total is None else total + builder.cast(summed, total.dtype)
        assert total is not None, "a loss reads at least one output"
        return (Term(total, total.builder.scalar(1.0, total)),)
