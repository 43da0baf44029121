"""Constants that an exporter or a simplifier made initializers of: they are no weights, as little as they were before.

PyTorch's older exporter names what a Constant node returns after the node, ``/head/Constant_3_output_0``, and no parameter so.
Simplifiers of graphs, such as those that Ultralytics runs on its exports, make initializers of them under these names: anchors,
strides, sizes of images. TensorFlow names an operand that is a number in the code after the operation, ``attention/mul/y``, or
``Const``, and a variable after what reads it; its exporter makes initializers of both.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from burnish.graph.uses import origin_of
from burnish.importer.initializers import ARRANGES, weight_operands
from burnish.importer.operands import HELD

NAME = re.compile(r"(.*/)?Constant(_\d+)?_output_\d+")
IN_TENSORFLOW = re.compile(r".*/(Const(_\d+)?|[xy])(:0)?")


def hold_simplified_constants(model: ir.Model) -> None:
    """Note, in place, that initializers of such a name are no weights, but for those that a layer reads as its weights."""
    patterns = (NAME, IN_TENSORFLOW) if model.producer_name == "tf2onnx" else (NAME,)
    initializers = model.graph.initializers
    named = {value for name, value in initializers.items() if any(pattern.fullmatch(name) for pattern in patterns)}
    if not named:
        return
    layers = {
        origin_of(operand, ARRANGES) for graph in model.graphs() for node in graph for operand in weight_operands(node, False)
    }
    for value in named - layers:
        value.meta[HELD] = True
