"""Names: those that are free in a graph, and what layers and weights are called.

A layer is called after the module that an exporter notes with a node, after its weight, or as the node; such names select layers.
A weight that two modules share has the name of one of them: the other is known by its node alone. Weights that an exporter
transposed ahead of time have numbers for names (``val_451``, ``onnx::MatMul_768``), and tools that build or quantize models
append words of their own (``down_proj.MatMul``, ``down_proj_Q4``).
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
    """The names in use, which hands out free ones: each in constant time, whatever many have the same stem.

    Args:
        taken: names in use; those that are None or empty are none.
    """

    def __init__(self, taken: Iterable[str | None] = ()):
        self._taken = {name for name in taken if name}
        self._tried: dict[str, int] = {}

    @classmethod
    def of(cls, graph: ir.Graph) -> Names:
        """The names of all values of a graph, in branches and loop bodies too."""
        values = [*graph.inputs, *graph.initializers.values()]
        values.extend(output for node in graph.all_nodes() for output in node.outputs)
        for body in graph.subgraphs():
            values.extend((*body.inputs, *body.initializers.values()))
        return cls(value.name for value in values)

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def take(self, wanted: str) -> str:
        """Return ``wanted``, or where it is in use ``wanted`` with the next free number after it; it is then in use."""
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
        """Note that a name is not in use any more."""
        self._taken.discard(name or "")


GENERATED = re.compile(r"val_\d+")
"""The names that ``onnx_ir`` gives, counted in each graph for itself."""


def separate_names(graph: ir.Graph) -> bool:
    """Give values in branches and loop bodies other names, in place, where another value of the graph or of a body has theirs.

    What is emitted into a body is named without a look at the graphs around it, and a name would hide theirs. Generated names
    are never those of what is emitted into the graph later. Returns whether any got another name.
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
"""Where PyTorch's newer exporter notes the modules around a node, from the outermost on."""

Aliases = Mapping[str, tuple[str, ...]]
"""Initializer name -> what else it is called."""

PASSING = frozenset({"Cast", "Identity", "Transpose"})
"""Operators that may stand between a weight and the node that reads it."""
_THROUGH = PASSING | {"DequantizeLinear", "Reshape"}
_APPENDED = re.compile(r"(\.MatMul)?(_(quantized|quant|Bnb4|DQ|Q[248](G\d+)?))*$")
_HEAD = re.compile(r"head|out|logit|classif|decoder|predict|score|proj|cls|generator|vocab", re.IGNORECASE)
"""What the last part of the name of an output layer is like; ``embed_out`` is one, ``embed_tokens`` none."""
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
"""Which parameter of a module of PyTorch an operand is."""


def noted_module(node: ir.Node) -> str | None:
    """Return the path of the module that a node is of, as either of PyTorch's exporters notes it; None where none did."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    except (ValueError, SyntaxError):
        scopes = []
    if isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str) and scopes[-2]:
        return scopes[-2]
    path = (node.name or "").strip("/").split("/")
    return ".".join(path[:-1]) if (node.name or "").startswith("/") and len(path) > 1 else None


def module_in(name: str) -> str | None:
    """Return the module that an initializer belongs to by its name: ``encoder.0`` of ``encoder.0.weight``."""
    return name.rsplit(".", 1)[0] if "." in name and "::" not in name else None


def plain_name(name: str) -> str:
    """Return a name without what builders and quantizers of models append to those of modules."""
    return _APPENDED.sub("", name) or name


def name_in_hugging_face(name: str) -> str:
    """Return the name that Hugging Face's module has, of one of ONNX Runtime's builder of language models."""
    return _ATTENTION.sub(r"\1.self_attn.", name)


def layer_name(node: ir.Node, source: ir.Value) -> str:
    """Return what a layer is called.

    Args:
        node: of the layer.
        source: the initializer that is its weight, or an input ``param/<initializer>`` that stands for it.

    Returns:
        The module that its weight is called after. Where several modules share the weight, and it is called after another of
        them, or its name tells of none, the module that the exporter noted with the node; else the name of the node, or that of
        the weight. Of a shared weight without notes the output layer is the product, and the embedding the lookup.
    """
    weight = (source.name or "").removeprefix("param/")
    module, noted = module_in(weight), noted_module(node)
    if module is None:
        return noted or node.name or weight
    if not is_called_after_another(node, source):
        return module
    return (noted if noted and not module.startswith(f"{noted}.") and noted != module else node.name) or weight


def is_called_after_another(node: ir.Node, source: ir.Value) -> bool:
    """Whether the weight of a layer is called after another layer, with which it shares the weight."""
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
    """Return the weight that a node reads, before what is computed from it alone; None for a node without operands."""
    place = 0 if node.op_type in _TABLES else 1
    value = node.inputs[place] if len(node.inputs) > place else None
    while value is not None and (producer := producer_of(value)) is not None and producer.inputs:
        if producer.op_type not in _THROUGH | {"Mul", "Clip", "QuantizeLinear"}:
            break
        value = producer.inputs[0]
    return value


def further_names(node: ir.Node, source: ir.Value, name: str) -> tuple[str, ...]:
    """Return what else a layer may be called: with and without what builders append, as in Hugging Face, as its node.

    Args:
        node: of the layer.
        source: its weight.
        name: what ``layer_name`` gives.
    """
    names = [name, node.name or "", noted_module(node) or ""]
    weight = (source.name or "").removeprefix("param/")
    module = module_in(weight)
    if module is not None and (noted := names[2]) and module.startswith(f"{noted}."):
        names.pop()  # the module around it
    if module is None and names[2]:
        names.append(f"{names[2]}.weight")
    if not is_called_after_another(node, source):
        names += [weight, module or ""]
    names += [plain_name(each) for each in names]
    names += [name_in_hugging_face(each) for each in names]
    return tuple(dict.fromkeys(each for each in names if each))


def other_names(graph: ir.Graph) -> dict[str, tuple[str, ...]]:
    """Return what initializers may be called beside their own names: as parameters of the modules that read them.

    ``lm_head.weight`` of a table that is called ``embed_tokens.weight``, or of ``onnx::MatMul_768``, and
    ``down_proj.weight`` of ``down_proj.MatMul.weight``.
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
    # A name that is an initializer's own means that one alone.
    return {name: tuple(other for other in each if other not in graph.initializers) for name, each in found.items()}


def select_named(pattern: str, names: Iterable[str], aliases: Aliases) -> tuple[str, ...]:
    """Return the initializers that a pattern matches by one of their names."""
    return tuple(name for name in names if any(matches_pattern(each, pattern) for each in (name, *aliases.get(name, ()))))


def _readers(source: ir.Value) -> list[ir.Node]:
    """The nodes that read a weight, through what only passes it on."""
    readers: list[ir.Node] = []
    pending = [source]
    while pending:
        for reader, _ in pending.pop().uses():
            if reader.domain == "" and reader.op_type in _THROUGH:
                pending.append(reader.outputs[0])
            else:
                readers.append(reader)
    return readers
