"""Find the place in a model where a graph failed, at no cost to graphs that succeed.

Each recorded call names its node. PyTorch generates one line of code for each call, which starts with the call's name, so the
traceback of an error leads back to the node.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from burnish.errors import EngineError
from burnish.graph import describe_lookup
from burnish.graph.annotations import source_of

PLACE = "burnish.place"
"""The key in a recorded call's ``meta`` of a node, and the node of the model that it belongs to."""

SOURCE = "burnish.source"
"""The key of the latter only."""


def note_place(graph: fx.Graph, node: ir.Node) -> None:
    """Assign this node to the calls at the end of the graph that have none."""
    place = None
    for call in reversed(graph.nodes):
        if PLACE in call.meta or call.op == "placeholder":
            break
        place = place or describe_lookup(node)
        call.meta[PLACE], call.meta[SOURCE] = place, source_of(node)


def place_of(error: BaseException) -> str | None:
    """Return the node at which a translated graph raised an error, or None if the error is not from a graph.

    For a body of a node, such as ``Loop``, it is the node in the body.
    """
    place: str | None = None
    for call, _ in _calls(error):
        place = call.meta.get(PLACE) or place
    return place


def refused_index(error: BaseException) -> tuple[int, int] | None:
    """Return the first invalid index of a row lookup, and the number of rows; None for other errors."""
    lookups = []
    for call, values in _calls(error):
        if call.target is torch.index_select:
            data, indices = (values.get(operand.name) if isinstance(operand, fx.Node) else None for operand in call.args[::2])
            lookups.append((data, call.args[1], indices))
    traceback = error.__traceback__
    while traceback is not None:
        # A rule that is called at run time, because extents were unknown before.
        values = traceback.tb_frame.f_locals
        lookups.append((values.get("data"), values.get("axis"), values.get("indices")))
        traceback = traceback.tb_next
    for data, axis, indices in lookups:
        if isinstance(data, torch.Tensor) and isinstance(axis, int) and isinstance(indices, torch.Tensor):
            extent = data.shape[axis]
            outside = indices[(indices < 0) | (indices >= extent)]
            if len(outside):
                index = int(outside[0])
                # A negative index was counted from the end: the extent was added to it.
                return (index if index >= 0 else index - extent), extent
    return None


def _calls(error: BaseException) -> Iterator[tuple[fx.Node, Mapping[str, Any]]]:
    """Yield the calls of translated graphs in an error's traceback, the outermost first, with their local variables."""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule) and code.co_name == "forward":
            line = linecache.getline(code.co_filename, traceback.tb_lineno)
            name = line.split("=", 1)[0].split(":", 1)[0].strip()
            for call in module.graph.nodes:
                if call.name == name:
                    yield call, traceback.tb_frame.f_locals
        traceback = traceback.tb_next


def failure(graph: str, error: Exception, place: str | None) -> EngineError:
    """Return the error to raise for an error of PyTorch in a graph.

    Args:
        graph: name of the graph.
        error: error of PyTorch.
        place: the failing node; None if unknown.
    """
    reason = " ".join(str(error).split()).rstrip(".")
    if (refused := refused_index(error)) is not None:
        reason = f"there are {refused[1]} rows, and none of index {refused[0]}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in reason or "out of memory" in reason:
        remedy = "Memory ran out: use a smaller batch, or compile with recompute to keep fewer activations"
    elif isinstance(error, NotImplementedError):
        remedy = "This device has no kernel for these elements: use a float32 model, another device, or engine='onnxruntime'"
    elif isinstance(error, IndexError) or refused or "out of range" in reason or "out of bounds" in reason:
        remedy = "An index lies outside of what this node reads: correct the values in the batch that it comes from, or the model"
    else:
        remedy = "Check the shapes and values that the batch leads to there, or compare with engine='onnxruntime'"
    where = "" if place is None else f" at {place}"
    failed = f"PyTorch {torch.__version__} failed in the {graph} graph{where}: {reason}"
    return EngineError(f"{failed}. No state has changed. {remedy}")
