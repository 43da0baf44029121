"""Adapters of ``q_proj``, ``k_proj`` and ``v_proj`` for a model that packs these into ``qkv_proj``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from burnish.adapters.layers import Layer
from burnish.adapters.peft_format import PeftAdapters
from burnish.errors import ConfigurationError

_PROJECTION = re.compile(r"(?P<around>(?:.*[._])?)(?P<part>[qkv])_proj")
_PARTS = "qkv"
"""Order of the packed outputs in ONNX Runtime's builder."""


def with_packed_projections(held: PeftAdapters, layers_of: Callable[[str], Sequence[Layer]]) -> PeftAdapters:
    """Return adapters with those of packed projections combined into one for their layer.

    Its A is the concatenation of theirs, and B is block-diagonal, so each output gets its own adapter's term; outputs without an
    adapter get zero. Keys and values have equally many outputs.

    Args:
        held: the adapters.
        layers_of: returns the layers of the model that may be a module.

    Raises:
        ConfigurationError: the adapters are not LoRA, or their outputs do not fit the layer.
    """
    packed: dict[str, dict[str, str]] = defaultdict(dict)
    for module in held.modules:
        found = _PROJECTION.fullmatch(module)
        if found is not None and module not in held.tables and not layers_of(module):
            packed[f"{found['around']}qkv_proj"][found["part"]] = module
    modules, alphas = dict(held.modules), dict(held.alphas)
    for whole, projections in packed.items():
        layers = layers_of(whole)
        if whole in held.modules or len({layer.name for layer in layers}) != 1 or layers[0].node.op_type == "Conv":
            continue
        modules[whole], alphas[whole] = _together(held, projections, layers[0])
        for module in projections.values():
            del modules[module], alphas[module]
    return replace(held, modules=modules, alphas=alphas)


def _together(held: PeftAdapters, projections: Mapping[str, str], layer: Layer) -> tuple[dict[str, np.ndarray], float]:
    first = next(iter(projections.values()))
    if held.variant != "lora":
        raise ConfigurationError(
            f"load_peft: the model has the module '{first}' packed with others in the layer '{layer.name}', and of adapters "
            f"those of LoRA alone are put together for it, which '{held.variant}' is not: merge them into the weights in PEFT, "
            "and build the model of these"
        )
    arrays = {part: held.modules[projections[part]] for part in _PARTS if part in projections}
    outputs = {part: len(each["B"]) for part, each in arrays.items()}
    begins = _begins(outputs, layer.outputs)
    if begins is None:
        listed = ", ".join(f"'{projections[part]}' has {count}" for part, count in outputs.items())
        raise ConfigurationError(
            f"load_peft: the model has the module '{first}' packed with others in the layer '{layer.name}' of {layer.outputs} "
            f"outputs, which those of the adapters do not make up ({listed}): the adapters are for a model of other extents"
        )
    ranks = {part: len(each["A"]) for part, each in arrays.items()}
    rank = sum(ranks.values())

    def divisor(rank: int) -> float:
        return float(np.sqrt(rank)) if held.rslora else float(rank)

    scales = {part: held.alphas[projections[part]] / divisor(ranks[part]) for part in arrays}
    scale = next(iter(scales.values())) or 1.0
    b, column = np.zeros((layer.outputs, rank), np.float32), 0
    for part, each in arrays.items():
        rows = slice(begins[part], begins[part] + outputs[part])
        b[rows, column : column + ranks[part]] = each["B"] * np.float32(scales[part] / scale)
        column += ranks[part]
    return {"A": np.concatenate([each["A"] for each in arrays.values()]), "B": b}, scale * divisor(rank)


def _begins(outputs: Mapping[str, int], whole: int) -> dict[str, int] | None:
    counts = dict(outputs)
    for one, other in ("kv", "vk"):
        if one not in counts and other in counts:
            counts[one] = counts[other]
    left = whole - sum(counts.values())
    missing = [part for part in _PARTS if part not in counts]  # queries, or both keys and values
    if left < 0 or (not missing and left) or (missing and (left == 0 or left % len(missing))):
        return None
    counts |= {part: left // len(missing) for part in missing}
    return {"q": 0, "k": counts["q"], "v": counts["q"] + counts["k"]}
