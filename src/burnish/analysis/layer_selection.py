"""Selection of layers by name."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish.errors import ConfigurationError, LayersInBodiesWarning
from burnish.graph import bodies
from burnish.norms.policies import layer_name, matches_layer
from burnish.warn import warn

Patterns = str | Sequence[str]
SHOWN = 8


def select_layers(nodes: Sequence[ir.Node], patterns: Patterns, option: str, kind: str) -> list[ir.Node]:
    """Return the nodes that match a pattern, in their order.

    Args:
        nodes: the nodes to choose from.
        patterns: layer or node names, or shell-style patterns over them.
        option: name of the argument with the patterns, for errors.
        kind: kind of node, for errors: ``batch normalization``.

    Raises:
        ConfigurationError: a pattern matches no node.
    """
    checked = _patterns(patterns, option)
    for pattern in checked:
        if not any(matches_layer(node, pattern) for node in nodes):
            raise ConfigurationError(
                f"{option}: '{pattern}' matches no {kind} layer; the model's layers are: {listed_layers(nodes)}"
            )
    return [node for node in nodes if any(matches_layer(node, pattern) for pattern in checked)]


def listed_layers(nodes: Sequence[ir.Node]) -> str:
    shown = ", ".join(f"'{layer_name(node)}'" for node in nodes[:SHOWN]) or "none"
    return shown + (f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else "")


def warn_of_bodies(what: str, left: Sequence[ir.Node], why: str) -> None:
    """Warn that layers in branches or loop bodies stay unchanged; do nothing if there are none.

    Args:
        what: the change that does not reach them: "quantize".
        left: these layers.
        why: the reason and the remedy, as a clause.
    """
    if left:
        several = "layers in branches or loop bodies stay" if len(left) > 1 else "layer in a branch or loop body stays"
        message = f"{what}: {len(left)} {several} as the model has them: {listed_layers(left)}; {why}"
        warn(LayersInBodiesWarning(message))


def nodes_around(graph: ir.Graph) -> dict[ir.Node, ir.Node]:
    """Return, for each node of a graph and its bodies, the top-level node: itself or the one that contains it."""
    around: dict[ir.Node, ir.Node] = {}
    for node in graph:
        around[node] = node
        for body in bodies(node):
            around.update(dict.fromkeys(body.all_nodes(), node))
    return around


def _patterns(patterns: Patterns, option: str) -> list[str]:
    checked = [patterns] if isinstance(patterns, str) else list(patterns) if isinstance(patterns, Sequence) else []
    if not checked or not all(isinstance(pattern, str) for pattern in checked):
        raise ConfigurationError(f"{option} must be a name or pattern of layers, or a list of them, not {patterns!r}")
    return checked
