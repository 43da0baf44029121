"""A program that trains in the same way with another optimizer: what follows from its gradients is made anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from burnish import optim
from burnish.compiler.batch_weight import WEIGHS_ALIKE, warn_of_accumulation
from burnish.compiler.lowered_graphs import updating_graphs
from burnish.compiler.sparse_tables import check_optimizer
from burnish.compiler.update import warn_of_no_effect
from burnish.errors import ObjectiveWarning
from burnish.norms.policies import Frozen
from burnish.norms.training import LAYER_METADATA, POLICY_METADATA
from burnish.optim import Optimizer
from burnish.optim.groups import frozen_by_pattern
from burnish.program import Program, Role, Signature
from burnish.warn import warn


def with_optimizer(program: Program, optimizer: str | Mapping[str, Any] | optim.Optimizer) -> Program:
    """Return the program with another optimizer; see ``Program.with_optimizer``, which calls this."""
    resolved = optim.get(optimizer)
    moving = layers_left_moving(program.semantic.get("grad"), resolved) if program.options.get("norm") == "auto" else []
    if moving:
        warn(
            ObjectiveWarning(
                f"the optimizer freezes the batch normalization '{moving[0]}'"
                + (f" and {len(moving) - 1} more" if len(moving) > 1 else "")
                + ", whose statistics still move, as the program was compiled for it to train: compile with this optimizer, "
                "or with norm='frozen', to keep them; norm='train' says that this is meant"
            )
        )
    warn_of_accumulation(resolved, program.options.get(WEIGHS_ALIKE, ""))
    sparse = [entry.name.partition(":")[2] for entry in program.signature["grad"].outputs_of(Role.INDICES)]
    check_optimizer(sparse, resolved, program.options.get("sparse"))
    models, signatures = updating_graphs(
        program.semantic.get("grad") or program.grad,
        program.when_read("grad"),
        program.signature["grad"],
        (program.predict, program.evaluate),
        program.completed(resolved),
        program.target,
    )
    warn_of_no_effect(resolved, program.signature["grad"], (program.predict, program.evaluate))
    ordered = Signature.ordered({**program.signature.graphs, **signatures})
    options = {**program.options, "optimizer": resolved.options()}
    return program.changed(**models, signature=ordered, options=options)


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
