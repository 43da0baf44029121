"""Unused names in a graph, and the names of layers and weights.

A layer, which users select by name, is named after the module that the exporter recorded for its node, after its weight, or after
the node. A weight shared by two modules has the name of one of them; the other layer is known only by its node. Weights that an
exporter transposed have numbered names (``val_451``, ``onnx::MatMul_768``), and tools that build or quantize models append
suffixes (``down_proj.MatMul``, ``down_proj_Q4``).
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from burnish.graph.uses import origin_of, producer_of
from burnish.settings import matches_pattern


class Names:
    """Set of used names that returns unused ones in constant time, also for many names with one stem.

    Args:
        taken: names in use; None and empty names are ignored.
    """

    def __init__(self, taken: Iterable[str | None] = ()):
        self._taken = {name for name in taken if name}
        self._tried: dict[str, int] = {}

    @classmethod
    def of(cls, graph: ir.Graph) -> Names:
        """Return the names of all values of a graph and its subgraphs."""
        values = [*graph.inputs, *graph.initializers.values()]
        values.extend(output for node in graph.all_nodes() for output in node.outputs)
        for body in graph.subgraphs():
            values.extend((*body.inputs, *body.initializers.values()))
        return cls(value.name for value in values)

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def take(self, wanted: str) -> str:
        """Return and reserve ``wanted``, with the next unused number appended if it is taken."""
        name = wanted
        if name in self._taken:
            number = self._tried.get(wanted, 0)
            while name in self._taken:
                number += 1
                name = f"{wanted}_{number}"
            self._tried[wanted] = number
        self._taken.add(name)
        return name

    def release(self, name: str | None) -> None:
        self._taken.discard(name or "")


GENERATED = re.compile(r"val_\d+")
"""Names that ``onnx_ir`` generates, numbered per graph."""


def separate_names(graph: ir.Graph) -> bool:
    """Rename, in place, values in subgraphs whose names another value of the graph or a subgraph has.

    Nodes emitted into a body are named without regard to the graphs around it and could hide their names. Generated names are
    changed so that they differ from those emitted into the graph later. Returns True if any name changed.
    """
    bodies = list(graph.subgraphs())
    if not bodies:
        return False
    changed, names = False, Names()
    for body in (graph, *bodies):
        for value in (*body.inputs, *body.initializers.values(), *(output for node in body for output in node.outputs)):
            if not value.name:
                continue
            is_generated = body is not graph and GENERATED.fullmatch(value.name)
            name = names.take(f"body_{value.name}" if is_generated else value.name)
            if name != value.name and body is not graph:
                value.name = name
                changed = True
    return changed


SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata key for the modules around a node, outermost first, in PyTorch's newer exporter."""

Aliases = Mapping[str, tuple[str, ...]]
"""Initializer name -> its other names."""

PASSING = frozenset({"Cast", "Identity", "Transpose"})
"""Operators allowed between a weight and its reader."""
_THROUGH = PASSING | {"DequantizeLinear", "Reshape"}
_APPENDED = re.compile(r"(\.MatMul)?(_(quantized|quant|Bnb4|DQ|Q[248](G\d+)?))*$")
_HEAD = re.compile(r"head|out|logit|classif|decoder|predict|score|proj|cls|generator|vocab", re.IGNORECASE)
"""Pattern for the last part of an output layer's name: matches ``embed_out``, not ``embed_tokens``."""
_ATTENTION = re.compile(r"(?<=\.)(\d+)\.attn\.")
_TABLES = ("Gather", "GatherND")
_PARTS: Mapping[str, Mapping[int, str]] = {
    "Add": {0: "bias", 1: "bias"},
    "BatchNormalization": {1: "weight", 2: "bias"},
    "Conv": {1: "weight", 2: "bias"},
    "ConvTranspose": {1: "weight", 2: "bias"},
    "Gather": {0: "weight"},
    "Gemm": {1: "weight", 2: "bias"},
    "GroupNormalization": {1: "weight", 2: "bias"},
    "InstanceNormalization": {1: "weight", 2: "bias"},
    "LayerNormalization": {1: "weight", 2: "bias"},
    "MatMul": {1: "weight"},
    "RMSNormalization": {1: "weight"},
}
"""Operator -> {operand index: parameter name in the PyTorch module}."""


def noted_module(node: ir.Node) -> str | None:
    """Return the module path of a node as recorded by either PyTorch exporter, or None."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    except (ValueError, SyntaxError):
        scopes = []
    if isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str) and scopes[-2]:
        return scopes[-2]
    path = (node.name or "").strip("/").split("/")
    return ".".join(path[:-1]) if (node.name or "").startswith("/") and len(path) > 1 else None


def module_in(name: str) -> str | None:
    """Return the module in an initializer's name: ``encoder.0`` of ``encoder.0.weight``."""
    return name.rsplit(".", 1)[0] if "." in name and "::" not in name else None


def plain_name(name: str) -> str:
    """Return a name without the suffixes of model builders and quantizers."""
    return _APPENDED.sub("", name) or name


def name_in_hugging_face(name: str) -> str:
    """Return the Hugging Face name for a name from ONNX Runtime's builder of language models."""
    return _ATTENTION.sub(r"\1.self_attn.", name)


def layer_name(node: ir.Node, source: ir.Value) -> str:
    """Return the name of a layer.

    Args:
        node: node of the layer.
        source: its weight, an initializer, or an input ``param/<initializer>`` in its place.

    Returns:
        The module in the weight's name. If that names no module, or another module that shares the weight: the module recorded
        for the node, else the name of the node or the weight. For a shared weight without records, the output layer is the
        product, and the embedding the lookup.
    """
    weight = (source.name or "").removeprefix("param/")
    module, noted = module_in(weight), noted_module(node)
    if module is None:
        return noted or node.name or weight
    if not is_called_after_another(node, source):
        return module
    return (noted if noted and not module.startswith(f"{noted}.") and noted != module else node.name) or weight


def is_called_after_another(node: ir.Node, source: ir.Value) -> bool:
    """True if a layer's weight is named after another layer that shares it."""
    module = module_in((source.name or "").removeprefix("param/"))
    others = [reader for reader in _readers(source) if reader is not node]
    if module is None or not others:
        return False
    noted = noted_module(node)
    if noted is not None:
        if plain_name(noted) == plain_name(module):
            return False
        if not module.startswith(f"{noted}.") and any(noted_module(other) == module for other in others):
            return True
    is_table = node.op_type in _TABLES
    if all((other.op_type in _TABLES) == is_table for other in others):
        return False
    return is_table == bool(_HEAD.search(module.rsplit(".", 1)[-1]))


def weight_of(node: ir.Node) -> ir.Value | None:
    """Return the weight that a node reads, before operators such as casts and scaling; None without operands."""
    place = 0 if node.op_type in _TABLES else 1
    value = node.inputs[place] if len(node.inputs) > place else None
    while value is not None and (producer := producer_of(value)) is not None and producer.inputs:
        if producer.op_type not in _THROUGH | {"Mul", "Clip", "QuantizeLinear"}:
            break
        value = producer.inputs[0]
    return value


def further_names(node: ir.Node, source: ir.Value, name: str) -> tuple[str, ...]:
    """Return the other names of a layer: with and without builders' suffixes, in Hugging Face, and of its node.

    Args:
        node: node of the layer.
        source: its weight.
        name: the result of ``layer_name``.
    """
    names = [name, node.name or "", noted_module(node) or ""]
    weight = (source.name or "").removeprefix("param/")
    module = module_in(weight)
    if module is not None and (noted := names[2]) and module.startswith(f"{noted}."):
        names.pop()  # the enclosing module
    if module is None and names[2]:
        names.append(f"{names[2]}.weight")
    if not is_called_after_another(node, source):
        names += [weight, module or ""]
    names += [plain_name(each) for each in names]
    names += [name_in_hugging_face(each) for each in names]
    return tuple(dict.fromkeys(each for each in names if each))


def other_names(graph: ir.Graph) -> dict[str, tuple[str, ...]]:
    """Return additional names of initializers, as parameters of the modules that read them.

    For example ``lm_head.weight`` for a table called ``embed_tokens.weight`` or for ``onnx::MatMul_768``, and
    ``down_proj.weight`` for ``down_proj.MatMul.weight``.
    """
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for node in graph.all_nodes():
        parts = _PARTS.get(node.op_type, {}) if node.domain == "" else {}
        for place, part in parts.items():
            operand = node.inputs[place] if place < len(node.inputs) else None
            source = None if operand is None else origin_of(operand, PASSING)
            if source is None or not source.is_initializer() or source.shape is None:
                continue
            if (len(source.shape) == 1) == (part == "weight" and "Normalization" not in node.op_type):
                continue
            name = source.name or ""
            module = module_in(name)
            if module is None or is_called_after_another(node, source):
                noted = noted_module(node)
                if noted and not (module or "").startswith(f"{noted}."):
                    found[name][f"{noted}.{part}"] = None
            for other in (name, *found[name]):
                if (owner := module_in(other)) is not None:
                    plain = f"{plain_name(owner)}.{plain_name(other.rsplit('.', 1)[1])}"
                    found[name] |= dict.fromkeys((plain, name_in_hugging_face(plain)))
    # An initializer's own name never refers to another.
    return {name: tuple(other for other in each if other not in graph.initializers) for name, each in found.items()}


def select_named(pattern: str, names: Iterable[str], aliases: Aliases) -> tuple[str, ...]:
    """Return the initializers with a name that matches a pattern."""
    return tuple(name for name in names if any(matches_pattern(each, pattern) for each in (name, *aliases.get(name, ()))))


def _readers(source: ir.Value) -> list[ir.Node]:
    readers: list[ir.Node] = []
    pending = [source]
    while pending:
        for reader, _ in pending.pop().uses():
            if reader.domain == "" and reader.op_type in _THROUGH:
                pending.append(reader.outputs[0])
            else:
                readers.append(reader)
    return readers
