"""Hugging Face PEFT's format: ``adapter_model.safetensors`` and ``adapter_config.json`` in a folder.

Source of names and layouts: ``peft`` 0.21, ``tuners/lora`` and ``tuners/ia3``, ``utils/save_and_load.py``. Pickled weights
(``adapter_model.bin``) are not read.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.adapters.graph import Adapters, read_adapters
from burnish.adapters.variants import VARIANTS, Adapter, name_in_peft
from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.file_writing import replacing
from burnish.files.state_file import FOR_OTHERS, read_state_file, write_state_file
from burnish.graph import attribute_value, constant_array
from burnish.graph.names import name_in_hugging_face, noted_module
from burnish.untrusted_files import UNREADABLE, read_json_file

WEIGHTS, CONFIGURATION = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
PARTS = {suffix: part for variant in VARIANTS.values() for suffix, part in variant.peft_parts.items()}
"""Suffix of a module's name -> part of an adapter."""
BASE = ".base_layer."
"""Separator between an adapted module and its own parameter: a trained bias, or its weight."""
FURTHER_PARTS = ("lora_", "ia3_", "trainable_tokens")
"""Markers of unsupported adapter parts."""
CHANGES_OF_THE_BASE = ("pissa", "corda", "olora", "loftq")
"""Initializations (``init_lora_weights``) for which PEFT also changes the base weights on loading."""
OTHER_PRODUCTS = (
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
    *("layer_replication", "target_parameters"),
)
"""Settings with which PEFT computes something other than ``x W + s (x A) B`` for every row of x."""
LARGEST_CONFIGURATION = 1 << 20
MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
"""Path of a PyTorch module."""


Names = Mapping[str, str] | Callable[[str], str] | None
"""PyTorch names of layers and initializers; None if they are the same as in the model."""


def called(name: str, names: Names) -> str:
    """Return the PyTorch name of a layer or initializer."""
    if names is None:
        return name
    return names.get(name, name) if isinstance(names, Mapping) else names(name)


def _module(adapter: Adapter, names: Names) -> str:
    """Return the PyTorch module of an adapter's layer; for files of ONNX Runtime's builder in Hugging Face's names."""
    is_built = names is None and ".MatMul." in adapter.weight
    return name_in_hugging_face(adapter.layer) if is_built else called(adapter.layer, names)


def _parameter(adapters: Adapters, name: str, names: Names) -> str:
    """Return the PyTorch name of an initializer that is trained with the adapters."""
    found = called(name, names)
    return called(adapters.names[name], names) if found == name and name in adapters.names else found


QUICK_PATTERN = re.compile(r"[\w.^$\\|*()-]+")
MOST_STARS = 3
"""Limit on regular expressions in untrusted files, since some take exponential time."""


@dataclass(frozen=True)
class PeftAdapters:
    """Contents of a PEFT folder.

    Attributes:
        variant: ``lora``, ``dora`` or ``ia3``.
        modules: arrays of each adapted module, part -> array in PEFT's layout.
        others: other trained parameters by name in the PyTorch model, in its layout.
        dropout, rslora: see ``burnish.surgery.lora``.
        feedforward: modules whose inputs ia3 scales.
        alphas: alpha of each module; empty for ia3.
        tables: modules that are embeddings.
        bases: base weights of adapted modules, if the file has them; they are not trained.
    """

    variant: str
    modules: Mapping[str, Mapping[str, np.ndarray]]
    others: Mapping[str, np.ndarray]
    dropout: float
    rslora: bool
    feedforward: tuple[str, ...]
    alphas: Mapping[str, float]
    tables: frozenset[str] = frozenset()
    bases: Mapping[str, np.ndarray] = field(default_factory=dict)


def alpha_of(settings: Mapping[str, Any], module: str, default: float) -> float:
    """Return a module's alpha from PEFT settings, after ``check_alphas``."""
    patterns = settings.get("alpha_pattern") or {}
    own = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
    return float(next(own, settings.get("lora_alpha", default)))


def write_peft(model: ir.Model, folder: Path, names: Names = None) -> Path:
    """Write the adapters of a model into a folder for ``peft.PeftModel.from_pretrained``.

    Args:
        model: model with adapters as initializers, named in its metadata.
        folder: folder to write, created if missing; existing files are replaced.
        names: layer -> PyTorch module, or a function, if names differ; also for other trained initializers.

    Returns:
        The folder.

    Raises:
        ConfigurationError: PEFT does not support the adapters, or a layer has no module name.
        CheckpointError: a file cannot be written.
    """
    check_names(model.metadata_props, names)
    adapters = read_adapters(model.metadata_props)
    arrays: dict[str, np.ndarray] = {}
    modules: dict[str, Adapter] = {}
    trained: dict[str, set[str]] = {}
    for adapter in adapters.adapters:
        module = _module(adapter, names)
        _check_convolution(adapter, module, model)
        modules[module] = adapter
        for part, name in adapter.parameters.items():
            array = constant_array(model.graph.initializers[name])
            assert array is not None
            arrays[f"{PREFIX}{module}.{name_in_peft(VARIANTS[adapter.variant], part, adapter.operator)}"] = in_layout_of_peft(
                adapter, part, array
            )
    for name in adapters.also_trained:
        value = model.graph.initializers[name]
        array = constant_array(value)
        assert array is not None
        module, _, part = _parameter(adapters, name, names).rpartition(".")
        key = f"{module}{BASE}{part}" if module in modules else f"{module}.{part}"
        arrays[PREFIX + key] = np.ascontiguousarray(array.T) if is_turned(value) else array
        trained.setdefault(module, set()).add(part)
    saved = {module for module, parts in trained.items() if module not in modules and parts != {"bias"}}
    biases = {module for module, parts in trained.items() if "bias" in parts} - saved
    bias = "none" if not biases else "lora_only" if biases <= modules.keys() else "all"
    configuration = _configuration(modules, sorted(saved), bias)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_state_file(folder / WEIGHTS, arrays, FOR_OTHERS)
        with replacing(folder / CONFIGURATION) as partial:
            partial.write_text(json.dumps(configuration, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"'{folder}' cannot be written: {error}. Choose a folder you can write to") from error
    return folder


def read_peft(folder: str | Path) -> PeftAdapters:
    """Read a PEFT folder.

    Args:
        folder: the folder.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigurationError: adapters other than LoRA, DoRA and (IA)³, or with unsupported parts.
    """
    folder = Path(folder)
    configuration = _read_configuration(folder / CONFIGURATION)
    if not (folder / WEIGHTS).is_file() and (folder / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"'{folder}' has its weights in 'adapter_model.bin', which is pickled and not read: save them in PEFT with "
            "safe_serialization=True"
        )
    arrays, _ = read_state_file(folder / WEIGHTS, "file of PEFT")
    kind = _kind_of(folder, configuration)
    modules: dict[str, dict[str, np.ndarray]] = {}
    others: dict[str, np.ndarray] = {}
    bases: dict[str, np.ndarray] = {}
    tables: set[str] = set()
    for key, array in arrays.items():
        name = key.removeprefix(PREFIX)
        suffix = next((suffix for suffix in PARTS if name.endswith(f".{suffix}")), None)
        if suffix is not None:
            module = name[: -len(suffix) - 1]
            modules.setdefault(module, {})[PARTS[suffix]] = array
            if "embedding" in suffix:
                tables.add(module)
        elif any(part in name for part in FURTHER_PARTS):
            raise ConfigurationError(f"'{folder}': '{key}' is a part of an adapter that burnish does not have: train without it")
        elif name.endswith(f"{BASE}weight"):
            bases[name.removesuffix(f"{BASE}weight")] = array
        else:
            others[name.replace(BASE, ".")] = array
    try:
        variant = next(
            name
            for name, one in VARIANTS.items()
            if one.peft_type == kind and all(bool(configuration.get(flag)) == value for flag, value in one.peft_flags.items())
        )
        if kind == "LORA":
            float(configuration["lora_alpha"])
        check_alphas(configuration)
        feedforward = configuration.get("feedforward_modules") or ()
        names = (feedforward,) if isinstance(feedforward, str) else tuple(map(str, feedforward))
        dropout, rslora = float(configuration.get("lora_dropout") or 0), bool(configuration.get("use_rslora"))
        if not 0 <= dropout < 1:
            raise ValueError(f"lora_dropout is {dropout}, and no share of at least 0 and below 1")
    except UNREADABLE as error:
        raise _damaged(folder / CONFIGURATION, error) from error
    check_arrays(folder / WEIGHTS, variant, modules)
    feeding = _matching(modules, names)
    alphas = {module: alpha_of(configuration, module, 0.0) for module in modules} if kind == "LORA" else {}
    return PeftAdapters(variant, modules, others, dropout, rslora, feeding, alphas, frozenset(tables), bases)


def check_arrays(path: Path, variant: str, modules: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Raise CheckpointError unless each module of a file has the arrays of a variant."""
    wanted = set(VARIANTS[variant].parts)
    for module, parts in modules.items():
        if set(parts) != wanted:
            raise CheckpointError(
                f"'{path}' has {', '.join(sorted(parts))} of the module '{module}', and a {variant} has "
                f"{', '.join(sorted(wanted))}: save the adapter again"
            )
        for part, array in parts.items():
            if not array.ndim or not array.size or array.dtype.kind in "biuc":
                raise CheckpointError(
                    f"'{path}' has {part} of the module '{module}' as {array.dtype} of shape {list(array.shape)}, which is no "
                    "adapter: save it again"
                )


def _kind_of(folder: Path, configuration: Mapping[str, Any]) -> str:
    """Return ``LORA`` or ``IA3``.

    Raises:
        ConfigurationError: another kind of adapter, or settings that change its computation.
    """
    kind = configuration.get("peft_type")
    if kind not in {variant.peft_type for variant in VARIANTS.values()}:
        raise ConfigurationError(f"'{folder}' holds adapters of the kind {kind!r}, and burnish has LORA, with DoRA, and IA3")
    begun = str(configuration.get("init_lora_weights")).lower()
    if begun.startswith(CHANGES_OF_THE_BASE):
        raise ConfigurationError(
            f"'{folder}': its adapters began by init_lora_weights='{begun}', which takes something off the weights that they "
            "stand beside: save them in PEFT for the weights as they were, "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    other = next((name for name in OTHER_PRODUCTS if configuration.get(name)), None)
    if other is not None:
        raise ConfigurationError(
            f"'{folder}': its adapters are of the kind that '{other}' makes, which burnish does not have: train them without it"
        )
    return str(kind)


def in_layout_of_peft(adapter: Adapter, part: str, array: np.ndarray) -> np.ndarray:
    """Return a parameter in PEFT's layout."""
    if adapter.operator == "Conv":
        return array.reshape(1, -1, *(1 for _ in range(adapter.spatial))) if part in ("magnitude", "scale") else array
    if part == "scale":
        return array.reshape(1, -1) if adapter.feedforward else array.reshape(-1, 1)
    return np.ascontiguousarray(array.T) if part in "AB" else array


def from_layout_of_peft(operator: str, part: str, array: np.ndarray) -> np.ndarray:
    """Return a parameter from PEFT's layout in burnish's."""
    if part in ("magnitude", "scale"):
        return array.reshape(-1)
    return array if operator == "Conv" else np.ascontiguousarray(array.T)


def is_turned(value: ir.Value) -> bool:
    """True if an initializer is a matrix [inputs, outputs] for a product; PyTorch's ``Linear`` has [outputs, inputs].

    It is False if the exporter's metadata names the weight as that of the product's own module, which then has this layout in
    PyTorch, too (such as ``Conv1D`` of GPT-2).
    """

    def reads_turned(node: ir.Node, place: int) -> bool:
        is_product = node.op_type == "MatMul" or (node.op_type == "Gemm" and not attribute_value(node, "transB", 0))
        return is_product and node.domain == "" and place == 1 and value.name != f"{noted_module(node)}.weight"

    uses = value.uses()
    return value.shape is not None and len(value.shape) == 2 and bool(uses) and all(reads_turned(*use) for use in uses)


def check_names(metadata: Mapping[str, str], names: Names = None) -> None:
    """Raise ConfigurationError if PEFT does not support a model's adapters, or a name is not a PyTorch module's."""
    adapters = read_adapters(metadata)
    layers: dict[str, str] = {}
    for adapter in adapters.adapters:
        module = _module(adapter, names)
        if not MODULE.fullmatch(module):
            raise ConfigurationError(
                f"peft: the layer '{module}' has no name of a PyTorch module: say which it is, "
                f"names={{'{module}': 'encoder.query'}}"
            )
        if adapter.operator == "Gather" and not VARIANTS[adapter.variant].has_rank:
            raise ConfigurationError(
                f"peft: PEFT has no {adapter.variant} of an embedding, as '{module}' is: leave it out of the patterns"
            )
        if layers.setdefault(module, adapter.layer) != adapter.layer:
            raise ConfigurationError(
                f"peft: names calls both '{layers[module]}' and '{adapter.layer}' '{module}', and a module has one adapter: call "
                "them otherwise"
            )
    for name in adapters.also_trained:
        parameter = _parameter(adapters, name, names)
        if not MODULE.fullmatch(parameter) or "." not in parameter:
            raise ConfigurationError(
                f"peft: the initializer '{name}', which is trained too, has no name of a parameter in a PyTorch module: say "
                f"which it is, names={{'{name}': 'classifier.weight'}}"
            )


def _check_convolution(adapter: Adapter, module: str, model: ir.Model) -> None:
    product = next(value for node in model.graph.all_nodes() for value in node.outputs if value.name == adapter.product)
    node = product.producer()
    if node is None or adapter.operator != "Conv" or not VARIANTS[adapter.variant].has_rank:
        return
    grouped, dilated = (node.attributes.get(name) for name in ("group", "dilations"))
    if grouped is not None and grouped.as_int() != 1:
        raise ConfigurationError(
            f"peft: '{module}' is a convolution in groups, of which each has an A of its own here, and all have one in PEFT: "
            "leave it out of the patterns"
        )
    if dilated is not None and set(dilated.as_ints()) != {1}:
        raise ConfigurationError(f"peft: '{module}' is a dilated convolution, for which PEFT has no adapter: leave it out")


def _configuration(modules: Mapping[str, Adapter], saved: Iterable[str], bias: str) -> dict[str, Any]:
    variants = {adapter.variant for adapter in modules.values()}
    shared = {(adapter.dropout, adapter.rslora) for adapter in modules.values()}
    if len(variants) > 1 or len(shared) > 1:
        raise ConfigurationError(
            "peft: one folder holds adapters of one variant, dropout and rslora, and the model has several: write them from "
            "models with one each"
        )
    common = {
        "target_modules": sorted(modules),
        "modules_to_save": list(saved) or None,
        "inference_mode": True,
        "task_type": None,
    }
    common |= {"base_model_name_or_path": None, "revision": None}
    variant = VARIANTS[variants.pop()]
    if not variant.has_rank:
        feedforward = sorted(module for module, adapter in modules.items() if adapter.feedforward)
        return {**common, "peft_type": variant.peft_type, "feedforward_modules": feedforward, "fan_in_fan_out": False}
    ranks = Counter(adapter.rank for adapter in modules.values())
    alphas = Counter(adapter.alpha for adapter in modules.values())
    rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
    first = next(iter(modules.values()))
    return {
        **common,
        "peft_type": variant.peft_type,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "rank_pattern": {module: adapter.rank for module, adapter in modules.items() if adapter.rank != rank},
        "alpha_pattern": {module: _whole(adapter.alpha) for module, adapter in modules.items() if adapter.alpha != alpha},
        "lora_dropout": first.dropout,
        "use_rslora": first.rslora,
        **variant.peft_flags,
        "bias": bias,
        "fan_in_fan_out": False,
    }


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def check_alphas(settings: Mapping[str, Any]) -> None:
    """Raise an error for non-finite alphas, and for patterns that are not regular expressions or could be slow."""
    patterns = dict(settings.get("alpha_pattern") or {})
    for alpha in (settings.get("lora_alpha") or 0, *patterns.values()):
        if not math.isfinite(float(alpha)):
            raise ValueError(f"an alpha is {alpha}")
    for pattern in patterns:
        if not QUICK_PATTERN.fullmatch(pattern) or pattern.count("*") > MOST_STARS or ")*" in pattern:
            raise ConfigurationError(
                f"peft: alpha_pattern has the regular expression {pattern!r}: write the names of modules, or patterns of names, "
                "points, bars and up to three '.*'"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigurationError(
                f"peft: alpha_pattern has {pattern!r}, which is no regular expression ({error}): write the names of modules"
            ) from error


def _read_configuration(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json_file(path, LARGEST_CONFIGURATION))
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no '{path}': give a folder that save_pretrained of PEFT, or burnish, wrote") from error
    except UNREADABLE as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"'{path}' cannot be read ({error!r}): save the adapter again")


def _matching(modules: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that equal or end in one of the names, by PEFT's rule."""
    wanted = tuple(names)
    return tuple(module for module in modules if any(module == name or module.endswith(f".{name}") for name in wanted))
