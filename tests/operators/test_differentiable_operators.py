"""Every operator of the standard that has a derivative by the standard's own word has one here."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from burnish.graph.function_bodies import has_function
from burnish.operators import has_gradient

DIFFERENTIABLE = onnx.defs.OpSchema.DifferentiationCategory.Differentiable
NEWEST = onnx.defs.onnx_opset_version()
BOUND_TO_A_MODE = {"BatchNormalization", "Dropout"}


def differentiable_operators() -> set[str]:
    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    schemas = [onnx.defs.get_schema(name, NEWEST, "") for name in names]
    marked = [schema for schema in schemas if any(formal.differentiation_category == DIFFERENTIABLE for formal in schema.inputs)]
    return {schema.name for schema in marked if not schema.deprecated}


def test_whatever_the_standard_calls_differentiable_has_a_rule_or_a_function() -> None:
    """Functions are differentiated as what they hold: ``test_inlining.py``."""
    marked = differentiable_operators()
    assert len(marked) > 100
    without = {name for name in marked - BOUND_TO_A_MODE if not has_gradient(ir.node(name, []), NEWEST)}
    assert not {name for name in without if not has_function(name, NEWEST)}
