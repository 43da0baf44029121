"""Conversion of a graph of ATen operators to an ``onnx_ir.Model`` with the module's names."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch._export import utils
from torch.export import decomp_utils, exported_program
from torch.export.graph_signature import ConstantArgument, OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

from burnish.errors import UnsupportedOperatorError
from burnish.graph.annotations import OF_MODULE
from burnish.importer.export_notes import SIGNATURE
from burnish.importer.pytorch.capture import Captured, is_computed
from burnish.importer.pytorch.decompositions import decomposing, decompositions, refuse_misread
from burnish.importer.pytorch.exported import Structure
from burnish.importer.pytorch.layers import is_user_input
from burnish.importer.pytorch.translation import OPSET, TRANSLATIONS

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

_collect = utils._collect_all_valid_cia_ops
_override = exported_program._override_composite_implicit_decomp


@contextlib.contextmanager
def composites_known() -> Iterator[None]:
    """Cache the composite operators for decompositions, and override only those that change.

    Otherwise these two steps take most of the time of an export.
    """
    registered = tuple(torch._C._dispatch_get_registrations_for_dispatch_key(COMPOSITE.name))
    readers: tuple[Any, ...] = (utils, decomp_utils, exported_program)
    try:
        for module in readers:
            module._collect_all_valid_cia_ops = functools.partial(_composites, registered)
        exported_program._override_composite_implicit_decomp = _replaced  # type: ignore[assignment]
        yield
    finally:
        for module in readers:
            module._collect_all_valid_cia_ops = _collect
        exported_program._override_composite_implicit_decomp = _override


@functools.lru_cache(maxsize=1)
def _composites(registered: tuple[str, ...]) -> set[Any]:
    """Return the composite operators, cached by ``registered``."""
    return _collect()


def _replaced(decompositions: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Override the decompositions of composite operators that differ from their own."""
    return _override({operator: function for operator, function in decompositions.items() if not _is_own(operator, function)})


def _is_own(operator: Any, function: Callable[..., Any]) -> bool:
    own = utils._get_decomp_for_cia(operator)
    both = (own, function)
    if all(isinstance(each, functools.partial) for each in both):
        return own.func.__qualname__ == function.func.__qualname__  # type: ignore[attr-defined]
    return own is function


SIXTEEN_BITS = {torch.bfloat16: ml_dtypes.bfloat16}


def convert(program: torch.export.ExportedProgram, inputs: bool) -> tuple[ir.Model, tuple[str, ...], tuple[str, ...]]:
    """Return the graph in ONNX operators, and the inputs and buffers that ``forward`` changes.

    Nothing is folded or merged; weights are copies. The new values of inputs, then buffers, are the last outputs, in that order;
    if there are any, outputs are added to ``program``, in place.

    Args:
        program: the graph of ATen operators.
        inputs: True to return values written over inputs.

    Raises:
        UnsupportedOperatorError: ``forward`` writes to a parameter.
    """
    exported = onnx_program(program)
    assert exported.exported_program is not None
    signature = exported.exported_program.graph_signature
    for spec in signature.output_specs:
        if spec.kind == OutputKind.PARAMETER_MUTATION:
            raise UnsupportedOperatorError(
                f"forward writes to the parameter '{spec.target}', as an embedding with max_norm does, and a graph "
                f"does not: write to "
                "it after the optimizer's step, outside of forward. Or let PyTorch compute the module: "
                "burnish.torch.wrap(module, example_inputs, partial=True)"
            )
    written = tuple(dict.fromkeys(signature.user_inputs_to_mutate.values())) if inputs else ()
    changed = tuple(sorted(signature.buffers_to_mutate.values()))
    if written or changed:
        _return_changes(program, written, changed)
        exported = onnx_program(program)
    model: ir.Model = exported.model
    # A translation that returns its argument leaves an input with a node's name.
    inputs_of_graph = [
        spec.arg.name for spec in signature.input_specs if is_user_input(spec) and not isinstance(spec.arg, ConstantArgument)
    ]
    for value, name in zip(model.graph.inputs, inputs_of_graph, strict=True):
        value.name = name
    # It lists parameters under all their names, and missing ones would be restored.
    model.graph.metadata_props.pop(SIGNATURE, None)
    OF_MODULE.set(model.graph, True)
    _refuse_complex(program, model.graph, trained=not inputs)
    tensors = {**program.state_dict, **program.constants}
    for name, value in model.graph.initializers.items():
        tensor = tensors[name]
        value.const_value = ir.Tensor(_copied(torch.view_as_real(tensor) if tensor.is_complex() else tensor), name=name)
    _read_originals(model.graph)
    return model, written, changed


def _refuse_complex(program: torch.export.ExportedProgram, graph: ir.Graph, *, trained: bool) -> None:
    """Refuse complex buffers that ``forward`` changes, and complex parameters to be trained. Other complex tensors become pairs.

    Raises:
        UnsupportedOperatorError: there is one; the message names it.
    """
    signature = program.graph_signature
    states = {*signature.buffers_to_mutate.values(), *(signature.parameters if trained else ())}
    complex_states = (name for name in graph.initializers if name in states and program.state_dict[name].is_complex())
    if (name := next(complex_states, None)) is not None:
        raise UnsupportedOperatorError(
            f"'{name}' is complex, and ONNX computes with real numbers: hold it as pairs of them, in a last axis of two, and "
            "read it by torch.view_as_complex where it is multiplied. Or wrap the parts around it, or let PyTorch compute "
            "it: burnish.torch.wrap(module, example_inputs, partial=True)"
        )


def _read_originals(graph: ir.Graph) -> None:
    """Bypass copies of initializers, in place: loading would treat a copy as another parameter."""
    for node in list(graph):
        (copy,) = node.outputs if node.op_type == "Identity" else (None,)
        if copy is not None and not copy.is_graph_output() and (value := node.inputs[0]) is not None and value.is_initializer():
            copy.replace_all_uses_with(value)
            graph.remove(node, safe=True)


@composites_known()
def onnx_program(program: torch.export.ExportedProgram) -> torch.onnx.ONNXProgram:
    """Return the exporter's result for a program, including the decomposed program."""
    with decomposing(decompositions(program)), _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=OPSET,
            custom_translation_table=TRANSLATIONS,
        )
    assert exported is not None
    assert exported.exported_program is not None
    refuse_misread(exported.exported_program)
    return exported


def _return_changes(program: torch.export.ExportedProgram, inputs: Sequence[str], buffers: Sequence[str]) -> None:
    """Return the final values of inputs and buffers, in place: the exporter drops writes to them."""
    graph, signature = program.graph, program.graph_signature
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    holding = {signature.inputs_to_buffers.get(name): node for name, node in placeholders.items()}
    (output,) = graph.find_nodes(op="output")
    values = []
    for changed in (*[placeholders[name] for name in inputs], *[holding[name] for name in buffers]):
        with graph.inserting_before(output):
            value = graph.call_function(torch.ops.aten.clone.default, (changed,))
        value.meta.update(changed.meta)
        values.append(value)
        signature.output_specs.append(OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(value.name), None))
    output.args = ((*output.args[0], *values),)
    called = program.module_call_graph[0].signature
    assert called is not None
    called.outputs.extend(TensorArgument(value.name) for value in values)
    called.out_spec = pytree.tree_structure((0,) * len(output.args[0]))
    program.graph_module.recompile()


def _copied(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype in SIXTEEN_BITS:
        return plain.view(torch.int16).numpy().copy().view(SIXTEEN_BITS[plain.dtype])
    return np.array(plain.numpy())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's log below errors, about operators of missing packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def name_inputs(model: ir.Model, captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Structure:
    """Return the mapping of the examples to graph inputs, named after the parameters of ``forward``."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    specs = [spec for spec in captured.program.graph_signature.input_specs if is_user_input(spec)]
    names = [entry.arg.name if isinstance(leaf, torch.Tensor) else None for entry, leaf in zip(specs, leaves, strict=True)]
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Structure(spec, tuple(names), tuple(constants), _kinds(names, leaves))


def _kinds(names: Iterable[str | None], leaves: Iterable[Any]) -> dict[str, str]:
    kinds = {}
    for name, leaf in zip(names, leaves, strict=True):
        if name is not None and (not isinstance(leaf, torch.Tensor) or leaf.is_complex()):
            kinds[name] = "complex" if isinstance(leaf, torch.Tensor) else "number"
    return kinds


def name_outputs(model: ir.Model, captured: Captured, following: Sequence[str]) -> Structure:
    """Name the graph outputs by their position in the result of ``forward``, in place.

    A single tensor is ``output``; entries of dictionaries and dataclasses have their names, those of tuples their numbers.
    ``following`` holds the names of the next values of inputs and buffers, which come last.
    """
    paths, spec = pytree.tree_flatten_with_path(captured.returned)
    taken = {value.name for value in model.graph.inputs} | set(model.graph.initializers)
    names: list[str | None] = []
    produced: list[ir.Value] = []
    values = iter(list(model.graph.outputs))
    for path, leaf in paths:
        if not is_computed(leaf):
            names.append(None)
            continue
        names.append(_unused(_path_name(path), taken))
        taken.add(names[-1])
        produced.append(_apart(model.graph, next(values), produced))
    produced.extend(_apart(model.graph, value, produced) for value in values)
    by_name = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs.clear()
    for name, value in zip([*filter(None, names), *following], produced, strict=True):
        if (other := by_name.get(name)) is not None and other is not value:
            other.name = _unused(f"{name}_inside", {*taken, *by_name})
        value.name = name
        model.graph.outputs.append(value)
    constants = [None if is_computed(leaf) else leaf for _, leaf in paths]
    return Structure(spec, tuple(names), tuple(constants), _kinds(names, [leaf for _, leaf in paths]))


def next_name(name: str) -> str:
    """Return the name of the output with the next value of a buffer or input."""
    return f"next:{name}"


def _apart(graph: ir.Graph, value: ir.Value, others: Sequence[ir.Value]) -> ir.Value:
    if value.producer() is not None and value not in others:
        return value
    node = ir.node("Identity", [value])
    graph.append(node)
    copy = node.outputs[0]
    copy.type, copy.shape = value.type, value.shape
    return copy


def _path_name(path: Sequence[Any]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    if not parts:
        return "output"
    return "_".join(parts) if not parts[0].isdigit() else "output_" + "_".join(parts)


def _unused(name: str, taken: set[Any]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def lift_buffers(model: ir.Model, names: Iterable[str], written: Mapping[str, str]) -> None:
    """Make buffers that a model reads or writes inputs, in place, so that their values are not taken for constants.

    Args:
        model: a model with named outputs.
        names: names of the buffers.
        written: buffer name -> output with its next value, for buffers that are written.
    """
    graph = model.graph
    following = {value.name: value for value in graph.outputs}
    for name in names:
        value = graph.initializers.pop(name, None)
        if value is not None and (tensor := value.const_value) is not None:
            value.type, value.shape, value.const_value = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy()), None
        elif name in written:
            output = following[written[name]]
            value = ir.Value(name=name, type=output.type, shape=output.shape)
        if value is not None:
            graph.inputs.append(value)


def name_layers(model: ir.Model, policies: Mapping[str, str]) -> dict[str, str]:
    """Name batch normalization nodes after their layers, in place; return the policies by node name."""
    named: dict[str, str] = {}
    for node in model.graph:
        if node.op_type != "BatchNormalization" or (mean := node.inputs[3]) is None:
            continue
        layer = (mean.name or "").rpartition(".")[0]
        node.name = _unused(layer or node.op_type, set(named))
        named[node.name] = policies.get(layer, "frozen")  # functional calls with their own statistics, outside training
    return named


def name_dimensions(model: ir.Model, names: Mapping[str, str]) -> None:
    """Name the symbols of shapes, in place: ``batch`` instead of ``s77``; and use numbers for those fixed by tracing."""
    symbol = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b") if names else None

    def named(size: Any) -> Any:
        if not isinstance(size, ir.SymbolicDim) or not size.value:
            return size
        text = str(size.value)
        if text.isdigit():
            return int(text)
        return text if symbol is None else symbol.sub(lambda match: names[match[0]], text)

    for value in _values(model):
        if value.shape is not None:
            value.shape = ir.Shape([named(size) for size in value.shape])


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in (*model.graphs(), *(function.graph for function in model.functions.values())):
        yield from graph.inputs
        for node in graph:
            yield from node.outputs
