"""Errors for graphs that ONNX Runtime cannot load or run."""

from __future__ import annotations

import re
import textwrap

import onnx_ir as ir
import onnxruntime

from burnish.errors import EngineError
from burnish.graph import source_of, table_of
from burnish.graph.annotations import place

LONGEST_REASON = 240


def load_failure(graph: str, error: Exception, model: ir.Model) -> EngineError:
    """Return the error for a model that ONNX Runtime could not load; ``graph`` is its name."""
    remedy = "Update onnxruntime if the graph is newer than it, or try engine='reference', which is slow but complete"
    if re.search(r"NOT_IMPLEMENTED|Could not find an implementation", str(error)):
        if has_bfloat16(model):
            found = re.search(r"implementation for (\w+)", str(error))
            operator = found[1] if found else "one of its operators"
            return EngineError(
                f"ONNX Runtime {onnxruntime.__version__} cannot load the {graph} graph{_node_of(error)}: on the CPU it has no "
                f"bfloat16 kernel of {operator}. Compile with precision='float16' or 'float32', or use engine='torch', or "
                "'reference', which is slow but complete"
            )
        remedy = (
            "It has no kernel of this operator for this dtype: use a float32 model, or engine='reference', which is slow but "
            "complete"
        )
    return EngineError(
        f"ONNX Runtime {onnxruntime.__version__} cannot load the {graph} graph{_node_of(error)}: {_reason(error)}. {remedy}"
    )


def has_bfloat16(model: ir.Model) -> bool:
    """Return True if a model has bfloat16 values, for which ONNX Runtime has no CPU kernels."""
    outputs = (value for node in model.graph.all_nodes() for value in node.outputs)
    return any(value.dtype == ir.DataType.BFLOAT16 for value in (*model.graph.inputs, *outputs))


def run_failure(graph: str, error: Exception, model: ir.Model | None = None) -> EngineError:
    """Return the error for a graph that ONNX Runtime could not run, with or without its optimizations.

    Args:
        graph: its name.
        error: the error of ONNX Runtime.
        model: the loaded graph, in which the failing node is looked up.
    """
    if is_out_of_memory(error):
        remedy = "Memory ran out: use a smaller batch, or compile with recompute to keep fewer activations"
    else:
        remedy = (
            "ONNX Runtime's optimizations are not the cause: correct the shapes and values that the batch leads to there, or the "
            "model; if memory is short, use a smaller batch"
        )
    return EngineError(
        f"ONNX Runtime {onnxruntime.__version__} failed in the {graph} graph{_node_of(error)}{_part_of(error, model)}: "
        f"{_reason(error)}. No state has changed. {remedy}"
    )


def _part_of(error: Exception, model: ir.Model | None) -> str:
    """Describe the failing node: `` of the gradient of Conv 'stem'``, or ``, which looks up rows of 'table'``."""
    found = re.search(NODE_IN_MESSAGE[0], str(error))
    if found is None or model is None:
        return ""
    node = next(
        (node for node in model.graph.all_nodes() if (node.op_type, node.name) == (found["operator"], found["name"])), None
    )
    if node is None:
        return ""
    own, source, table = f"{node.op_type} '{node.name}'", source_of(node), table_of(node)
    part = "" if source is None or source.startswith(own) else place("", source)
    return part if table is None else f"{part}, which looks up rows of '{table}'"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out, so that a retry that needs more memory is useless."""
    return isinstance(error, MemoryError) or bool(re.search(r"allocate memory|bad_alloc|bad allocation", str(error)))


def description(error: BaseException) -> str:
    """Return the node and message of an error of ONNX Runtime, or of one caused by it: `` at Gather 'rows' (message)``."""
    raised = error.__cause__ if isinstance(error, EngineError) and error.__cause__ is not None else error
    reason = re.split(r" : FAIL : |Status Message: ", _reason(raised))[-1]
    return f"{_node_of(raised)} ({textwrap.shorten(reason, LONGEST_REASON, placeholder=' ...')})"


def _reason(error: BaseException) -> str:
    message = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
    return " ".join(message.split()).rstrip(".")


NODE_IN_MESSAGE = (
    r"running (?P<operator>\S+) node\. Name:'(?P<name>[^']*)'",
    r"implementation for (?P<operator>\w+)\(\d+\) node with name '(?P<name>[^']*)'",
    r"In Node, \(\"(?P<name>[^\"]*)\", (?P<operator>\w+),",
    r"of node \(?'?(?P<name>[^'():]+?)'? \((?:\w*::)?(?P<operator>\w+)",
    r"(?P<name>)\b(?P<operator>\w+:\w+)\(-?\d+\) is not a registered",
)


def _node_of(error: BaseException) -> str:
    """Return `` at Conv 'name'`` when ONNX Runtime's message names a node."""
    for pattern in NODE_IN_MESSAGE:
        found = re.search(pattern, str(error))
        if found:
            return f" at {found['operator']}" + (f" '{found['name']}'" if found["name"] else "")
    return ""
