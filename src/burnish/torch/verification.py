"""Comparison of a module with its graph: results and gradients of both, on the examples and on other inputs.

The exporter's translations, PyTorch's trace and burnish's own rules may each be wrong without an error. Dropout is off on both
sides, because each draws separately; outputs that depend on other random draws are not compared. The module stays unchanged:
buffers, attributes and random generators.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]
import torch
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from burnish.engines.torch.engine import TorchEngine
from burnish.errors import BurnishError, GradientError, InputError, UnsupportedOperatorError
from burnish.importer.load import load
from burnish.importer.pytorch import ExportedModule, PythonState, before_forward, mode_set, traced_values, with_several_samples
from burnish.torch.autocast import all_autocast_off
from burnish.torch.bound import Binding, BoundGraph, bind_export, forget_values

aten = torch.ops.aten

DRAWS = frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial".split())

TOLERANCES = {torch.float64: (1e-5, 1e-7), torch.float32: (1e-3, 1e-5), torch.bfloat16: (0.1, 1e-2), torch.float16: (0.05, 1e-3)}
"""Allowed difference as a share of the greatest value, and the distance to a nearby point that shows singularity."""

SINGULAR = 10.0
"""A difference counts if it exceeds this many times the change caused by moving to a nearby point."""

NO_DROPOUT = "burnish/no_dropout"


def verify_export(
    module: torch.nn.Module,
    exported: ExportedModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    engine: TorchEngine | None = None,
    *,
    called: bool = False,
) -> dict[bool, BoundGraph]:
    """Compare a module with its export, in training and in evaluation.

    Args:
        module: the module.
        exported: its export, from ``export_module``, or with canonical models without values of state.
        args, kwargs, dynamic_shapes: the examples and the open axes of the export.
        engine: the engine that runs the graphs.
        called: as in ``export_module``.

    Returns:
        The graphs of modes without dropout, as from ``bind_export``, to avoid making them again.

    Raises:
        UnsupportedOperatorError: results differ; the message names the result and the first node or part that differs.
    """
    # The batch axis can be open only if the module takes several samples.
    examples = [with_several_samples(args, kwargs)] if dynamic_shapes is None else []
    state = (*exported.parameters, *exported.buffers)
    models = [_without_values(model, state) for model in (exported.model, exported.inference)]
    model, inference = map(_without_dropout, models)
    assert model is not None
    exported = replace(exported, model=model, inference=inference)
    engine = engine or TorchEngine(capture=False)
    with _apart():
        points = [_point(module, exported, *given) for given in (*examples, (args, dict(kwargs)))]
        graphs = _Verification(module, exported, engine, called, dynamic_shapes).run(points)
    return graphs if [model, inference] == models else {}


def _point(module: torch.nn.Module, exported: ExportedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Point:
    leaves, _ = pytree.tree_flatten((args, dict(kwargs)))
    return Point.of(module, leaves, before_forward(module, args, kwargs)[2] if exported.attributes else {})


class Point(NamedTuple):
    """The values for a comparison: a module's arguments as leaves, and its parameters and buffers."""

    leaves: list[Any]
    state: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls, module: torch.nn.Module, leaves: Sequence[Any], attributes: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> Point:
        return cls(list(leaves), {**dict(module.named_parameters()), **dict(module.named_buffers()), **attributes})

    def moved(self, seed: int) -> Point:
        generator = torch.Generator().manual_seed(seed)

        def beside(value: Any, is_state: bool = False) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or (is_state and not value.requires_grad):
                return value
            plain = value.detach()
            if not plain.numel():
                return value
            step = TOLERANCES.get(plain.dtype, TOLERANCES[torch.float32])[1] * max(
                float(plain.abs().nan_to_num(posinf=0).amax()), 1e-3
            )
            noise = torch.randn(plain.shape, generator=generator, dtype=torch.float32).to(plain.device, plain.dtype)
            return plain.add(noise, alpha=step).requires_grad_(value.requires_grad)

        return Point(list(map(beside, self.leaves)), {name: beside(value, True) for name, value in self.state.items()})


@dataclass
class Results:
    """The results of a call.

    Attributes:
        forward: returned values, and values left in inputs and buffers, by their name in messages.
        gradients: gradients of inputs and parameters; None if they could not be computed.
        structure: structure of the returned value.
    """

    forward: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None] | None
    structure: Any = None


class _Verification:
    def __init__(self, module: torch.nn.Module, exported: ExportedModule, engine: TorchEngine, called: bool, shapes: Any):
        self.module = module
        self.exported = exported
        self.engine = engine
        self.called = called
        self.shapes = shapes
        self.refused: Exception | None = None
        self.is_uncomputed = False
        self.usual_alone = True

    def run(self, examples: Sequence[Point], others: bool = True) -> dict[bool, BoundGraph]:
        graphs: dict[bool, BoundGraph] = {}
        for training in (True, False):
            if training in self.exported.failed:
                continue
            graph = graphs.get(True) if self._is_one_graph else None
            if graph is None:
                try:
                    graph = bind_export(self.exported, self.engine, training, type(self.module).__name__)
                except BurnishError:
                    break  # a later call reports it
                graphs[training] = graph
            usual = [point for point in examples if not self._goes_another_way(point, training)]
            self._compare(graph, training, usual or examples)
            if others:
                points = [*_others(self.exported, examples[-1])]
                self._compare(graph, training, [point for point in points if not self._goes_another_way(point, training)])
        return graphs

    @property
    def _is_one_graph(self) -> bool:
        """True if evaluation uses the same graph as training once dropout is off."""
        return self.exported.inference is None and set(self.exported.norm_policies.values()) <= {"frozen"}

    def _goes_another_way(self, point: Point, training: bool) -> bool:
        """True if ``forward`` may branch on the extents of a point; a call then has a separate graph for them."""
        extents = self.exported.extents if training else self.exported.extents_in_evaluation
        named = zip(self.exported.inputs.names, point.leaves, strict=True)
        return self.called and bool(extents.doubtful({name: leaf.shape for name, leaf in named if name is not None}))

    def _compare(self, graph: BoundGraph, training: bool, points: Iterable[Point]) -> None:
        """Compare at the first point that both the module and the graph accept."""
        for point in points:
            wanted = self.called_at(point, training)
            if wanted is None:
                continue
            found = self._computed(graph, point, training, wanted)
            if found is None:
                self.is_uncomputed = True
                continue
            drawn = _drawn(self._model(training).graph)
            differing = _differences(found, wanted, drawn)
            if differing:
                moved = [self.called_at(point.moved(seed), training) for seed in (1, 2)]
                for label, difference in differing.items():
                    if not any(other is not None and difference <= SINGULAR * _moved_by(wanted, other, label) for other in moved):
                        self._refuse(point, training, label, difference)
            return

    def _model(self, training: bool) -> ir.Model:
        return self.exported.model if training or self.exported.inference is None else self.exported.inference

    def called_at(self, point: Point, training: bool) -> Results | None:
        """Return the module's results; None if PyTorch cannot call it."""
        bases, leaves = _leaves_of(point)
        args, kwargs = pytree.tree_unflatten(leaves, self.exported.inputs.spec)
        leaf_state = _state_of(point)
        attributes = {name: leaf_state[name] for name in self.exported.attributes}
        state = {name: tensor for name, tensor in leaf_state.items() if name not in attributes}
        devices = sorted({tensor.device.index or 0 for tensor in state.values() if tensor.is_cuda})
        outputs = self.exported.outputs if training else self.exported.outputs_in_evaluation
        with (
            PythonState(self.module),
            mode_set(self.module, training),
            torch.random.fork_rng(devices),
            warnings.catch_warnings(),
            _NothingDropped(),  # type: ignore[no-untyped-call]
        ):
            warnings.simplefilter("ignore")
            self.module.__dict__.update(attributes)
            with _reparametrize_module(self.module, state, tie_weights=True):
                try:
                    result = self.module.forward(*args, **kwargs) if self.called else self.module(*args, **kwargs)
                except Exception as error:
                    self.refused = error
                    return None
            returned, structure = pytree.tree_flatten(result)
            if structure != outputs.spec:
                return Results({}, None, structure)
            named = {name: _tensor_of(value) for name, value in zip(outputs.names, returned, strict=True) if name is not None}
            gradients = self._gradients(list(named.values()), bases, leaf_state)
        after = {f"what it leaves in the input '{name}'": leaves[index] for name, index in self._written(training)}
        buffers = {f"the buffer '{name}'": tensor for name, tensor in state.items() if name not in self.exported.parameters}
        return Results(
            {**{f"the output '{name}'": tensor for name, tensor in named.items()}, **after, **buffers},
            gradients,
            structure,
        )

    def _computed(self, graph: BoundGraph, point: Point, training: bool, wanted: Results) -> Results | None:
        """Return the graph's results; None if it cannot run, which a later call reports."""
        structure = self.exported.inputs
        outputs = self.exported.outputs if training else self.exported.outputs_in_evaluation
        if wanted.structure != outputs.spec:
            return Results({}, None, outputs.spec)
        bases, leaves = _leaves_of(point)
        given = {
            name: torch.view_as_real(leaf) if leaf.is_complex() else leaf
            for name, leaf in zip(structure.names, leaves, strict=True)
            if name is not None
        }
        state = _state_of(point)
        counts = [state[name] for name in self.exported.counted_batches]
        step = counts[0].clone() if graph.counts else None
        data = [given[name] for name in graph.data]
        if not graph.fits(data) and (self.usual_alone or graph.misfits(data)):
            return None
        for gradients in (True, False):
            try:
                with torch.set_grad_enabled(gradients), torch.random.fork_rng([]):
                    results = dict(zip(graph.outputs, graph(data, [state[name] for name in graph.state], step), strict=True))
                break
            except GradientError:
                continue
            except BurnishError:
                return None
        else:
            return None
        named = {
            name: torch.view_as_complex(results[name].contiguous()) if outputs.kinds.get(name) == "complex" else results[name]
            for name in outputs.names
            if name is not None
        }
        written = self.exported.written_inputs if training else self.exported.written_inputs_in_evaluation
        after = {f"what it leaves in the input '{name}'": results[output] for name, output in written.items()}
        buffers = {f"the buffer '{name}'": state[name] for name in graph.updated}
        found = {**{f"the output '{name}'": tensor for name, tensor in named.items()}, **after, **buffers}
        computed = self._gradients(list(named.values()), bases, state) if gradients else None
        return Results(found, computed, outputs.spec)

    def _written(self, training: bool) -> list[tuple[str, int]]:
        written = self.exported.written_inputs if training else self.exported.written_inputs_in_evaluation
        return [(name, self.exported.inputs.names.index(name)) for name in written]

    def _gradients(
        self, outputs: Sequence[torch.Tensor], bases: Sequence[Any], state: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor | None] | None:
        carrying = [(index, output) for index, output in enumerate(outputs) if output.requires_grad]
        names = [f"the gradient of the input '{name}'" for name in self.exported.inputs.names]
        wrt = {
            name: base for name, base in zip(names, bases, strict=True) if isinstance(base, torch.Tensor) and base.requires_grad
        }
        wrt |= {f"the gradient of '{name}'": tensor for name, tensor in state.items() if tensor.requires_grad}
        if not carrying or not wrt:
            return {}
        cotangents = [_cotangent(output, index) for index, output in carrying]
        try:
            gradients = torch.autograd.grad([output for _, output in carrying], list(wrt.values()), cotangents, allow_unused=True)
        except Exception:
            return None
        return dict(zip(wrt, (None if gradient is None else gradient.detach() for gradient in gradients), strict=True))

    def _refuse(self, point: Point, training: bool, label: str, difference: float) -> None:
        name = type(self.module).__name__
        how_much = (
            f"differs by {difference:.2g} of its greatest value" if math.isfinite(difference) else "has another shape or dtype"
        )
        where = "" if label.startswith("the gradient") else self._where(point, training)
        raise UnsupportedOperatorError(
            f"the graph of {name} computes something else than {name} does in {'training' if training else 'evaluation'}: "
            f"{label} {how_much}{where}. Give a part of the module that it is right for, or let PyTorch compute what is wrong: "
            "burnish.torch.wrap(module, example_inputs, partial=True). verify=False skips the comparison"
        )

    def _where(self, point: Point, training: bool) -> str:
        try:
            _, leaves = _leaves_of(point)
            args, kwargs = pytree.tree_unflatten([_detached(leaf) for leaf in leaves], self.exported.inputs.spec)
            traced = traced_values(self.module, args, kwargs, self.shapes, training, self.called)
            model = _without_dropout(load(traced.model))
            assert model is not None
            return _first_difference(model, traced.values, traced.places, traced.inputs, self.engine)
        except Exception:
            return ""


def check_extents(
    module: torch.nn.Module, exported: ExportedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
) -> None:
    """Call a module with arguments of new extents, leaving it unchanged.

    Raises:
        InputError: PyTorch cannot call it with them.
        GradientError: a transform of ``torch.func`` calls it.
    """
    if torch._C._are_functorch_transforms_active():
        raise GradientError(
            f"{type(module).__name__} is called by a transform of torch.func with extents that are new to its graph",
            "Call it once with such inputs outside of the transform, where it is compared with PyTorch",
        )
    leaves, _ = pytree.tree_flatten((args, dict(kwargs)))
    with _apart():
        verification = _Verification(module, exported, TorchEngine(capture=False), True, {})
        if verification.called_at(_point(module, exported, args, kwargs), training) is None and verification.refused is not None:
            refused = verification.refused
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor))
            raise InputError(
                f"PyTorch cannot call {type(module).__name__} with inputs of the shapes {shapes} "
                f"({type(refused).__name__}: {' '.join(str(refused).split())}): give it others"
            ) from refused


def computes_the_same(
    module: torch.nn.Module,
    exported: ExportedModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    training: bool,
    engine: TorchEngine,
) -> bool:
    """True if the graph of a mode gives the module's results on the arguments of a call."""
    model, inference = map(_without_dropout, (exported.model, exported.inference))
    assert model is not None
    failed = {not training: UnsupportedOperatorError("the other mode is not compared")}
    exported = replace(exported, model=model, inference=inference, failed=failed)
    verification = _Verification(module, exported, engine, True, {})
    verification.usual_alone = False
    with _apart(), torch.enable_grad():
        try:
            verification.run([_point(module, exported, args, kwargs)], others=False)
        except UnsupportedOperatorError:
            return False
    return not verification.is_uncomputed


def verify_segment(
    module: torch.nn.Module, exported: ExportedModule, model: ir.Model, examples: Sequence[torch.Tensor], engine: TorchEngine
) -> BoundGraph | None:
    """Compare a part of a captured graph, in training, on random inputs that it accepts.

    Args:
        module: a module that computes the part and holds its parameters.
        exported: its export.
        model: the export's model, canonical and without values of state.
        examples: examples of its inputs; their values do not matter.
        engine: the engine that runs the graph.

    Returns:
        The graph if it has no dropout, to avoid making it again.

    Raises:
        UnsupportedOperatorError: results differ.
    """
    generator = torch.Generator().manual_seed(0)

    def random(tensor: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "ones" or not tensor.is_floating_point():
            return torch.ones_like(tensor) if kind != "zeros" else torch.zeros_like(tensor)
        draw = torch.randn if kind == "normal" else torch.rand
        return draw(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)

    points = []
    for kind in ("normal", "uniform", "zeros", "ones"):
        start = Point.of(module, examples)
        state = {name: random(tensor, kind).requires_grad_(tensor.requires_grad) for name, tensor in start.state.items()}
        points.append(Point([random(leaf, kind) for leaf in start.leaves], state))
    without = _without_dropout(model)
    assert without is not None
    exported = replace(
        exported, model=without, inference=None, failed={False: UnsupportedOperatorError("a part has no evaluation")}
    )
    with _apart():
        graphs = _Verification(module, exported, engine, True, {}).run(points, others=False)
    return graphs.get(True) if without is model else None


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Enable gradients, isolated from any recording outside."""
    with torch.inference_mode(False), torch.enable_grad(), all_autocast_off(), saved_apart():
        yield


def saved_apart() -> AbstractContextManager[object]:
    """Return a context that hides saved tensors from the surrounding code: a checkpoint would count them."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.detach(), tensor._version), _unchanged)


def _unchanged(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a saved tensor unless it was overwritten: autograd does not check that if there are hooks."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError("what a backward pass reads was written over")
    return tensor


class _NothingDropped(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make PyTorch's dropout draw the mean of its distribution, so that it drops nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        if func == aten.native_dropout.default and args[2] and args[1] < 1:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func == aten.native_dropout_backward.default and args[2] > 0:
            return args[0] * args[1]
        return func(*args, **(kwargs or {}))


def _without_values(model: ir.Model | None, state: Iterable[str]) -> ir.Model | None:
    """Return a canonical model without values of state; the original is unchanged."""
    if model is None:
        return None
    names = set(state)
    values = [value for name, value in model.graph.initializers.items() if name in names]
    if values and all(value.const_value is None for value in values):
        return model
    loaded = load(model)
    forget_values(loaded.graph, names)
    return loaded


def _without_dropout(model: ir.Model | None) -> ir.Model | None:
    """Return a copy of a model with dropout off, except dropout of everything; return a model without dropout itself."""
    if model is None or not any(map(_drops, model.graph.all_nodes())):
        return model
    model = model.clone()
    ratio = ir.Value(name=NO_DROPOUT, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
    ratio.const_value = ir.tensor(np.asarray(0.0, np.float32), name=NO_DROPOUT)
    model.graph.initializers[NO_DROPOUT] = ratio
    for node in list(filter(_drops, model.graph.all_nodes())):
        if len(node.inputs) < 2:
            node.resize_inputs(2)
        node.replace_input_with(1, ratio)
    return model


def _drops(node: ir.Node) -> bool:
    if node.op_type != "Dropout" or node.domain != "":
        return False
    ratio = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    return ratio is None or float(ratio.numpy()) < 1.0


def _drawn(graph: ir.Graph) -> set[str] | None:
    """Return the names of the outputs that depend on random draws; None for all."""
    nodes = list(graph)
    drawing = [node for node in nodes if node.op_type in DRAWS]
    inside = [node for node in graph.all_nodes() if node.op_type in DRAWS]
    if len(inside) > len(drawing):
        return None
    reached: set[ir.Value] = {value for node in drawing for value in node.outputs}
    for node in nodes:
        if any(value in reached for value in node.inputs):
            reached.update(node.outputs)
    return {value.name or "" for value in graph.outputs if value in reached}


def _leaves_of(point: Point) -> tuple[list[Any], list[Any]]:
    """Return the leaves to differentiate by, and copies of them for a call, which may overwrite its inputs."""
    bases = []
    for leaf in point.leaves:
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().clone()
            leaf = leaf.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else leaf
        bases.append(leaf)
    return bases, [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in bases]


def _state_of(point: Point) -> dict[str, torch.Tensor]:
    """Return the parameters, and copies of the buffers, which a call may write to."""
    return {
        name: tensor.detach().requires_grad_() if tensor.requires_grad and not tensor.is_inference() else _copied(tensor)
        for name, tensor in point.state.items()
    }


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _tensor_of(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _cotangent(output: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(output.shape, generator=generator, dtype=torch.complex64 if output.is_complex() else torch.float32).to(
        output.device, output.dtype
    )


def _differences(found: Results, wanted: Results, drawn: set[str] | None) -> dict[str, float]:
    """Return the results that differ by more than their dtype allows, and the difference as a share of the greatest value."""
    if found.structure != wanted.structure:
        return {"the structure of what it returns": math.inf}
    depending = None if drawn is None else {f"the output '{name}'" for name in drawn}
    differences: dict[str, float] = {}
    pairs = [(label, value, wanted.forward.get(label)) for label, value in found.forward.items()]
    overall = _greatest(value for _, _, value in pairs)
    for label, value, other in pairs:
        if other is not None:
            shapes_alone = depending is None or label in depending or (bool(depending) and not label.startswith("the output"))
            differences[label] = _difference(value, other, 0.01 * overall, shapes_alone)
    if not depending and depending is not None and found.gradients is not None and wanted.gradients is not None:
        overall = _greatest(wanted.gradients.values())
        for label in found.gradients.keys() & wanted.gradients.keys():
            mine, theirs = found.gradients[label], wanted.gradients[label]
            if mine is not None or theirs is not None:
                mine = torch.zeros_like(theirs) if mine is None else mine  # type: ignore[arg-type]
                theirs = torch.zeros_like(mine) if theirs is None else theirs
                differences[label] = _difference(mine, theirs, 0.01 * overall, False)
    return {label: difference for label, difference in differences.items() if difference > 0}


def _greatest(values: Iterable[torch.Tensor | None]) -> float:
    plain = [value.detach().abs() for value in values if value is not None and (value.is_floating_point() or value.is_complex())]
    return max((float(value[value.isfinite()].amax()) for value in plain if bool(value.isfinite().any())), default=0.0)


def _difference(found: torch.Tensor, wanted: torch.Tensor, least: float, shapes_alone: bool) -> float:
    """Return the difference of two tensors as a share of the greatest value; 0 if it is only rounding."""
    found, wanted = found.detach(), wanted.detach()
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return math.inf
    if shapes_alone or not wanted.numel():
        return 0.0
    if not wanted.is_floating_point() and not wanted.is_complex():
        return float((found != wanted).any())
    tolerance = TOLERANCES.get(wanted.abs().dtype, TOLERANCES[torch.float32])[0]
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    found, wanted = found.to(wide), wanted.to(wide)
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()) or not torch.equal(wanted.isnan(), found.isnan()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    scale = max(float(wanted[finite].abs().amax()), least, 1e-30)
    difference = float((found - wanted)[finite].abs().amax()) / scale
    return difference if difference > tolerance else 0.0


def _moved_by(wanted: Results, other: Results, label: str) -> float:
    is_gradient = label.startswith("the gradient")
    mine, theirs = ((each.gradients or {}) if is_gradient else each.forward for each in (wanted, other))
    value, moved = mine.get(label), theirs.get(label)
    if value is None or moved is None or value.shape != moved.shape:
        return 0.0
    if not value.is_floating_point() and not value.is_complex():
        return float((value != moved).any())
    scale = max(_greatest([value]), 0.01 * _greatest(mine.values()), 1e-30)
    if not torch.equal(value.isfinite(), moved.isfinite()):
        return math.inf
    return _greatest([value.detach() - moved.detach()]) / scale


def _others(exported: ExportedModule, example: Point) -> Iterator[Point]:
    """Yield points with other extents and values; each is a fallback for the one before it."""
    shapes = {value.name: value.shape for value in exported.model.graph.inputs if value.shape is not None}
    named = [
        (index, list(shapes.get(name) or ())[: leaf.dim()], leaf)
        for index, (name, leaf) in enumerate(zip(exported.inputs.names, example.leaves, strict=True))
        if name is not None
    ]
    extents = {
        str(size.value): leaf.shape[axis]
        for _, sizes, leaf in named
        for axis, size in enumerate(sizes)
        if isinstance(size, ir.SymbolicDim) and size.value is not None and str(size.value).isidentifier()
    }
    for factor, added in ((1, 1), (2, 0), (1, -1), (1, 0)):
        changed = {name: max(factor * extent + added, min(extent, 2)) for name, extent in extents.items()}
        for mix in (True, False):
            generator = torch.Generator().manual_seed(3)
            leaves = list(example.leaves)
            try:
                for index, sizes, leaf in named:
                    wanted = [_extent(size, changed, present) for size, present in zip(sizes, leaf.shape, strict=True)]
                    leaves[index] = _other_values(leaf, wanted, generator, mix)
            except Exception:
                break
            yield Point(leaves, example.state)


def _extent(size: int | ir.SymbolicDim, names: Mapping[str, int], present: int) -> int:
    if not isinstance(size, ir.SymbolicDim) or size.value is None:
        return present
    text = str(size.value)
    return (
        names[text]
        if text in names
        else int(sympy.sympify(text, locals={name: sympy.Integer(value) for name, value in names.items()}))
    )


def _other_values(leaf: torch.Tensor, extents: Sequence[int], generator: torch.Generator, mix: bool) -> torch.Tensor:
    """Return a tensor of other extents, with values in the range and of the kind of the original."""
    value = leaf.detach()
    is_offsets = (
        value.dim() == 1 and not value.is_floating_point() and not value.is_complex() and bool((value[1:] >= value[:-1]).all())
    )
    for axis, extent in enumerate(extents):
        places = torch.arange(extent, device=value.device)
        size = max(value.shape[axis], 1)
        value = value.index_select(axis, places.clamp(max=size - 1) if is_offsets else places % size)
    if is_offsets or not mix or not value.numel():
        return value.clone()
    if value.is_floating_point() or value.is_complex():
        if not bool(value.isfinite().all()):
            return value.flip(0) if value.dim() else value.clone()
        parts = [_shuffled(value, generator) for _ in range(2)]
        if bool((value == value.flatten()[0]).all()):
            parts = [torch.zeros_like(value), value if bool(value.flatten()[0] != 0) else torch.ones_like(value)]
        share = torch.rand(value.shape, generator=generator).to(value.device, value.abs().dtype)
        return parts[0] * share + parts[1] * (1 - share)
    return _shuffled(value, generator) if value.dtype != torch.bool else (value.flip(0) if value.dim() else value.clone())


def _shuffled(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    places = torch.randint(value.numel(), (value.numel(),), generator=generator).to(value.device)
    return value.flatten()[places].reshape(value.shape)


def _first_difference(
    model: ir.Model, values: Mapping[str, Any], places: Mapping[str, str], inputs: Mapping[str, torch.Tensor], engine: TorchEngine
) -> str:
    """Describe the first difference between a model (without batch statistics and dropout) and PyTorch."""
    known = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    graph = model.graph
    present = {value.name for value in graph.outputs}
    computed = [value for node in graph for value in node.outputs if value.name in known and value.name not in present]
    graph.outputs.extend(computed)
    bound = BoundGraph(model, Binding((), None), engine, "comparison")
    with torch.no_grad():
        results = dict(zip(bound.outputs, bound([inputs[name] for name in bound.data], []), strict=True))
    for value in (value for node in graph for value in node.outputs if value.name in results):
        name = value.name or ""
        wanted = known.get(name)
        if wanted is None:
            continue
        wanted = torch.view_as_real(wanted) if wanted.is_complex() else wanted
        found = results[name]
        if found.shape != wanted.shape or _difference(found.to(wanted.dtype), wanted, 0.0, False):
            return f", first at {places.get(name, name)}"
    return (
        ", though its graph is what PyTorch traced: what forward reads in Python, such as a value, a time or a number drawn, is "
        "a constant there"
    )
