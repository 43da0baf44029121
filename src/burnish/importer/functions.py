"""Model-local functions become the nodes they stand for."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from burnish.errors import ModelError
from burnish.importer.opset import upgrade_graph


def inline_functions(model: ir.Model) -> None:
    """Replace, in place, every call of a model-local function by its body.

    Raises:
        ModelError: functions that call each other in a circle, or that use other versions of a domain than the model does.
    """
    if not model.functions:
        return
    _settle_versions(model)
    try:
        InlinePass()(model)
    except Exception as error:
        raise ModelError(
            f"the functions of the model cannot be inlined: {error.__cause__ or error}. Inline them when the model is exported"
        ) from error
    model.functions.clear()


def _settle_versions(model: ir.Model) -> None:
    """Bring the graph and the functions to the newest standard opset among them."""
    bodies = [function.graph for function in model.functions.values() if "" in function.opset_imports]
    newest = max([model.opset_imports[""], *(body.opset_imports[""] for body in bodies)])
    for graph in (model.graph, *bodies):
        if graph.opset_imports[""] != newest:
            upgrade_graph(graph, graph.opset_imports[""], newest)
            graph.opset_imports[""] = newest
