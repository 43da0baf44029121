"""Reading of adapters from PEFT, diffusers and kohya files, and writing for PEFT.

Names of layers in the model may differ from modules in the file.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish.adapters.exports import check_form, save_with_adapters
from burnish.adapters.graph import read_adapters
from burnish.adapters.integer_products import write_integer_products
from burnish.adapters.layers import Layer, find_layers
from burnish.adapters.lora import adapted, matching_weights
from burnish.adapters.lora_files import name_in_diffusers, read_lora_file
from burnish.adapters.merge_adapters import merge_adapters as merged
from burnish.adapters.packed_projections import with_packed_projections
from burnish.adapters.peft_format import (
    CONFIGURATION,
    WEIGHTS,
    Names,
    PeftAdapters,
    called,
    from_layout_of_peft,
    is_turned,
    read_peft,
)
from burnish.adapters.variants import VARIANTS
from burnish.errors import CarryOverWarning, ConfigurationError
from burnish.graph import FLOATING, add_initializer
from burnish.graph import Names as FreeNames
from burnish.graph.constants import set_initializer
from burnish.graph.names import is_called_after_another, other_names
from burnish.graph.uses import remove_unread
from burnish.importer import Source, load
from burnish.settings import suggestion
from burnish.warn import warn


def load_peft(
    source: Source,
    folder: str | os.PathLike[str],
    names: Names = None,
    *,
    component: str | None = None,
    also_trained: str | Sequence[str] = (),
) -> ir.Model:
    """Return a model with adapters from a PEFT folder, or a diffusers or kohya file, to predict, train or merge.

    Args:
        source: the base model: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        folder: a folder with ``adapter_model.safetensors`` and ``adapter_config.json`` (LoRA, DoRA or (IA)³), or a
            ``.safetensors`` of LoRA, DoRA or LoHa from diffusers, kohya's scripts or LyCORIS, with alpha equal to the rank by
            default.
        names: layer of the model -> PyTorch module, or a function, if names differ; also for other trained initializers
            (``modules_to_save``). By default a layer matches the module of its name, or the only one such that one name ends in
            the other, since exporters often wrap modules. Suffixes of builders (``.MatMul``) are ignored, and ``attn`` equals
            ``self_attn``. LoRA of ``q_proj``, ``k_proj`` and ``v_proj`` is combined for a packed ``qkv_proj``.
        component: component of the file, such as ``lora_unet`` or ``text_encoder``; by default the only one that fits the model,
            with a warning that names the others.
        also_trained: names or patterns of further initializers to train.

    Returns:
        A canonical model.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigurationError: the model lacks a layer or its extents differ, the kind of adapter is unsupported, or several or no
            components fit.
        ModelError: invalid ONNX model.
    """
    path, model = Path(folder), load(source)
    held_by_component = _read(path)

    def chosen_in(model: ir.Model) -> tuple[PeftAdapters, PeftAdapters, dict[Layer, str]]:
        layers, _ = find_layers(model.graph)
        read = _component(path, held_by_component, component, names, layers)
        held = with_packed_projections(read, lambda module: _found(module, names, layers, read))
        return read, held, {layer: module for module in held.modules for layer in _layers_of(module, names, layers, held)}

    write_integer_products(model, lambda trial: (layer.node.outputs[0].name or "" for layer in chosen_in(trial)[2]))
    read, held, chosen = chosen_in(model)
    _warn_of_others(path, read, held_by_component, component)
    _warn_of_packed(path, read, held)
    _set_bases(held, chosen)
    _untie(model, names, held)
    others = {_initializer_of(name, names, model): array for name, array in held.others.items()}
    options = {layer: _options(held, module) for layer, module in chosen.items()}
    present = set(model.graph.initializers)
    model = adapted(model, options, tuple(dict.fromkeys((*others, *matching_weights(model, also_trained)))))
    by_name = {layer.name: module for layer, module in chosen.items()}
    for adapter in read_adapters(model.metadata_props).adapters:
        module = by_name.get(adapter.layer)
        if module is None:
            continue
        for part, name in adapter.parameters.items():
            if name not in present:
                value = model.graph.initializers[name]
                array = _in_shape_of(value, adapter.operator, held.modules[module][part])
                _set(value, from_layout_of_peft(adapter.operator, part, array), module)
    for name, array in others.items():
        value = model.graph.initializers[name]
        _set(value, _as_read(value, array), name)
    return model


def save_peft(source: Source, folder: str | os.PathLike[str], names: Names = None) -> Path:
    """Write the adapters of a model for PEFT: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Args:
        source: a model with adapters, from ``lora`` or ``Session.export(..., adapters="kept")``.
        folder: folder to write; created if missing.
        names: layer of the model -> PyTorch module, or a function, if names differ; also for other trained initializers.

    Returns:
        The folder.

    Raises:
        ConfigurationError: the model has no adapters, PEFT does not support them, or a layer has no module name.
        CheckpointError: a file cannot be written.
        ModelError: invalid ONNX model.
    """
    model = load(source)
    check_form("peft", model.metadata_props)
    return save_with_adapters(model, Path(folder), "peft", names)


def merge_adapters(source: Source) -> ir.Model:
    """Return a model with each adapter merged into its weight; unchanged without adapters.

    A merged weight keeps name and layout. If the weight has other readers or is quantized, the merged one is the floating-point
    ``<layer>.merged_weight``.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.

    Returns:
        A canonical model.

    Raises:
        ModelError: invalid ONNX model, or an adapter was changed.
        CheckpointError: a merged weight is not finite.
    """
    model = load(source)
    merged(model)
    return model


def _read(path: Path) -> dict[str, PeftAdapters]:
    if path.is_dir() or path.suffix != ".safetensors":
        return {"": read_peft(path)}
    if path.name == WEIGHTS and (path.parent / CONFIGURATION).is_file():
        return {"": read_peft(path.parent)}
    return read_lora_file(path)


def _component(
    path: Path, held: Mapping[str, PeftAdapters], component: str | None, names: Names, layers: Sequence[Layer]
) -> PeftAdapters:
    if component is not None:
        if component not in held:
            listed = ", ".join(f"'{name}'" for name in held)
            raise ConfigurationError(
                f"load_peft: component={component!r}{suggestion(str(component), held)}: '{path}' holds {listed or 'none'}"
            )
        return held[component]
    if len(held) == 1:
        return next(iter(held.values()))
    found = {name: sum(_fits(module, names, layers, own) for module in own.modules) for name, own in held.items()}
    whole = [name for name, count in found.items() if count == len(held[name].modules)]
    some = whole or [name for name, count in found.items() if count]
    if len(some) != 1:
        which = some or list(held)
        raise ConfigurationError(
            f"load_peft: '{path}' holds adapters of {' and '.join(repr(name) for name in which)}, and "
            f"{'each could be' if some else 'none is'} for this model: say which, component='{which[0]}'"
        )
    return held[some[0]]


def _fits(module: str, names: Names, layers: Sequence[Layer], held: PeftAdapters) -> bool:
    """True if exactly one layer of the model matches a module and has its extents."""
    found = _found(module, names, layers, held)
    outputs = len(held.modules[module]["B"])
    return len({layer.name for layer in found}) == 1 and found[0].outputs == outputs


def _warn_of_others(path: Path, held: PeftAdapters, every: Mapping[str, PeftAdapters], component: str | None) -> None:
    left = {name: own for name, own in every.items() if own is not held}
    if component is None and left:
        counts = " and ".join(f"{len(own.modules)} of '{name}'" for name, own in left.items())
        taken = next(name for name, own in every.items() if own is held)
        warning = CarryOverWarning(
            f"load_peft: '{path}' also holds adapters of other models, {counts}, which are left out: load them beside those, and "
            f"say component='{taken}' here",
            dropped=[f"{name}.{module}" for name, own in left.items() for module in own.modules],
        )
        warn(warning)


def _warn_of_packed(path: Path, read: PeftAdapters, held: PeftAdapters) -> None:
    packed = [module for module in held.modules if module not in read.modules]
    if packed:
        more = f" and {len(packed) - 1} like it" if len(packed) > 1 else ""
        warning = CarryOverWarning(
            f"load_peft: the model has q_proj, k_proj and v_proj in one layer, so that their adapters in '{path}' are one beside "
            f"'{packed[0]}'{more}, of the sum of their ranks. It adds what they do; where it is trained on, all of its B trains, "
            "and PEFT's file of it is for a 'qkv_proj'"
        )
        warn(warning)


def _layers_of(module: str, names: Names, layers: Collection[Layer], held: PeftAdapters) -> list[Layer]:
    found = _found(module, names, layers, held)
    if not found or len({layer.name for layer in found}) > 1:
        present = list(dict.fromkeys(layer.name for layer in layers if _is_of_kind(layer, module, held)))
        what = "has no such layer" if not found else f"has several, {', '.join(repr(layer.name) for layer in found[:4])}"
        raise ConfigurationError(
            f"load_peft: the adapters are for the module '{module}', and the model {what}{suggestion(module, present)}: say "
            f"which layer it is, names={{'<layer>': '{module}'}}"
        )
    return found


def _is_of_kind(layer: Layer, module: str, held: PeftAdapters) -> bool:
    return (layer.node.op_type == "Gather") == (module in held.tables)


def _found(module: str, names: Names, layers: Collection[Layer], held: PeftAdapters) -> list[Layer]:
    """Return the candidate layers of a module, by the most reliable kind of name."""
    fitting = [layer for layer in layers if _is_of_kind(layer, module, held)]
    if exact := [layer for layer in fitting if called(layer.name, names) == module]:
        return exact
    for forms in (_own_name, _every_name, _joined_names):
        for wanted in dict.fromkeys((module, name_in_diffusers(module))):
            own = [layer for layer in fitting if wanted in forms(layer)]
            if found := own or [layer for layer in fitting if any(_ends_in(name, wanted) for name in forms(layer))]:
                return found
    return []


def _own_name(layer: Layer) -> Sequence[str]:
    return (layer.name,)


def _every_name(layer: Layer) -> Sequence[str]:
    return layer.names


def _joined_names(layer: Layer) -> Sequence[str]:
    """Return names in kohya's form."""
    return [name.replace(".", "_") for name in layer.names]


def _ends_in(name: str, module: str) -> bool:
    """True if one of two names ends in the other, at a separator."""
    separator = "." if "." in module or "." in name else "_"
    return module.endswith(f"{separator}{name}") or name.endswith(f"{separator}{module}")


def _in_shape_of(value: ir.Value, operator: str, array: np.ndarray) -> np.ndarray:
    """Return a part of an adapter in a layer's rank: a 1 x 1 convolution equals a product."""
    expected = None if value.shape is None else value.shape.numpy()
    if operator == "Conv" and expected is not None and array.ndim != len(expected) and array.size == math.prod(expected):
        return array.reshape(expected)
    if operator != "Conv" and array.ndim > 2 and array.size == array.shape[0] * array.shape[1]:
        return array.reshape(array.shape[:2])
    return array


def _options(held: PeftAdapters, module: str) -> dict[str, object]:
    is_scaled = module in held.feedforward
    common: dict[str, object] = {"variant": held.variant, "feedforward": is_scaled}
    if not VARIANTS[held.variant].has_rank:
        return {**common, "rank": 0, "alpha": 0.0, "dropout": 0.0, "rslora": False}
    rank = len(held.modules[module]["A"])
    return {**common, "rank": rank, "alpha": held.alphas[module], "dropout": held.dropout, "rslora": held.rslora}


def _initializer_of(name: str, names: Names, model: ir.Model) -> str:
    initializers, aliases = model.graph.initializers, other_names(model.graph)
    found = [one for one in initializers if called(one, names) == name]
    found = found or [one for one, others in aliases.items() if name in others]
    found = found or [one for one in initializers if any(_ends_in(each, name) for each in (one, *aliases.get(one, ())))]
    if len(found) != 1:
        known = [each for one in initializers for each in (one, *aliases.get(one, ()))]
        what = "no initializer of this name" if not found else f"several, {', '.join(map(repr, found[:4]))}"
        raise ConfigurationError(
            f"load_peft: the file has the parameter '{name}', and the model {what}{suggestion(name, known)}: say which it is, "
            f"names={{'<initializer>': '{name}'}}"
        )
    return found[0]


def _untie(model: ir.Model, names: Names, held: PeftAdapters) -> None:
    """Untie layers that share a weight, in place, if a file holds the whole weight of one of them.

    PEFT does this with ``modules_to_save``: training a head leaves the embedding unchanged.
    """
    by_source: dict[ir.Value, list[Layer]] = defaultdict(list)
    for layer in find_layers(model.graph)[0] if held.others else ():
        by_source[layer.source].append(layer)
    for sharing in by_source.values():
        if len({layer.name for layer in sharing}) == 1:
            continue
        own = {layer.name for layer in sharing if any(_is_weight_of(layer, names, name) for name in held.others)}
        if not own or (len(own) == len({layer.name for layer in sharing}) and _hold_one(sharing, names, held)):
            continue
        # The layer that the initializer is named after keeps it.
        leaving = [layer for layer in sharing if is_called_after_another(layer.node, layer.source)]
        _give_own_weights(model, leaving or [layer for layer in sharing if layer.name != sharing[0].name])


def _set_bases(held: PeftAdapters, chosen: Mapping[Layer, str]) -> None:
    """Load base weights of adapted layers, in place; PEFT stores those of embeddings and output layers.

    Raises:
        ConfigurationError: layers share one weight, and a file has two.
    """
    given: dict[ir.Value, str] = {}
    for layer, module in chosen.items():
        if module in held.bases and layer.source.dtype in FLOATING:
            other = given.setdefault(layer.source, module)
            if not np.array_equal(held.bases[other], held.bases[module]):
                raise ConfigurationError(
                    f"load_peft: '{other}' and '{module}' share the weight '{layer.source.name}', and the file has one for each: "
                    "export the model with a weight for each"
                )
            _set(layer.source, _as_read(layer.source, held.bases[module]), module)


def _is_weight_of(layer: Layer, names: Names, parameter: str) -> bool:
    whole = f"{called(layer.name, names)}.weight"
    return parameter == whole or _ends_in(whole, parameter)


def _hold_one(sharing: Sequence[Layer], names: Names, held: PeftAdapters) -> bool:
    arrays = [array for name, array in held.others.items() if any(_is_weight_of(layer, names, name) for layer in sharing)]
    return all(np.array_equal(arrays[0], array) for array in arrays[1:])


def _give_own_weights(model: ir.Model, layers: Sequence[Layer]) -> None:
    free = FreeNames.of(model.graph)
    given: dict[str, ir.Value] = {}
    for layer in layers:
        if layer.name not in given:
            array = np.ascontiguousarray(layer.array(model.opset_imports[""]))
            given[layer.name] = add_initializer(model.graph, free.take(f"{layer.name}.weight"), array)
        place = 0 if layer.node.op_type == "Gather" else 1
        layer.node.replace_input_with(place, given[layer.name])
        remove_unread(model.graph, layer.weight.producer())


def _as_read(value: ir.Value, array: np.ndarray) -> np.ndarray:
    """Return a PyTorch parameter in the layout of its initializer; for square ones the model's use decides."""
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
