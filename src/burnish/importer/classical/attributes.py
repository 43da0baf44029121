"""Attributes of operators of ``ai.onnx.ml``, with the standard's defaults for those that are left out."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

CLASSICAL_DOMAIN = "ai.onnx.ml"


def numbers(node: ir.Node, name: str) -> np.ndarray:
    """A list of floating-point numbers as float32, empty where it is left out."""
    attribute = node.attributes.get(name)
    return np.asarray([] if attribute is None else attribute.as_floats(), dtype=np.float32)


def integers(node: ir.Node, name: str) -> np.ndarray:
    """A list of integers as int64, empty where it is left out."""
    attribute = node.attributes.get(name)
    return np.asarray([] if attribute is None else attribute.as_ints(), dtype=np.int64)


def strings(node: ir.Node, name: str) -> np.ndarray:
    """A list of texts as bytes in UTF-8, which string tensors hold, empty where it is left out."""
    attribute = node.attributes.get(name)
    return np.asarray([] if attribute is None else [text.encode() for text in attribute.as_strings()], dtype=object)
