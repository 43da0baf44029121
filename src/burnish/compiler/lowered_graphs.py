"""The six graphs of a program, lowered to the target that it was compiled for, each when it is first read.

Beside them a program keeps ``grad``, ``evaluate`` and ``predict`` as they were before they were lowered: what they become for an
engine with kernels of its own is in ``executable``. What is computed again is chosen in what the step was lowered to: nothing is
in the graphs that are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from burnish.compiler.draft import lower_to_target
from burnish.compiler.update import joined_signature, update_graphs
from burnish.operators import semantic_operators
from burnish.optim import Optimizer
from burnish.program.signature import FEATURES, GraphSignature, Role, outputs_in_place
from burnish.rewriting.recompute import recompute_activations
from burnish.rewriting.recompute_request import Recompute
from burnish.targets import Target

SEMANTIC_GRAPHS = ("grad", "evaluate", "predict")


def semantic_target(target: Target) -> Target:
    """The target as it would be with a kernel for every semantic operator."""
    return target.with_kernels(semantic_operators())


def lowered_graphs(
    semantic: Mapping[str, ir.Model],
    grad: GraphSignature,
    optimizer: Optimizer,
    target: Target,
    recompute: Recompute | None = None,
) -> tuple[dict[str, Any], dict[str, GraphSignature]]:
    """Return the graphs of a program, lowered, or what makes them, and the signatures of those that update the state.

    An engine with kernels of its own never reads the largest, ``grad`` and ``step`` in standard operators: they are made when
    they are asked for. Where activations are computed again, which is chosen in the lowered graph of the step, all are made here.

    Args:
        semantic: the graphs of ``SEMANTIC_GRAPHS``, and ``features`` where there is one, not lowered; left as they are.
        grad: the signature of the graph of the gradients.
        optimizer: what updates the parameters.
        target: what they are lowered to.
        recompute: which activations the backward computes again.
    """

    def lowered(name: str) -> ir.Model:
        model = semantic[name].clone()
        lower_to_target(model, target)
        return model

    forward = {name: lowered(name) for name in ("predict", "evaluate")}
    others = {FEATURES: lowered(FEATURES)} if FEATURES in semantic else {}
    if recompute is not None:
        graph = lowered("grad")
        updates, signatures = update_graphs(graph, grad, forward.values(), optimizer, target, ("step", "apply"))
        compute_again(graph, grad, recompute, updates["step"], outputs_in_place(updates["apply"], signatures["apply"]))
        updates, signatures = update_graphs(graph, grad, forward.values(), optimizer, target)
        return {**forward, **others, **updates, "grad": graph}, signatures
    gradients = functools.cache(functools.partial(lowered, "grad"))
    updates, signatures = updating_graphs(semantic["grad"], gradients, grad, tuple(forward.values()), optimizer, target)
    return {**forward, **others, **updates, "grad": gradients}, signatures


def updating_graphs(
    known: ir.Model,
    gradients: Callable[[], ir.Model],
    grad: GraphSignature,
    forward: Sequence[ir.Model],
    optimizer: Optimizer,
    target: Target,
) -> tuple[dict[str, Any], dict[str, GraphSignature]]:
    """Return the graphs ``init`` and ``apply``, what makes ``step``, and the signatures of the three.

    Args:
        known: the graph of the gradients, lowered or not; left as it is.
        gradients: gives it lowered; not called before the step is made.
        grad: its signature.
        forward, optimizer, target: as ``update_graphs`` takes them.
    """
    models, signatures = update_graphs(known, grad, forward, optimizer, target, ("init", "apply"))
    signatures["step"] = joined_signature(grad, signatures["apply"])

    def step() -> ir.Model:
        return update_graphs(gradients(), grad, forward, optimizer, target, ("step",))[0]["step"]

    return {**models, "step": step}, signatures


def compute_again(
    model: ir.Model,
    signature: GraphSignature,
    recompute: Recompute,
    planned: ir.Model,
    in_place: Collection[str],
    strict: bool = True,
) -> None:
    """Rewrite the graph of the gradients, in place, by what is chosen in that of the step; ``in_place`` are outputs of this."""
    recompute_activations(
        model,
        recompute,
        loss=signature.outputs_of(Role.LOSS)[0].name,
        data=[entry.name for entry in signature.inputs_of(Role.DATA, Role.LABEL)],
        keys=[entry.name for entry in signature.inputs_of(Role.KEY)],
        planned=planned,
        in_place=in_place,
        strict=strict,
    )
