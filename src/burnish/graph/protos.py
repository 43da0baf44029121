"""The graphs of an ONNX proto."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import onnx

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
