"""Which normalization layers of a training graph go on moving while all that is theirs is frozen."""

from __future__ import annotations

import onnx_ir as ir

from burnish.norms.policies import Frozen
from burnish.norms.training import LAYER_METADATA, POLICY_METADATA
from burnish.optim import Optimizer
from burnish.optim.groups import frozen_by_pattern

PARAMETER = "param/"


def layers_left_moving(grad: ir.Model | None, optimizer: Optimizer) -> list[str]:
    """Return the names of the layers that normalize by the batch though the optimizer freezes their scale and bias.

    Args:
        grad: the training graph before it is lowered; None where there is none, and nothing can be told.
        optimizer: what updates.
    """
    moving = []
    for node in grad.graph if grad is not None else ():
        policy = node.metadata_props.get(POLICY_METADATA)
        if policy is None or policy.startswith(Frozen.name):
            continue
        names = [value.name or "" for value in node.inputs if value is not None and value.is_graph_input()]
        parameters = [name.removeprefix(PARAMETER) for name in names if name.startswith(PARAMETER)]
        if parameters and len(frozen_by_pattern(optimizer, parameters)) == len(parameters):
            moving.append(node.metadata_props[LAYER_METADATA])
    return moving
