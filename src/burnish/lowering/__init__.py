"""Lowering: semantic operators to standard ONNX, for a named target that says what a runtime can do.

The lowering of each operator stands beside its gradient rule in ``burnish.operators``; here are the walk, the targets and the
files that describe them. What makes a program's graphs for a target is ``burnish.compiler.executable``.
"""

from burnish.lowering.lower import lower_semantic_operators, write_out_newer
from burnish.lowering.target_file import TargetLike, read_target, target_from_dict, target_of, target_to_dict
from burnish.lowering.targets import (
    ANY_DOMAIN,
    TARGETS,
    Support,
    Target,
    check_allowed,
    check_has_dtypes,
    check_runs,
    settle_opset,
)

__all__ = [
    "ANY_DOMAIN",
    "TARGETS",
    "Support",
    "Target",
    "TargetLike",
    "check_allowed",
    "check_has_dtypes",
    "check_runs",
    "lower_semantic_operators",
    "read_target",
    "settle_opset",
    "target_from_dict",
    "target_of",
    "target_to_dict",
    "write_out_newer",
]
