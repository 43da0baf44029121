"""Passes: whole-graph rewrites, ``Model -> Model``, one per file. What a single operator becomes is in ``burnish.ops``."""

from burnish.passes.remove_unused import remove_unused

__all__ = ["remove_unused"]
