"""Adapter files without a configuration: LoRA and LoHa of kohya's scripts, LyCORIS and diffusers.

Sources of names and layouts: kohya-ss ``networks/lora.py`` (``lora_unet_...lora_down.weight``, ``.alpha``), LyCORIS 3
``modules/loha.py`` and ``modules/locon.py``, diffusers 0.35 ``loaders/lora_conversion_utils.py`` and ``lora_base.py``
(``unet.<module>.lora_A.weight``, ``<module>.processor.to_q_lora.down.weight``, ``<module>.lora_linear_layer.down.weight``). One
file may hold adapters of several models, such as a denoiser and its text encoders.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from burnish.adapters.peft_format import PREFIX, PeftAdapters, alpha_of, check_alphas, check_arrays
from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.state_file import read_state_file
from burnish.untrusted_files import UNREADABLE, read_json

NOTES = "lora_adapter_metadata"
"""Header entry with PEFT settings, written by diffusers."""
LARGEST_RANK = 4096
_KOHYA = re.compile(r"(?P<component>lora_(?:prior_)?[a-z]+\d*|lycoris)_(?P<module>[^.]+)\.(?P<part>.+)")
_COMPONENT = re.compile(r"(?P<component>unet|transformer(?:_\d)?|text_encoder(?:_\d)?|prior|diffusion_model)\.(?P<module>.+)")
_PARTS = {
    "A": r"lora_A(\.default)?(\.weight)?|lora_down\.weight|lora(_linear_layer)?\.down\.weight|down\.weight",
    "B": r"lora_B(\.default)?(\.weight)?|lora_up\.weight|lora(_linear_layer)?\.up\.weight|up\.weight",
    "alpha": r"(lora_)?alpha|lora(_linear_layer)?\.alpha",
    "magnitude": r"dora_scale|lora_magnitude_vector(\.default)?(\.weight)?",
    "mid": r"lora_mid\.weight",
    **{name: f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
}
_SUFFIX = re.compile("|".join(f"(?P<{part}>{pattern})" for part, pattern in _PARTS.items()))
_TEXT_PROJECTIONS = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
_RESNET = {
    "in_layers_0": "norm1",
    "in_layers_2": "conv1",
    "emb_layers_1": "time_emb_proj",
    "out_layers_0": "norm2",
    "out_layers_3": "conv2",
    "skip_connection": "conv_shortcut",
}
_OUTSIDE = {
    "input_blocks_0_0": "conv_in",
    "time_embed_0": "time_embedding_linear_1",
    "time_embed_2": "time_embedding_linear_2",
    "label_emb_0_0": "add_embedding_linear_1",
    "label_emb_0_2": "add_embedding_linear_2",
    "out_2": "conv_out",
}


def read_lora_file(path: Path) -> dict[str, PeftAdapters]:
    """Read an adapter file.

    Args:
        path: the ``.safetensors``.

    Returns:
        Component, such as ``lora_unet``, ``text_encoder`` or an empty name -> its adapters in PEFT's layouts, named as in the
            file (in kohya's with ``_`` for ``.``). A LoHa of rank r becomes the equal LoRA of rank r²; a convolution's core
            (``lora_mid``) is multiplied into A.

    Raises:
        CheckpointError: the file is missing or damaged.
        ConfigurationError: unsupported kinds of adapters.
    """
    arrays, header = read_state_file(path, "file of adapters")
    modules: dict[str, dict[str, dict[str, np.ndarray]]] = defaultdict(lambda: defaultdict(dict))
    for key, array in arrays.items():
        if key.startswith(PREFIX):
            raise ConfigurationError(
                f"'{path}' is the file of weights of PEFT, which does not say their alpha: put its 'adapter_config.json' beside "
                "it, and give the folder"
            )
        component, module, part = _placed(path, key)
        modules[component][module][part] = array
    if not modules:
        raise CheckpointError(f"'{path}' holds no arrays: save the adapters again")
    noted = _notes(path, header)
    return {component: _adapters(path, component, parts, noted) for component, parts in modules.items()}


def name_in_diffusers(module: str) -> str:
    """Return diffusers' name for a U-Net module in kohya's names, which use the original blocks joined by ``_``.

    ``input_blocks_4_1_proj_in`` is ``down_blocks_1_attentions_0_proj_in``; other names are unchanged.
    """
    if module in _OUTSIDE:
        return _OUTSIDE[module]
    if (middle := re.fullmatch(r"middle_block_(\d)_(.+)", module)) is not None:
        place, rest = int(middle[1]), middle[2]
        return f"mid_block_attentions_0_{rest}" if place == 1 else f"mid_block_resnets_{place // 2}_{_RESNET.get(rest, rest)}"
    blocks = re.fullmatch(r"(input|output)_blocks_(\d+)_(\d)_(.+)", module)
    if blocks is None:
        return module
    is_down, number, place, rest = blocks[1] == "input", int(blocks[2]), int(blocks[3]), blocks[4]
    block, layer = divmod(number - is_down, 3)
    side = "down_blocks" if is_down else "up_blocks"
    if rest in ("op", "conv"):
        return f"{side}_{block}_{'down' if is_down else 'up'}samplers_0_conv"
    kind = "attentions" if place == 1 else "resnets"
    return f"{side}_{block}_{kind}_{layer}_{_RESNET.get(rest, rest)}"


def _placed(path: Path, key: str) -> tuple[str, str, str]:
    component, name = "", key
    if (kohya := _KOHYA.fullmatch(key)) is not None:
        component, name = kohya["component"], f"{kohya['module']}.{kohya['part']}"
    elif (prefixed := _COMPONENT.fullmatch(key)) is not None:
        component, name = prefixed["component"], prefixed["module"]
    for cut in (place for place, character in enumerate(name) if character == "."):
        module, matched = name[:cut], _SUFFIX.fullmatch(name, cut + 1)
        is_processor = module.endswith("_lora")
        if matched is not None and (is_processor or not matched[0].startswith(("down.", "up."))):
            part = next(part for part in _PARTS if matched[part] is not None)
            return component, _module_of_processor(module) if is_processor else module, part
    kind = next((kind for kind in ("lokr", "glora", "oft", "diff", "norm", "lora", "hada", "ia3") if kind in name), None)
    raise ConfigurationError(
        f"'{path}': '{key}'{'' if kind is None else f', of the kind {kind!r},'} is no part of a LoRA or LoHa that burnish has: "
        "merge it into the weights before the model is exported, or train a LoRA"
    )


def _module_of_processor(name: str) -> str:
    """Return the module of a diffusers attention processor: ``attn1.processor.to_out_lora`` becomes ``attn1.to_out.0``."""
    module, _, projection = name.removesuffix("_lora").rpartition(".")
    module = module.removesuffix(".processor")
    if module.endswith("self_attn"):
        return f"{module}.{_TEXT_PROJECTIONS.get(projection, projection)}"
    return f"{module}.{projection}.0" if projection == "to_out" else f"{module}.{projection}"


def _notes(path: Path, header: Mapping[str, str]) -> dict[str, object]:
    try:
        notes = read_json(header.get(NOTES, "{}"))
        return dict(notes)
    except UNREADABLE as error:
        raise CheckpointError(f"'{path}' has settings that cannot be read ({error!r}): save the adapters again") from error


def _adapters(
    path: Path, component: str, modules: Mapping[str, Mapping[str, np.ndarray]], noted: Mapping[str, object]
) -> PeftAdapters:
    start = f"{component}." if component else ""
    settings = {name.removeprefix(start): setting for name, setting in noted.items() if name.startswith(start)}
    read: dict[str, dict[str, np.ndarray]] = {}
    alphas: dict[str, float] = {}
    try:
        check_alphas(settings)
    except UNREADABLE as error:
        raise CheckpointError(f"'{path}' has settings that cannot be read ({error}): save the adapters again") from error
    for module, parts in modules.items():
        called = f"{path}' has '{start}{module}"
        read[module], scaling = _lora(called, module, parts, settings)
        alphas[module] = scaling * len(read[module]["A"])
    variant = "dora" if any("magnitude" in parts for parts in read.values()) else "lora"
    check_arrays(path, variant, read)
    return PeftAdapters(variant, read, {}, 0.0, False, (), alphas)


def _lora(
    called: str, module: str, parts: Mapping[str, np.ndarray], settings: Mapping[str, object]
) -> tuple[dict[str, np.ndarray], float]:
    """Return A, B and magnitude of a module, and the factor of ``B A``."""
    alpha = None
    if "alpha" in parts:
        if parts["alpha"].size != 1 or not np.isfinite(float(parts["alpha"].reshape(()))):
            raise CheckpointError(f"'{called}' with an alpha that is no number: save the adapters again")
        alpha = float(parts["alpha"].reshape(()))
    numbers = {part: np.asarray(array, np.float32) for part, array in parts.items() if part != "alpha"}
    if "w1_a" in numbers:
        rank, arrays = _loha(called, numbers)
    elif {"A", "B"} <= numbers.keys():
        rank, arrays = len(numbers["A"]), {"A": numbers["A"], "B": numbers["B"]}
        if "mid" in numbers:
            core, down = numbers["mid"], numbers["A"]
            rank = core.shape[1]
            if down.ndim < 2 or down.size != down.shape[0] * down.shape[1] or down.shape[0] != rank:
                raise CheckpointError(f"'{called}' with a core that does not fit its A: save the adapters again")
            arrays["A"] = np.moveaxis(np.tensordot(core, down.reshape(down.shape[:2]), axes=([1], [0])), -1, 1)
    else:
        raise CheckpointError(f"'{called}' with {', '.join(sorted(parts))} alone: save the adapters again")
    if "magnitude" in numbers:
        magnitude = numbers["magnitude"]
        if magnitude.shape[:1] != (magnitude.size,) or magnitude.size != len(arrays["B"]):
            raise ConfigurationError(
                f"'{called}' with a DoRA over its inputs (dora_scale of shape {list(magnitude.shape)}), and burnish has it over "
                "outputs: train it with wd_on_output"
            )
        arrays["magnitude"] = magnitude.reshape(-1)
    if not rank:
        raise CheckpointError(f"'{called}' of rank 0, which is no adapter: save the adapters again")
    alpha = alpha_of(settings, module, rank) if alpha is None else alpha
    return arrays, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _loha(called: str, parts: Mapping[str, np.ndarray]) -> tuple[int, dict[str, np.ndarray]]:
    """Return the rank of a LoHa, and A and B of the equal LoRA."""
    if not {"w1_a", "w1_b", "w2_a", "w2_b"} <= parts.keys() or ("t1" in parts) != ("t2" in parts):
        raise CheckpointError(f"'{called}' with {', '.join(sorted(parts))} of a LoHa alone: save the adapters again")
    rank = len(parts["w1_b"])
    try:
        if "t1" in parts:
            whole = 1.0
            for number in "12":
                names = (f"t{number}", f"w{number}_a", f"w{number}_b")
                core, outputs, inputs = (parts[name].astype(np.float64) for name in names)
                whole = whole * np.einsum("ij...,jr,ip->pr...", core, inputs, outputs)
            return rank, _whole_as_product(np.asarray(whole))
        lefts, rights = (parts["w1_a"], parts["w2_a"]), (parts["w1_b"], parts["w2_b"])
        count = len(rights[0]) * len(rights[1])
        if count > min(len(lefts[0]), rights[0].shape[1], LARGEST_RANK):
            first, second = (left.astype(np.float64) @ right for left, right in zip(lefts, rights, strict=True))
            return rank, _whole_as_product(first * second)
        b = np.einsum("oi,oj->oij", *lefts).reshape(len(lefts[0]), count)
        a = np.einsum("in,jn->ijn", *rights).reshape(count, rights[0].shape[1])
    except ValueError as error:
        raise CheckpointError(f"'{called}' with parts of a LoHa that do not fit ({error}): save the adapters again") from error
    return rank, {"A": a, "B": b}


def _whole_as_product(whole: np.ndarray) -> dict[str, np.ndarray]:
    """Return a whole weight [outputs, inputs, ...] as A and B, one of them the identity."""
    flat = whole.reshape(len(whole), -1).astype(np.float32)
    outputs, inputs = flat.shape
    if outputs <= inputs:
        return {"A": flat.reshape(whole.shape), "B": np.eye(outputs, dtype=np.float32)}
    return {"A": np.eye(inputs, dtype=np.float32).reshape(inputs, *whole.shape[1:]), "B": flat}
