"""Adapters read from PEFT, and written for it, beside a model whose layers may be called otherwise."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish.analysis.adapters import read_adapters
from burnish.errors import ConfigurationError
from burnish.formats.adapter_files import check_form, save_with_adapters
from burnish.formats.peft import Names, PeftAdapters, called, from_layout_of_peft, is_turned, read_peft
from burnish.graph.initializers import set_initializer
from burnish.importer import Source, load
from burnish.passes import merge_adapters as merged
from burnish.settings import suggestion
from burnish.surgery.adapters.layers import Layer, find_layers
from burnish.surgery.adapters.lora import adapted, matching_weights


def load_peft(
    source: Source, folder: str | os.PathLike[str], names: Names = None, *, also_trained: str | Sequence[str] = ()
) -> ir.Model:
    """Return a model with the adapters of a folder of PEFT, to predict with, to train on or to merge.

    Args:
        source: the model that they are for: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        folder: with ``adapter_model.safetensors`` and ``adapter_config.json``: LoRA, DoRA or (IA)³.
        names: layer of the model -> module of PyTorch, or a function of the one that gives the other, where they are called
            otherwise; also for initializers that were trained beside the adapters (``modules_to_save``). Else a layer is that of
            the same name, or the only one whose name ends in the module's, or the other way round: exporters often wrap a module
            in another.
        also_trained: names or patterns of initializers that train beside the adapters, besides those that the folder holds.

    Returns:
        A canonical model.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigurationError: the model has no such layer, or one of other extents; or the adapters are of a kind that burnish does
            not have.
        ModelError: the source is not a valid ONNX model.
    """
    held, model = read_peft(Path(folder)), load(source)
    layers, _ = find_layers(model.graph)
    chosen = {layer: module for module in held.modules for layer in _layers_of(module, names, layers, held)}
    others = {_initializer_of(name, names, model.graph.initializers): array for name, array in held.others.items()}
    options = {layer: _options(held, module, layer) for layer, module in chosen.items()}
    present = set(model.graph.initializers)
    model = adapted(model, options, tuple(dict.fromkeys((*others, *matching_weights(model, also_trained)))))
    by_name = {layer.name: module for layer, module in chosen.items()}
    for adapter in read_adapters(model.metadata_props).adapters:
        module = by_name.get(adapter.layer)
        if module is None:
            continue
        for part, name in adapter.parameters.items():
            if name not in present:
                array = from_layout_of_peft(adapter.operator, part, held.modules[module][part])
                _set(model.graph.initializers[name], array, module)
    for name, array in others.items():
        value = model.graph.initializers[name]
        _set(value, _as_read(value, array), name)
    return model


def save_peft(source: Source, folder: str | os.PathLike[str], names: Names = None) -> Path:
    """Write the adapters of a model for PEFT: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Args:
        source: a model with adapters, as ``lora`` returns it and ``Session.export(..., adapters="kept")`` writes it.
        folder: made where it is not there.
        names: layer of the model -> module of PyTorch, or a function of the one that gives the other, where they are called
            otherwise; also for initializers that were trained beside the adapters.

    Returns:
        The folder.

    Raises:
        ConfigurationError: the model has no adapters, or such as PEFT cannot have, or a layer has no name of a module.
        CheckpointError: a file cannot be written.
        ModelError: the source is not a valid ONNX model.
    """
    model = load(source)
    check_form("peft", model.metadata_props)
    return save_with_adapters(model, Path(folder), "peft", names)


def merge_adapters(source: Source) -> ir.Model:
    """Return a model with one weight in the place of each weight and its adapter; one without adapters as it is.

    A merged weight has the name and layout of the weight. Where something else reads the weight too, or it is dequantized from
    integers, the merged one is ``<layer>.merged_weight``, in floating point.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.

    Returns:
        A canonical model.

    Raises:
        ModelError: the source is not a valid ONNX model, or an adapter was changed.
        CheckpointError: a merged weight is not finite.
    """
    return merged(load(source))


def _layers_of(module: str, names: Names, layers: Collection[Layer], held: PeftAdapters) -> list[Layer]:
    """The layers of a module: one, or several that read the same weight."""
    fitting = [layer for layer in layers if (layer.node.op_type == "Gather") == (module in held.tables)]
    exact = [layer for layer in fitting if called(layer.name, names) == module]
    near = [layer for layer in fitting if module.endswith(f".{layer.name}") or layer.name.endswith(f".{module}")]
    found = exact or near
    if not found or len({layer.name for layer in found}) > 1:
        present = [layer.name for layer in fitting]
        what = "has no such layer" if not found else f"has several, {', '.join(repr(layer.name) for layer in found[:4])}"
        raise ConfigurationError(
            f"load_peft: the adapters are for the module '{module}', and the model {what}{suggestion(module, present)}: say "
            f"which layer it is, names={{'<layer>': '{module}'}}"
        )
    return found


def _options(held: PeftAdapters, module: str, layer: Layer) -> dict[str, object]:
    """What ``adapted`` takes for a layer."""
    is_scaled = module in held.feedforward
    common: dict[str, object] = {"variant": held.variant, "feedforward": is_scaled}
    if held.variant == "ia3":
        return {**common, "rank": 0, "alpha": 0.0, "dropout": 0.0, "rslora": False}
    rank = len(held.modules[module]["A"])
    return {**common, "rank": rank, "alpha": held.alpha(module), "dropout": held.dropout, "rslora": held.rslora}


def _initializer_of(name: str, names: Names, initializers: Collection[str]) -> str:
    """The initializer that a parameter is."""
    found = [one for one in initializers if called(one, names) == name]
    found = found or [one for one in initializers if name.endswith(f".{one}") or one.endswith(f".{name}")]
    if len(found) != 1:
        raise ConfigurationError(
            f"load_peft: the file has the parameter '{name}', and the model no initializer of this name"
            f"{suggestion(name, initializers)}: say which it is, names={{'<initializer>': '{name}'}}"
        )
    return found[0]


def _as_read(value: ir.Value, array: np.ndarray) -> np.ndarray:
    """A parameter of PyTorch in the layout of the model's initializer; what says it of a square one is how the model reads it."""
    expected = None if value.shape is None else tuple(value.shape.dims)
    turned = array.T if array.ndim == 2 else array
    if turned.shape == expected and (array.shape != expected or is_turned(value)):
        return turned
    return array


def _set(value: ir.Value, array: np.ndarray, name: str) -> None:
    present = value.const_value
    assert present is not None
    expected = tuple(present.shape.numpy())
    if array.shape != expected:
        raise ConfigurationError(
            f"load_peft: '{name}' has an array of shape {list(array.shape)} for '{value.name}' of shape {list(expected)}: the "
            "adapters are for a model of other extents"
        )
    set_initializer(value, array)
