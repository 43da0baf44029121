"""The graphs of an ONNX proto."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

Body = onnx.GraphProto | onnx.FunctionProto


def graphs_within(body: Body) -> Iterator[onnx.GraphProto]:
    """Give the graphs inside the nodes of a graph or function, at any depth."""
    for node in body.node:
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield graph
                yield from graphs_within(graph)
