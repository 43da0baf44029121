"""ONNX protos of models and graphs."""

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
    """Yield graphs and functions and all graphs nested in their nodes."""
    for body in bodies:
        yield body
        for attribute in (attribute for node in body.node for attribute in node.attribute):
            yield from graphs_within(*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs)


@contextlib.contextmanager
def read_apart() -> Iterator[None]:
    """Silence onnx_ir's log within this context: it reports captured values as missing when a node is read separately."""
    logger = logging.getLogger("onnx_ir.serde")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def named_failures() -> Iterator[None]:
    """Raise the underlying ``BurnishError`` of a failed tensor read instead of ``onnx_ir``'s wrapper."""
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
        ModelError: a file with tensors of the model has changed since the model was loaded.
    """
    with named_failures():
        return ir.to_proto(model)
