"""The option ``recompute``: ``layers``, a budget in bytes, or patterns of node names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph.annotations import ORIGIN
from burnish.settings import matches_pattern, memory_size, read_settings, with_settings
from burnish.validation import is_whole

RecomputeOption = str | int | Sequence[str] | None

LAYERS = "layers"


class BudgetError(ConfigurationError):
    """The budget is too small, even with the most recomputation."""


@dataclass(frozen=True)
class Recompute:
    """A parsed option: patterns, a budget, or neither, which means ``layers``.

    Attributes:
        patterns: shell-style patterns of the nodes to recompute.
        budget: the largest planned peak, in bytes.
        batch: the batch size for the plan; None means one sample for a budget, and the growth per sample for ``layers``.
    """

    patterns: tuple[str, ...] = ()
    budget: int | None = None
    batch: int | None = None

    def options(self) -> str | list[str]:
        """Return a JSON-compatible value that ``get`` reads."""
        if self.patterns:
            return list(self.patterns)
        setting = "" if self.batch is None else f":batch={self.batch}"
        return (LAYERS if self.budget is None else f"{self.budget}B") + setting


def get(requested: RecomputeOption | Recompute) -> Recompute | None:
    """Read the option.

    Args:
        requested: None; ``layers``; a budget as a number of bytes or a string such as ``1.5GB``; either of these strings followed
            by ``:batch=<size>``; or a list of patterns.

    Raises:
        ConfigurationError: it is none of these.
    """
    if requested is None or isinstance(requested, Recompute):
        return requested
    if is_whole(requested) and requested > 0:
        return Recompute(budget=int(requested))
    if isinstance(requested, str):
        return _from_text(requested)
    if isinstance(requested, Iterable):
        patterns = tuple(requested)
        if patterns and all(isinstance(pattern, str) and pattern for pattern in patterns):
            return Recompute(patterns=patterns)
    raise _unknown(requested)


def _from_text(text: str) -> Recompute:
    what, settings = read_settings("recompute", text)
    budget = memory_size(what)
    if what != LAYERS and not budget:
        raise _unknown(text)

    def make(batch: int | None = None) -> Recompute:
        if batch is not None and (not is_whole(batch) or batch < 1):
            raise ConfigurationError(f"recompute: batch must be a whole number of samples, 1 or more, not {batch!r}")
        return Recompute(budget=budget, batch=batch)

    return with_settings(f"recompute '{what}'", make, settings)


def _unknown(requested: object) -> ConfigurationError:
    return ConfigurationError(
        f"recompute={requested!r} is no choice: give 'layers', a budget such as '1.5GB' or a number of bytes, or a list of "
        "patterns of node names"
    )


def name_origins(graph: ir.Graph) -> None:
    """Record on each node its name, first output and weights. Rewrites copy the entry to replacements."""
    for node in graph:
        weights = [value.name or "" for value in node.inputs if value is not None and value.is_graph_input()]
        names = [node.name or "", node.outputs[0].name or "", *(name.removeprefix("param/") for name in weights)]
        ORIGIN.set(node, names)


def forget_origins(graph: ir.Graph) -> None:
    """Remove the entries of ``name_origins``."""
    for node in graph:
        ORIGIN.remove(node)


def matching_nodes(nodes: Sequence[ir.Node], pattern: str) -> list[int]:
    """Return the indices of the nodes whose name, first output or weight matches a pattern."""
    return [
        index
        for index, node in enumerate(nodes)
        if any(name and matches_pattern(name, pattern) for name in ORIGIN.get(node) or ())
    ]
