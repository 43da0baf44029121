"""Thin helpers over ``onnx_ir``: the builder that emits typed nodes, tensors with arithmetic, shape arithmetic.

Knows the ONNX representation and nothing above it: no gradient rule, no training, no engine. Operators live in
``burnish.ops``, whole-graph rewrites in ``burnish.passes``.
"""

from burnish.graph.attributes import attribute_value, typed_attribute
from burnish.graph.broadcasting import unbroadcast
from burnish.graph.builder import (
    BURNISH_DOMAIN,
    NEVER_REPEATED_METADATA,
    ORIGIN_METADATA,
    SOURCE_METADATA,
    TRAINING_DOMAIN,
    Builder,
    Tensor,
    full_like,
    zeros_like,
)
from burnish.graph.constants import constant_array
from burnish.graph.describe import describe_node, describe_place, name_sources, place, source_of
from burnish.graph.dtypes import FLOATING, SIXTEEN_BIT
from burnish.graph.garbage import garbage_kept
from burnish.graph.inference import infer_outputs, operator_version
from burnish.graph.initializers import add_initializer, remove_unread, unused_name
from burnish.graph.rewriting import insert_behind, replace_node, replace_value
from burnish.graph.shapes import broadcast_shapes, same_dimension, same_shape, static_dimension, static_shape

__all__ = [
    "BURNISH_DOMAIN",
    "FLOATING",
    "NEVER_REPEATED_METADATA",
    "ORIGIN_METADATA",
    "SIXTEEN_BIT",
    "SOURCE_METADATA",
    "TRAINING_DOMAIN",
    "Builder",
    "Tensor",
    "add_initializer",
    "attribute_value",
    "broadcast_shapes",
    "constant_array",
    "describe_node",
    "describe_place",
    "full_like",
    "garbage_kept",
    "infer_outputs",
    "insert_behind",
    "name_sources",
    "operator_version",
    "place",
    "remove_unread",
    "replace_node",
    "replace_value",
    "same_dimension",
    "same_shape",
    "source_of",
    "static_dimension",
    "static_shape",
    "typed_attribute",
    "unbroadcast",
    "unused_name",
    "zeros_like",
]
