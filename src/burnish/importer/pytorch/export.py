"""``export_module``: a module and examples of its inputs become a model, step by step."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from burnish.errors import FixedBatchWarning, UnsupportedOperatorError
from burnish.importer.pytorch.capture import Captured, capture, fixed_batch, open_batch, told_apart, with_several_samples
from burnish.importer.pytorch.conversion import (
    convert,
    lift_buffers,
    name_dimensions,
    name_inputs,
    name_layers,
    name_outputs,
    next_name,
)
from burnish.importer.pytorch.exported import ExportedModule, Structure
from burnish.importer.pytorch.forms import same_but_for_mode
from burnish.importer.pytorch.layers import (
    count_training_uses,
    hold_rows,
    keep_scales,
    loosen_views,
    neutralize,
    stop_gradients,
    write_out_channel_dropout,
    write_out_factors,
)
from burnish.importer.pytorch.refusals import check_examples, named_refusal, users_stack_level
from burnish.importer.pytorch.symbols import symbol_names


def export_module(
    module: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None
) -> ExportedModule:
    """Return a module as one graph for training and evaluation, and what ONNX does not keep of it.

    The module is called twice, in training and in evaluation mode, with stand-ins for the examples that have no elements; it is
    left as it is. Where the two differ in more than normalization and dropout, there is a graph for each.

    Args:
        module: the module. Submodules in evaluation mode stay so in training, unless the module as a whole is: that is as if
            ``train()`` had been called.
        args, kwargs: what ``forward`` is called with. What is no tensor becomes a constant of the graph.
        dynamic_shapes: which axes of the inputs are open, as ``torch.export.export`` takes it. None: the first, of all inputs
            that have as many samples there as the first input.

    Warns:
        FixedBatchWarning: ``dynamic_shapes`` is None, and the module takes no other batch than that of the examples.

    Raises:
        UnsupportedOperatorError: the module cannot be exported: the line and the part are named.
        ConfigurationError: PyTorch cannot call the module with the examples either.
    """
    args, kwargs = told_apart(module, args, {} if kwargs is None else dict(kwargs))
    traced = _traced(module, args, kwargs, dynamic_shapes)
    training, evaluation = traced.training, traced.evaluation
    shared = shared_names(module)
    canonical = {other: name for name, others in shared.items() for other in others}
    uses = count_training_uses(training.program)
    _refuse_repeated_averages(uses, training.cumulative)
    policies = {
        _first_name(layer, canonical): policy
        for layer, policy in neutralize(training.program, module, training.cumulative).items()
    }
    neutralize(evaluation.program, module, evaluation.cumulative)
    is_neutral = same_but_for_mode(training.program.graph, evaluation.program.graph)
    held_rows = hold_rows(training.program, canonical)
    counts = _counted_batches(module, policies)
    with named_refusal(module):
        trained = _converted(training, traced, policies, canonical)
        evaluated = None if is_neutral else _converted(evaluation, traced, policies, canonical)
    moving = tuple(dict.fromkeys(name for mode in (trained, evaluated) if mode is not None for name in mode.written))
    for mode in (trained, evaluated):
        if mode is not None:
            lift_buffers(mode.model, moving, mode.written)
    return ExportedModule(
        model=trained.model,
        inference=None if evaluated is None else evaluated.model,
        inputs=trained.inputs,
        outputs=trained.outputs,
        parameters={name: parameter.requires_grad for name, parameter in module.named_parameters()},
        buffers=_buffers(module),
        shared=shared,
        moving=moving,
        written=trained.written,
        written_in_evaluation=(evaluated or trained).written,
        norm_policies=trained.norm_policies,
        held_rows=held_rows,
        counted_batches=counts,
        batches_per_call=_batches_per_call(uses, counts, canonical),
    )


class _Traced(NamedTuple):
    """A module in both modes, with the examples and the open axes that it was traced with."""

    training: Captured
    evaluation: Captured
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: Any

    @classmethod
    def of(cls, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any) -> _Traced:
        with named_refusal(module):
            training = capture(module, args, kwargs, shapes, training=True)
            evaluation = capture(module, args, kwargs, shapes, training=False)
        return cls(training, evaluation, args, kwargs, shapes)


def _traced(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> _Traced:
    """Trace a module, with an open batch where it has one, and with the batch of the examples where it takes no other."""
    if dynamic_shapes is not None:
        return _Traced.of(module, args, kwargs, dynamic_shapes)
    several, several_named = with_several_samples(args, kwargs)
    try:
        traced = _Traced.of(module, several, several_named, open_batch(module, several, several_named))
    except UnsupportedOperatorError as error:
        try:
            traced = _Traced.of(module, args, kwargs, None)
        except UnsupportedOperatorError:
            check_examples(module, args, kwargs)
            raise error from None
    if fixed := fixed_batch(traced.training.program, traced.args, traced.kwargs):
        warnings.warn(
            FixedBatchWarning(
                f"{type(module).__name__} takes batches of {fixed} alone: its forward fixes how many samples there are, as "
                f"reshape({fixed}, ...) and len(x) do. Read it from the input (x.shape[0]) or write -1, and export again. A "
                "recurrent layer without batch_first=True takes the first axis for time, and fixes it too. Where that is meant, "
                "say so with dynamic_shapes={}"
            ),
            stacklevel=users_stack_level(),
        )
    return traced


class _Converted(NamedTuple):
    """A mode of a module as a model, as ``ExportedModule`` has it."""

    model: ir.Model
    inputs: Structure
    outputs: Structure
    written: dict[str, str]
    norm_policies: dict[str, str]


def _converted(captured: Captured, traced: _Traced, policies: Mapping[str, str], canonical: Mapping[str, str]) -> _Converted:
    stop_gradients(captured.program)
    write_out_channel_dropout(captured.program)
    write_out_factors(captured.program)
    keep_scales(captured.program)
    loosen_views(captured.program)
    model, changed = convert(captured.program)
    _rename_shared(model, canonical)
    written = {name: next_name(name) for name in (canonical.get(each, each) for each in changed)}
    inputs = name_inputs(model, captured, traced.args, traced.kwargs)
    outputs = name_outputs(model, captured, list(written.values()))
    norm_policies = name_layers(model, policies)
    name_dimensions(model, symbol_names(captured.program, traced.shapes))
    return _Converted(model, inputs, outputs, written, norm_policies)


def shared_names(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the other names of parameters and buffers that have several, by the first, which ``named_parameters`` gives."""
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
    """The first name of a normalization layer, whatever other it has."""
    statistic = f"{layer}.running_mean"
    return canonical.get(statistic, statistic).removesuffix(".running_mean")


def _batches_per_call(uses: Mapping[str, int], counts: Iterable[str], canonical: Mapping[str, str]) -> dict[str, int]:
    batches = dict.fromkeys(counts, 0)
    for layer, times in uses.items():
        name = f"{_first_name(layer, canonical)}.num_batches_tracked"
        if name in batches:
            batches[name] += times
    return batches


def _buffers(module: torch.nn.Module) -> dict[str, bool]:
    kept = module.state_dict(keep_vars=True)
    return {name: name in kept for name, _ in module.named_buffers()}


def _refuse_repeated_averages(uses: Mapping[str, int], cumulative: Collection[str]) -> None:
    """Refuse an average over all batches that one call adds several to: its weight is read once for a call."""
    if repeated := [layer for layer in cumulative if uses[layer] > 1]:
        raise UnsupportedOperatorError(
            f"'{repeated[0]}' averages its running statistics over all batches (momentum=None), and one call of the module runs "
            f"it {uses[repeated[0]]} times: give it a momentum, or a layer of its own at each place"
        )


def _counted_batches(module: torch.nn.Module, policies: Mapping[str, str]) -> dict[str, int]:
    counts = {}
    for layer, policy in policies.items():
        name = f"{layer}.num_batches_tracked"
        count = dict(module.named_buffers()).get(name)
        if policy != "frozen" and count is not None:
            counts[name] = int(count)
    return counts
