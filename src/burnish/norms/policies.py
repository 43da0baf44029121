"""Normalization policies: how each batch normalization layer behaves during training, chosen by pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase

import onnx_ir as ir

from burnish.errors import ConfigurationError


class NormPolicy(StrEnum):
    """What a batch normalization layer does in the training graph."""

    TRAIN = "train"  # statistics of the batch, running statistics updated
    FROZEN = "frozen"  # running statistics, never updated; scale and bias still train


class RunningVariance(StrEnum):
    """Which variance of a batch enters the running variance."""

    ONNX = "onnx"  # population: divided by N
    PYTORCH = "pytorch"  # unbiased: divided by N - 1


def layer_name(node: ir.Node) -> str:
    """The name a pattern selects a layer by: its scale initializer without the last part, else the node's name."""
    scale = node.inputs[1] if len(node.inputs) > 1 else None
    name = (scale.name or "").removeprefix("param/") if scale is not None else ""
    return name.rsplit(".", 1)[0] if "." in name else node.name or name


def resolve_policies(norm: str | Mapping[str, str], nodes: Sequence[ir.Node]) -> dict[ir.Node, NormPolicy]:
    """Assign a policy to every batch normalization node.

    Args:
        norm: one policy for all, or {pattern: policy}: shell-style patterns over layer and node names, the last match wins,
            layers without a match train.
        nodes: the BatchNormalization nodes of the model.

    Raises:
        ConfigurationError: an unknown policy, or a pattern that matches no layer.
    """
    if isinstance(norm, str):
        policy = _policy(norm)
        return dict.fromkeys(nodes, policy)
    policies = dict.fromkeys(nodes, NormPolicy.TRAIN)
    for pattern, name in norm.items():
        policy = _policy(name)
        matches = [node for node in nodes if fnmatchcase(layer_name(node), pattern) or fnmatchcase(node.name or "", pattern)]
        if not matches:
            known = ", ".join(f"'{layer_name(node)}'" for node in nodes[:8]) or "none"
            raise ConfigurationError(
                f"norm: the pattern '{pattern}' matches no batch normalization layer; the model's layers are: {known}"
                + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
            )
        for node in matches:
            policies[node] = policy
    return policies


def default_running_variance(model: ir.Model) -> RunningVariance:
    """PyTorch's rule for a model that PyTorch exported, the standard's for any other."""
    return RunningVariance.PYTORCH if (model.producer_name or "").lower() == "pytorch" else RunningVariance.ONNX


def _policy(name: str) -> NormPolicy:
    try:
        return NormPolicy(name)
    except ValueError:
        known = ", ".join(f"'{policy.value}'" for policy in NormPolicy)
        raise ConfigurationError(f"norm: unknown policy '{name}'; choose among {known}") from None
