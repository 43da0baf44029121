"""A program that trains in the same way with another optimizer: what follows from its gradients is made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from burnish import optim
from burnish.compiler.batch_weight import WEIGHS_ALIKE, warn_of_accumulation
from burnish.compiler.lowered_graphs import LoweredGraphs, wrapped
from burnish.compiler.sparse_tables import check_optimizer
from burnish.compiler.update import joined_signature, update_graphs, warn_of_no_effect
from burnish.errors import ObjectiveWarning
from burnish.norms.policies import Frozen
from burnish.norms.training import LAYER_METADATA, POLICY_METADATA
from burnish.optim import Optimizer
from burnish.optim.groups import frozen_by_pattern
from burnish.program.signature import Role, Signature
from burnish.warn import warn


def with_optimizer(graphs: LoweredGraphs, optimizer: str | Mapping[str, Any] | optim.Optimizer) -> LoweredGraphs:
    """Return the graphs of a program with another optimizer; see ``Program.with_optimizer``, which calls this."""
    resolved = optim.get(optimizer)
    moving = layers_left_moving(graphs.semantic.get("grad"), resolved) if graphs.options.get("norm") == "auto" else []
    if moving:
        warn(
            ObjectiveWarning(
                f"the optimizer freezes the batch normalization '{moving[0]}'"
                + (f" and {len(moving) - 1} more" if len(moving) > 1 else "")
                + ", whose statistics still move, as the program was compiled for it to train: compile with this optimizer, "
                "or with norm='frozen', to keep them; norm='train' says that this is meant"
            )
        )
    warn_of_accumulation(resolved, graphs.options.get(WEIGHS_ALIKE, ""))
    grad = graphs.signature["grad"]
    sparse = [entry.name.partition(":")[2] for entry in grad.outputs_of(Role.INDICES)]
    check_optimizer(sparse, resolved, graphs.options.get("sparse"))
    forward, bound = (graphs["predict"], graphs["evaluate"]), wrapped(resolved, graphs.options)
    updates, signatures = update_graphs(graphs.unlowered("grad"), grad, forward, bound, graphs.target, ("init", "apply"))
    signatures["step"] = joined_signature(grad, signatures["apply"])
    warn_of_no_effect(resolved, grad, forward)
    return replace(
        graphs,
        signature=Signature.ordered({**graphs.signature.graphs, **signatures}),
        options={**graphs.options, "optimizer": resolved.options()},
        given=updates,
        base=graphs if graphs.base is None else graphs.base,
    )


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
