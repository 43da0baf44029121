"""Language models: causal decoders, their output layer and cache, and a test that no token depends on later ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.adapters.layers import added_bias, find_layers
from burnish.data.text.columns import MASK, TOKENS
from burnish.data.text.dataset import PLACES, SEGMENTS
from burnish.errors import ConfigurationError
from burnish.graph import FLOATING
from burnish.program import Entry, Program
from burnish.program.layout import samples_first
from burnish.surgery.replace_head import BEHIND_HEADS
from burnish.training.run_data import fixed_batch
from burnish.training.session import Session

INTEGER = (ir.DataType.INT64, ir.DataType.INT32)
CACHE = re.compile(r"past|cache", re.IGNORECASE)
"""Names of inputs that hold keys and values of earlier tokens."""
USE_CACHE = "use_cache_branch"
"""The input by which Optimum's merged decoders choose the branch that reads the cache."""
LOGITS = "logits"
TRIED_TOKENS = 12
"""Tokens in the text for the test of causality."""
TOLERANCE, TOLERANCE_OF_INTEGERS = 1e-5, 5e-2
"""Relative change of earlier scores that a later token may cause: rounding, or with quantized activations their common scale."""


@dataclass(frozen=True)
class OutputLayer:
    """The layer that gives a score for each token of the vocabulary. It is kept, like the tokenizer.

    Attributes:
        node: the matrix product; None if none was found.
        weight: its weight, which may also be the embedding table; None if it is not floating point.
        bias: its bias, or None.
        output: name of the model's output.
        tokens: number of tokens that have a score.
    """

    node: ir.Node | None
    weight: ir.Value | None
    bias: ir.Value | None
    output: str
    tokens: int

    @property
    def classes(self) -> int:
        return self.tokens

    @property
    def names(self) -> dict[str, str]:
        """The names of its initializers by role, ``weight`` and ``bias``."""
        values = {"weight": self.weight, "bias": self.bias}
        return {role: value.name or "" for role, value in values.items() if value is not None}

    @property
    def initializers(self) -> tuple[str, ...]:
        return tuple(self.names.values())


def language_output(model: ir.Model, output: str | None) -> OutputLayer | None:
    """Return the output layer of a model that gives a score for each token of the vocabulary at each position.

    Args:
        model: a canonical model.
        output: name of the output that the loss reads; None to find it.

    Returns:
        The layer, or None if the model does not read tokens ``[batch, tokens]`` or has no output ``[batch, tokens, vocabulary]``.
        ``is_causal`` tests if the model is causal.
    """
    rows = _rows_of_tokens(model)
    if rows is None:
        return None
    found = [
        value
        for value in model.graph.outputs
        if value.dtype in FLOATING
        and value.shape is not None
        and len(value.shape) == 3
        and isinstance(tokens := value.shape[2], int)
        and 2 * tokens > rows
        and output in (None, value.name)
    ]
    value = next((each for each in found if each.name == LOGITS), found[0] if len(found) == 1 else None)
    if value is None or value.shape is None:
        return None
    layer = output_layer(model, value.name or "")
    # An encoder as wide as its vocabulary is large gives no scores: it does not end with a layer of that many outputs.
    return layer if layer.node is not None or value.name == LOGITS else None


def output_layer(model: ir.Model, output: str) -> OutputLayer:
    """Return the output layer of a canonical model by the name of its output ``[batch, tokens, vocabulary]``."""
    value = next(each for each in model.graph.outputs if each.name == output)
    assert value.shape is not None
    tokens = value.shape[2]
    assert isinstance(tokens, int)
    layers = {layer.node: layer for layer in find_layers(model.graph)[0]}
    node = value.producer()
    while node is not None and node not in layers and (node.op_type in BEHIND_HEADS or node.op_type == "Add"):
        makers = [maker for read in node.inputs if read is not None and (maker := read.producer()) is not None]
        node = makers[0] if makers else None
    layer = None if node is None else layers.get(node)
    if layer is None or layer.outputs != tokens:
        return OutputLayer(None, None, None, output, tokens)
    weight = layer.source if layer.source.dtype in FLOATING else None
    own = layer.node.inputs[2] if len(layer.node.inputs) > 2 else None
    added = added_bias(layer.node)
    bias = own if own is not None else None if added is None else added[1]
    return OutputLayer(layer.node, weight, bias if bias is not None and bias.is_initializer() else None, output, tokens)


def layers_before(model: ir.Model, layer: OutputLayer) -> list[str] | None:
    """Return the names of the weights of all matrices except the output layer, as for ``burnish.surgery.lora``.

    Returns:
        The names; None if there are none, or if the output layer is not known.
    """
    layers = find_layers(model.graph)[0]
    last = next((each.source for each in layers if each.node is layer.node), None)
    named = [each.source.name or "" for each in layers if each.node.op_type != "Gather" and each.source is not last]
    return list(dict.fromkeys(named)) if last is not None and named else None


def empty_cache(model: ir.Model) -> dict[str, int | bool]:
    """Return the dimensions to bind, as for ``burnish.compile``, so that the cache is empty: the length of the past is 0.

    Args:
        model: a canonical model.

    Returns:
        ``{dimension: 0}``, or an empty dictionary for a model without a cache.
    """
    inputs = {value.name or "": value for value in model.graph.inputs}
    held = {name: value for name, value in inputs.items() if value.dtype in FLOATING and CACHE.search(name)}
    if not held or not any(value.dtype in INTEGER and name not in held for name, value in inputs.items()):
        return {}
    others = {dim for name, value in inputs.items() if name not in held for dim in _open_names(value)}
    bound: dict[str, int | bool] = {}
    for value in held.values():
        own = [dim for dim in _open_names(value) if dim not in others]
        if own:
            bound[next((dim for dim in own if CACHE.search(dim)), own[0])] = 0
    if bound and USE_CACHE in inputs:
        bound[USE_CACHE] = False
    return bound


def is_causal(program: Program, output: str, longest: int) -> bool:
    """Return True if no score depends on later tokens; the model runs on two texts that differ in their later tokens.

    Args:
        program: program of the model.
        output: name of the output ``[batch, tokens, vocabulary]``.
        longest: most tokens that the model takes.

    Raises:
        ConfigurationError: no score depends on any token.
    """
    entries = {entry.name: samples_first(entry) for entry in program.signature.samples}
    tokens = entries.get(TOKENS, next(iter(entries.values())))
    extent = tokens.extents[1]
    length = extent if isinstance(extent, int) else min(TRIED_TOKENS, longest)
    most = TRIED_TOKENS if tokens.maximum is None else int(tokens.maximum) + 1
    generator = np.random.default_rng(0)
    first = generator.integers(0, most, length)
    later = np.arange(length) >= length // 2
    second = np.where(later, (first + 1 + generator.integers(0, max(1, most - 1), length)) % most, first)
    with Session(program) as session:
        one, other = (
            np.asarray(session.predict(_batch(program, entries, tokens.name, ids))[output], np.float64)[0]
            for ids in (first, second)
        )
    changes = np.abs(other - one).max(axis=-1)
    if not changes.any():
        raise ConfigurationError(
            f"finetune: '{output}' does not change with the tokens that the model reads: it learns no language; give another file"
        )
    has_integers = any(node.op_type == "DynamicQuantizeLinear" for node in program.graphs.unlowered("predict").graph)
    tolerance = TOLERANCE_OF_INTEGERS if has_integers else TOLERANCE
    return bool(changes[~later].max(initial=0.0) <= tolerance * np.abs(one).max())


def _batch(program: Program, entries: Mapping[str, Entry], tokens: str, ids: np.ndarray) -> dict[str, np.ndarray]:
    made = {tokens: ids, MASK: np.ones_like(ids), PLACES: np.arange(len(ids)), SEGMENTS: np.zeros_like(ids)}
    count = fixed_batch(program) or 1
    return {name: np.tile(made[name], (count, 1)).astype(entry.numpy_dtype) for name, entry in entries.items() if name in made}


def _rows_of_tokens(model: ir.Model) -> int | None:
    """Number of rows of the table that the tokens index, 0 if none is found; None if the model reads no tokens."""
    inputs = [
        value for value in model.graph.inputs if value.dtype in INTEGER and value.shape is not None and len(value.shape) == 2
    ]
    named = [value for value in inputs if value.name == TOKENS]
    tokens = named[0] if named else inputs[0] if len(inputs) == 1 else None
    if tokens is None:
        return None
    for node, _ in tokens.uses():
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is not None and table.shape is not None and isinstance(rows := table.shape[0], int):
            return rows
    return 0


def _open_names(value: ir.Value) -> list[str]:
    dims = () if value.shape is None else value.shape.dims
    return [dim.value for dim in dims if isinstance(dim, ir.SymbolicDim) and dim.value is not None]
