"""Lowering: semantic operators to standard ONNX, for a named target with an allow-list of what it may run.

The lowering of each operator stands beside its gradient rule in ``burnish.ops``; here is only the walk and the targets.
"""

from burnish.lowering.lower import lower_semantic_operators
from burnish.lowering.targets import TARGETS, Target, check_allowed, settle_opset

__all__ = ["TARGETS", "Target", "check_allowed", "lower_semantic_operators", "settle_opset"]
