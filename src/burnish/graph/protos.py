"""Models and graphs as ONNX protos."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_ir as ir

from burnish.errors import BurnishError

Body = onnx.GraphProto | onnx.FunctionProto


def graphs_within(*bodies: Body) -> Iterator[Any]:
    """Give graphs and functions, and the graphs inside their nodes, at any depth."""
    for body in bodies:
        yield body
        for attribute in (attribute for node in body.node for attribute in node.attribute):
            yield from graphs_within(*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs)


@contextlib.contextmanager
def read_apart() -> Iterator[None]:
    """Let nodes be read by themselves: onnx_ir says of each value that they read of the graph around them that there is none."""
    logger = logging.getLogger("onnx_ir.serde")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def named_failures() -> Iterator[None]:
    """Raise what failed where a tensor was read, a ``BurnishError``, in place of what ``onnx_ir`` makes of it."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, BurnishError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or cause is error:
            raise
        raise cause from None


def model_proto(model: ir.Model) -> onnx.ModelProto:
    """Return a model as a proto.

    Raises:
        ModelError: a file that holds a tensor of the model has been written to since the model was loaded.
    """
    with named_failures():
        return ir.to_proto(model)
