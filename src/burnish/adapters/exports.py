"""Export of models with adapters, and of adapters as separate files for ONNX Runtime, JavaScript and PEFT."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish.adapters.graph import Adapters, read_adapters
from burnish.adapters.merge_adapters import lengths_beside
from burnish.adapters.peft_format import Names, write_peft
from burnish.adapters.variants import Adapter
from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.export import save_inference
from burnish.files.file_writing import file_path, replacing
from burnish.files.state_file import FOR_OTHERS, write_state_file
from burnish.graph import attribute_value, constant_array
from burnish.graph.uses import remove_unread, replace_uses
from burnish.settings import suggestion

FORMS = ("merged", "kept", "apart", "inputs", "peft")
"""Forms of adapters in an export; see ``Session.export``."""
ONNX_ADAPTER = ".onnx_adapter"
"""Suffix of ONNX Runtime's adapter files."""


def check_form(form: str, metadata: Mapping[str, str]) -> None:
    """Raise ConfigurationError for an unknown form, or for a form with adapters if the model has none."""
    if form not in FORMS:
        raise ConfigurationError(f"adapters={form!r}{suggestion(str(form), FORMS)}: choose among {', '.join(map(repr, FORMS))}")
    if form != "merged" and not read_adapters(metadata):
        raise ConfigurationError(
            f"adapters='{form}': the model has no adapters: put some beside its layers (burnish.surgery.lora), or leave this out"
        )


def save_with_adapters(model: ir.Model, path: str | os.PathLike[str], form: str, names: Names = None) -> Path:
    """Write a model with adapters as initializers, in one of the forms; for ``merged`` they are merged already.

    Args:
        model: the model; changed.
        path: the ``.onnx`` file; for ``peft`` the folder.
        form: ``kept`` writes the model unchanged. ``apart`` makes adapters optional inputs without effect by default, for an
            ``.onnx_adapter`` next to the file (``RunOptions.add_active_adapter``). ``inputs`` makes them required inputs, with
            values in a ``.safetensors``. ``peft`` writes only the adapters.
        names: names for ``peft``; see ``write_peft``.

    Returns:
        The path.

    Raises:
        CheckpointError: a file cannot be written.
        ConfigurationError: see ``write_peft``.
    """
    if form in ("merged", "kept"):
        return save_inference(model, path)
    if form == "peft":
        return write_peft(model, Path(path), names)
    path = file_path(path, "tuned.onnx")
    arrays = as_inputs(model, is_optional=form == "apart")
    saved = save_inference(model, path)
    if form == "apart":
        write_onnx_adapter(arrays, path.with_suffix(ONNX_ADAPTER))
    else:
        write_state_file(path.with_suffix(".safetensors"), arrays, FOR_OTHERS)
    return saved


def as_inputs(model: ir.Model, is_optional: bool) -> dict[str, np.ndarray]:
    """Make a model's adapters inputs of any rank, in place, and return their values.

    The scaling is multiplied into B, so adapters of other ranks and alphas fit the same model.

    Args:
        model: model with adapters as initializers.
        is_optional: True for inputs with a default of the smallest rank that has no effect.
    """
    adapters, graph = read_adapters(model.metadata_props), model.graph
    arrays: dict[str, np.ndarray] = {}
    for adapter in adapters.adapters:
        for part, name in adapter.parameters.items():
            if name in arrays:
                continue
            value = graph.initializers[name]
            array = constant_array(value)
            assert array is not None
            arrays[name] = array
            if part == "B" and adapter.scaling != 1:
                arrays[name] = (array.astype(np.float64) * adapter.scaling).astype(array.dtype)
                _drop_scaling(graph, value)
            if part in "AB":
                _open_rank(adapter, value, part)
    for name, array in arrays.items():
        value = graph.initializers[name]
        adapter, part = next((one, part) for one in adapters.adapters for part, own in one.parameters.items() if own == name)
        if is_optional:
            value.const_value = ir.Tensor(_neutral(model, adapter, part, array), name=name)
        else:
            graph.initializers.pop(name)
            value.const_value = None
        graph.inputs.append(value)
    Adapters().write(model)
    return arrays


def write_onnx_adapter(arrays: Mapping[str, np.ndarray], path: Path) -> Path:
    """Write arrays as an adapter file for ONNX Runtime, atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    import onnxruntime

    adapter = onnxruntime.AdapterFormat()
    adapter.set_parameters({name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()})
    with replacing(path) as partial:
        try:
            adapter.export_adapter(str(partial))
        except RuntimeError as error:
            raise CheckpointError(f"'{path}' cannot be written: {error}. Choose a file you can write to") from error
    return path


def _drop_scaling(graph: ir.Graph, b: ir.Value) -> None:
    for node, _ in tuple(b.uses()):
        if node.domain == "" and node.op_type == "Mul":
            replace_uses(node.outputs[0], b)
            remove_unread(graph, node)


def _open_rank(adapter: Adapter, value: ir.Value, part: str) -> None:
    axis = (part == "B") if adapter.operator == "Conv" else (part == "A")
    shape = value.shape
    assert shape is not None
    value.shape = ir.Shape([None if place == axis else extent for place, extent in enumerate(shape.dims)])
    for node in value.consumers() if part == "A" else ():
        for output in node.outputs:
            output.shape = None


def _neutral(model: ir.Model, adapter: Adapter, part: str, array: np.ndarray) -> np.ndarray:
    if part in "AB":
        axis = (part == "B") if adapter.operator == "Conv" else (part == "A")
        # Each group of a Conv needs at least a rank of one.
        rank = _groups(model, adapter) if part == "A" else 1
        return np.zeros([rank if place == axis else extent for place, extent in enumerate(array.shape)], array.dtype)
    return np.ones(array.shape, array.dtype) if part == "scale" else lengths_beside(model, adapter).astype(array.dtype)


def _groups(model: ir.Model, adapter: Adapter) -> int:
    """Return the groups of an adapter's Conv, each of which reads a part of the rank; else 1."""
    outputs = (output for node in model.graph.all_nodes() for output in node.outputs)
    product = next((output for output in outputs if output.name == adapter.product), None)
    node = None if product is None else product.producer()
    return 1 if node is None or adapter.operator != "Conv" else int(attribute_value(node, "group", 1))
