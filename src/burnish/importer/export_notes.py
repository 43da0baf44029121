"""What PyTorch's exporter (``dynamo=True``) notes beside a tensor: whether it was a parameter, and what it was computed from.

A model that is exported with the exporter's optimizer holds tensors that were computed ahead of time. The notes say which of
these are weights: a table of positions, a mask or a grid is none, and a transposed weight is one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, constant_array
from burnish.graph.edits import replace_uses

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
COMPUTED_FROM = "pkg.onnxscript.optimizer.folded_from"

PARAMETER = "PARAMETER"
_ENTRY = re.compile(r"^(\S+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']*)'", re.MULTILINE)


def is_no_parameter(value: ir.Value, kinds: Mapping[str, str]) -> bool:
    """Whether the exporter says that an initializer was no parameter, nor computed from one; False where it is silent.

    Args:
        value: the initializer.
        kinds: what ``noted_kinds`` gives.
    """
    kind = value.metadata_props.get(KIND) or kinds.get(value.name or "")
    if kind is not None:
        return kind != PARAMETER
    sources = _sources(value)
    return bool(kinds) and bool(sources) and not any(kinds.get(source) == PARAMETER for source in sources)


def noted_kinds(graph: ir.Graph) -> dict[str, str]:
    """Return the kind of each tensor of the exported module, by its name in the module and by that in the exported graph."""
    signature = graph.metadata_props.get(SIGNATURE, "")
    return {name: kind for node, kind, target in _ENTRY.findall(signature) for name in (node, target)}


def tie_copies(model: ir.Model) -> bool:
    """Let what reads a copy of a weight that the exporter made, as it is or transposed, read the weight, in place.

    A language model's head that shares the table of its embedding comes as a table and a transposed copy, which would train as
    two weights.

    Returns:
        Whether there was any.
    """
    graph = model.graph
    first = next(iter(graph), None)
    has_tied = False
    for name, copied in list(graph.initializers.items()):
        sources = _sources(copied)
        source = graph.initializers.get(sources[0]) if len(sources) == 1 else None
        if source is None or source is copied or copied.is_graph_output() or not source.uses() or not copied.uses():
            continue
        perm = _order_of(source, copied)
        if perm is None:
            continue
        builder = Builder(graph, before=first)
        tensor = builder.tensor(source)
        replace_uses(copied, (builder.op("Transpose", tensor, perm=perm) if perm else tensor).value)
        del graph.initializers[name]
        has_tied = True
    return has_tied


def _order_of(source: ir.Value, copied: ir.Value) -> list[int] | None:
    """The order of axes that makes one tensor of the other, empty where it is the same; None where it is another one."""
    original, copy = constant_array(source), constant_array(copied)
    if original is None or copy is None or original.dtype != copy.dtype or original.size != copy.size:
        return None
    if original.shape == copy.shape and np.array_equal(original, copy):
        return []
    return [1, 0] if original.ndim == 2 and original.T.shape == copy.shape and np.array_equal(original.T, copy) else None


def _sources(value: ir.Value) -> list[str]:
    """The names that the exporter's optimizer computed an initializer from."""
    try:
        sources = ast.literal_eval(value.metadata_props.get(COMPUTED_FROM, "[]"))
    except (ValueError, SyntaxError):
        return []
    return [source for source in sources if isinstance(source, str)] if isinstance(sources, list) else []
