"""Helpers over ``onnx_ir``: a builder that emits typed nodes, tensors with arithmetic, shape arithmetic.

They know only the ONNX representation: no gradient rules, training or engines. Operators are in ``burnish.operators``, rewrites
of whole graphs in ``burnish.rewriting``.
"""

from burnish.graph.annotations import (
    describe_lookup,
    describe_node,
    describe_place,
    name_sources,
    place,
    source_of,
    table_of,
)
from burnish.graph.attributes import attribute_value, bodies, hold_single_precision, typed_attribute
from burnish.graph.builder import (
    BURNISH_DOMAIN,
    TRAINING_DOMAIN,
    Builder,
    Tensor,
    full_like,
    garbage_kept,
    insert_behind,
    replace_node,
    replace_value,
    unbroadcast,
    zeros_like,
)
from burnish.graph.constants import add_initializer, constant_array, integer_weights, quantization_of, remove_unread_value
from burnish.graph.inference import has_long_vectors, holds_large_integers, infer_outputs, joins_many_copies, operator_version
from burnish.graph.names import Names
from burnish.graph.protos import model_proto, named_failures
from burnish.graph.shapes import (
    FLOATING,
    SIXTEEN_BIT,
    broadcast_shapes,
    known_extents,
    output_axis,
    same_dimension,
    same_padding,
    same_shape,
    split_padding,
    static_dimension,
    static_shape,
)
from burnish.graph.uses import remove_node, replace_output, replace_uses

__all__ = [
    "BURNISH_DOMAIN",
    "FLOATING",
    "SIXTEEN_BIT",
    "TRAINING_DOMAIN",
    "Builder",
    "Names",
    "Tensor",
    "add_initializer",
    "attribute_value",
    "bodies",
    "broadcast_shapes",
    "constant_array",
    "describe_lookup",
    "describe_node",
    "describe_place",
    "full_like",
    "garbage_kept",
    "has_long_vectors",
    "hold_single_precision",
    "holds_large_integers",
    "infer_outputs",
    "insert_behind",
    "integer_weights",
    "joins_many_copies",
    "known_extents",
    "model_proto",
    "name_sources",
    "named_failures",
    "operator_version",
    "output_axis",
    "place",
    "quantization_of",
    "remove_node",
    "remove_unread_value",
    "replace_node",
    "replace_output",
    "replace_uses",
    "replace_value",
    "same_dimension",
    "same_padding",
    "same_shape",
    "source_of",
    "split_padding",
    "static_dimension",
    "static_shape",
    "table_of",
    "typed_attribute",
    "unbroadcast",
    "zeros_like",
]
