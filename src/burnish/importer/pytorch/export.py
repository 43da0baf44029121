"""``export_module``: converts a module and example inputs to a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch import fx
from torch.utils import _pytree as pytree

from burnish.errors import AttributesWarning, FixedBatchWarning, HooksWarning, UnsupportedOperatorError
from burnish.importer.pytorch.capture import (
    Captured,
    before_forward,
    capture,
    fixed_batch,
    held_as_buffers,
    is_computed,
    open_batch,
    refuse_lazy,
    register_dataclasses,
    told_apart,
    with_several_samples,
)
from burnish.importer.pytorch.conversion import (
    convert,
    lift_buffers,
    name_dimensions,
    name_inputs,
    name_layers,
    name_outputs,
    next_name,
    onnx_program,
)
from burnish.importer.pytorch.exported import ExportedModule, Extents, Structure, symbol_names
from burnish.importer.pytorch.layers import (
    DROPS,
    count_training_uses,
    hold_rows,
    in_layer,
    is_user_input,
    keep_drawing,
    keep_scales,
    loosen_views,
    neutralize,
    same_but_for_mode,
    say_dtypes,
    stop_gradients,
    take_parts,
    write_out_channel_dropout,
    write_out_factors,
)
from burnish.importer.pytorch.refusals import check_examples, named_refusal, place_of
from burnish.warn import warn


def export_module(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    called: bool = False,
    needed: Collection[bool] = (True, False),
    modes: Collection[bool] = (True, False),
) -> ExportedModule:
    """Return a module as one graph for training and evaluation, with its properties that ONNX does not keep.

    The module is called in training and evaluation mode, with empty stand-ins for the examples, and is not changed. If the modes
    differ in more than normalization and dropout, each has its own graph.

    Args:
        module: the module. Submodules in evaluation mode stay so in training, unless the whole module is, which counts as if
            ``train()`` had been called.
        args, kwargs: arguments of ``forward``. Values other than tensors become constants.
        dynamic_shapes: open axes of the inputs, as for ``torch.export.export``. None opens the first axis of all inputs with as
            many samples there as the first input.
        called: True if the graph runs in calls of the module, which then call the hooks of the whole module and write over
            inputs. Otherwise the graph includes the hooks.
        needed: modes that must have a graph, True for training. ``failed`` has the reason if another mode cannot be traced.
        modes: modes to trace.

    Warns:
        FixedBatchWarning: ``dynamic_shapes`` is None, and the module accepts only the batch of the examples.
        HooksWarning: a hook on gradients is not in the graph.
        AttributesWarning: ``forward`` sets attributes of the module, which the graph does not.

    Raises:
        UnsupportedOperatorError: the module cannot be exported; the message names the line and the part.
        ConfigurationError: PyTorch cannot call the module with the examples either.
    """
    refuse_lazy(module)
    register_dataclasses((args, kwargs))
    args, kwargs = told_apart(module, args, {} if kwargs is None else dict(kwargs))
    if not called:
        _warn_of_backward_hooks(module)
    attributes = before_forward(module, args, kwargs)[2] if called else {}
    with held_as_buffers(module, attributes):
        traced = _traced(module, args, kwargs, dynamic_shapes, _Asked(not called, frozenset(needed), tuple(modes)))
        exported = replace(_exported(module, traced, called), attributes=tuple(attributes))
    _warn_of_attributes(module, traced)
    return exported


def _exported(module: torch.nn.Module, traced: _Traced, called: bool) -> ExportedModule:
    training, evaluation = traced.training or traced.evaluation, traced.evaluation or traced.training
    assert training is not None
    assert evaluation is not None
    shared = shared_names(module)
    canonical = {other: name for name, others in shared.items() for other in others}
    uses = count_training_uses(training.program)
    _refuse_repeated_averages(uses, training.cumulative)
    policies = {
        _first_name(layer, canonical): policy
        for layer, policy in neutralize(training.program, module, training.cumulative).items()
    }
    is_neutral = training is evaluation
    if not is_neutral:
        neutralize(evaluation.program, module, evaluation.cumulative)
        with named_refusal(module):
            keep_drawing(training.program, evaluation.program)
        is_neutral = same_but_for_mode(training.program.graph, evaluation.program.graph)
        is_neutral &= _same_structure(training.returned, evaluation.returned)
    held_rows = hold_rows(training.program, canonical)
    if evaluation is not training:
        hold_rows(evaluation.program, canonical)
    counts = _counted_batches(module, policies)
    with named_refusal(module):
        trained = _converted(training, traced, policies, canonical, called)
        evaluated = None if is_neutral else _converted(evaluation, traced, policies, canonical, called)
    moving = tuple(dict.fromkeys(name for mode in (trained, evaluated) if mode is not None for name in mode.written))
    for mode in (trained, evaluated):
        if mode is not None:
            lift_buffers(mode.model, moving, mode.written)
    in_evaluation = evaluated or trained
    return ExportedModule(
        model=trained.model,
        inference=None if evaluated is None else evaluated.model,
        inputs=trained.inputs,
        outputs=trained.outputs,
        outputs_in_evaluation=in_evaluation.outputs,
        parameters={name: parameter.requires_grad for name, parameter in module.named_parameters()},
        buffers=_buffers(module),
        shared=shared,
        moving=moving,
        written=trained.written,
        written_in_evaluation=in_evaluation.written,
        written_inputs=trained.written_inputs,
        written_inputs_in_evaluation=in_evaluation.written_inputs,
        norm_policies=trained.norm_policies,
        held_rows=held_rows,
        counted_batches=counts,
        batches_per_call=_batches_per_call(uses, counts, canonical),
        failed=traced.failed,
        constants=tuple({id(each): each for each in (*training.constants, *evaluation.constants)}.values()),
        extents=Extents.of(training.program),
        extents_in_evaluation=Extents.of(evaluation.program),
    )


def _same_structure(value: Any, other: Any) -> bool:
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(value), pytree.tree_flatten(other)
    return spec == other_spec and all(
        type(mine) is type(theirs) and (is_computed(mine) or mine == theirs) for mine, theirs in zip(leaves, others, strict=True)
    )


class _Asked(NamedTuple):
    hooks: bool
    needed: frozenset[bool]
    modes: tuple[bool, ...]


class _Traced(NamedTuple):
    training: Captured | None
    evaluation: Captured | None
    failed: Mapping[bool, Exception]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: Any

    @classmethod
    def of(cls, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any, asked: _Asked) -> _Traced:
        captured: dict[bool, Captured] = {}
        failed: dict[bool, Exception] = {}
        for training in asked.modes:
            try:
                with named_refusal(module):
                    captured[training] = capture(module, args, kwargs, shapes, training, asked.hooks)
            except UnsupportedOperatorError as error:
                if training in asked.needed:
                    raise
                failed[training] = error
        return cls(captured.get(True), captured.get(False), failed, args, kwargs, shapes)

    @property
    def program(self) -> torch.export.ExportedProgram:
        captured = self.training or self.evaluation
        assert captured is not None
        return captured.program


def _traced(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any, asked: _Asked
) -> _Traced:
    if dynamic_shapes is not None:
        return _Traced.of(module, args, kwargs, dynamic_shapes, asked)
    several, several_named = with_several_samples(args, kwargs)
    try:
        traced = _Traced.of(module, several, several_named, open_batch(module, several, several_named), asked)
    except UnsupportedOperatorError as error:
        try:
            traced = _Traced.of(module, args, kwargs, None, asked)
        except UnsupportedOperatorError:
            check_examples(module, args, kwargs)
            raise error from None
    if fixed := fixed_batch(traced.program, traced.args, traced.kwargs):
        warn(
            FixedBatchWarning(
                f"{type(module).__name__} takes batches of {fixed} alone: its forward fixes how many samples there are, as "
                f"reshape({fixed}, ...) and len(x) do. Read it from the input (x.shape[0]) or write -1, and export again. A "
                "recurrent layer without batch_first=True takes the first axis for time, and fixes it too. Where that is meant, "
                "say so with dynamic_shapes={}"
            )
        )
    return traced


class _Converted(NamedTuple):
    model: ir.Model
    inputs: Structure
    outputs: Structure
    written: dict[str, str]
    written_inputs: dict[str, str]
    norm_policies: dict[str, str]


def _converted(
    captured: Captured, traced: _Traced, policies: Mapping[str, str], canonical: Mapping[str, str], called: bool
) -> _Converted:
    _write_out(captured.program)
    model, changed_inputs, changed = convert(captured.program, called)
    _rename_shared(model, canonical)
    written = {name: next_name(name) for name in (canonical.get(each, each) for each in changed)}
    written_inputs = {name: next_name(name) for name in changed_inputs}
    inputs = name_inputs(model, captured, traced.args, traced.kwargs)
    outputs = name_outputs(model, captured, [*written_inputs.values(), *written.values()])
    norm_policies = name_layers(model, policies)
    name_dimensions(model, symbol_names(captured.program, traced.shapes))
    return _Converted(model, inputs, outputs, written, written_inputs, norm_policies)


def _write_out(program: torch.export.ExportedProgram) -> None:
    """Replace operators that the exporter translates incorrectly, in place."""
    stop_gradients(program)
    say_dtypes(program)
    write_out_channel_dropout(program)
    write_out_factors(program)
    keep_scales(program)
    loosen_views(program)
    take_parts(program)


class TracedValues(NamedTuple):
    """Values of each node of a trace in PyTorch, without batch statistics and dropout.

    Attributes:
        model: the trace in ONNX operators.
        values: values by node name, which is also the value's name in the model.
        places: descriptions of the nodes.
        inputs: inputs of the model by name.
    """

    model: ir.Model
    values: dict[str, Any]
    places: dict[str, str]
    inputs: dict[str, torch.Tensor]


def traced_values(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, training: bool, called: bool
) -> TracedValues:
    """Trace a module and evaluate the trace node by node; arguments are as for ``export_module``."""
    args, kwargs = told_apart(module, args, kwargs)
    with held_as_buffers(module, before_forward(module, args, kwargs)[2] if called else {}):
        traced = _traced(module, args, kwargs, dynamic_shapes, _Asked(not called, frozenset({training}), (training,)))
        captured = traced.training if training else traced.evaluation
        assert captured is not None
        neutralize(captured.program, module, captured.cumulative)
        _write_out(captured.program)
        exported = onnx_program(captured.program)
    program = exported.exported_program
    assert program is not None
    interpreter = _Recorded(program.graph_module)
    with torch.no_grad():
        interpreter.run(*program._graph_module_flat_inputs(traced.args, dict(traced.kwargs)))
    places = {node.name: place_of(node) for node in program.graph.nodes}
    leaves = pytree.tree_leaves((traced.args, dict(traced.kwargs)))
    named = [spec.arg.name for spec in program.graph_signature.input_specs if is_user_input(spec)]
    inputs = {name: leaf for name, leaf in zip(named, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
    return TracedValues(exported.model, interpreter.values, places, inputs)


class _Recorded(fx.Interpreter):
    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self.fetch_args_kwargs_from_env(n)[0][0] if n.target in DROPS else super().run_node(n)
        self.values[n.name] = value.clone() if isinstance(value, torch.Tensor) else value
        return value


def shared_names(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the additional names of parameters and buffers by the first name in ``named_parameters``."""
    names: dict[int, list[str]] = {}
    for pairs in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in pairs:
            names.setdefault(id(tensor), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


def _rename_shared(model: ir.Model, canonical: Mapping[str, str]) -> None:
    initializers = model.graph.initializers
    for name in [name for name in initializers if name in canonical]:
        value = initializers.pop(name)
        first = canonical[name]
        if first in initializers:
            value.replace_all_uses_with(initializers[first])
            continue
        value.name = first
        initializers[first] = value


def _first_name(layer: str, canonical: Mapping[str, str]) -> str:
    """Return the first name of a normalization layer, given any of its names."""
    statistic = in_layer(layer, "running_mean")
    return canonical.get(statistic, statistic).rpartition(".")[0]


def _batches_per_call(uses: Mapping[str, int], counts: Iterable[str], canonical: Mapping[str, str]) -> dict[str, int]:
    batches = dict.fromkeys(counts, 0)
    for layer, times in uses.items():
        name = in_layer(_first_name(layer, canonical), "num_batches_tracked")
        if name in batches:
            batches[name] += times
    return batches


def _warn_of_backward_hooks(module: torch.nn.Module) -> None:
    hooked = [
        name or "the module itself" for name, part in module.named_modules() if part._backward_hooks or part._backward_pre_hooks
    ]
    if hooked:
        warn(
            HooksWarning(
                f"hooks on gradients of {', '.join(hooked[:5])} are not called when a program trains: what they do to "
                f"gradients is "
                "lost. Remove them, or train with PyTorch's optimizer and burnish.torch.wrap of the parts inside"
            )
        )


def _warn_of_attributes(module: torch.nn.Module, traced: _Traced) -> None:
    captured = traced.training or traced.evaluation
    if captured is not None and captured.attributes:
        shown = ", ".join(f"'{name}'" for name in captured.attributes[:5])
        warn(
            AttributesWarning(
                f"forward of {type(module).__name__} sets attributes to what it computes: {shown}. A graph does not, "
                f"and they stay as "
                "they are. Return what is read of them afterwards"
            )
        )


def _buffers(module: torch.nn.Module) -> dict[str, bool]:
    kept = module.state_dict(keep_vars=True)
    return {name: name in kept for name, _ in module.named_buffers()}


def _refuse_repeated_averages(uses: Mapping[str, int], cumulative: Collection[str]) -> None:
    """Refuse a cumulative average that is updated several times per call: its weight is read once per call."""
    if repeated := [layer for layer in cumulative if uses[layer] > 1]:
        raise UnsupportedOperatorError(
            f"'{repeated[0]}' averages its running statistics over all batches (momentum=None), and one call of the module runs "
            f"it {uses[repeated[0]]} times: give it a momentum, or a layer of its own at each place"
        )


def _counted_batches(module: torch.nn.Module, policies: Mapping[str, str]) -> dict[str, int]:
    counts = {}
    for layer, policy in policies.items():
        name = in_layer(layer, "num_batches_tracked")
        count = dict(module.named_buffers()).get(name)
        if policy != "frozen" and count is not None:
            counts[name] = int(count)
    return counts
