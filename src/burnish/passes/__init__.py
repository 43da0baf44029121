"""Passes: whole-graph rewrites, ``Model -> Model``, one per file. What a single operator becomes is in ``burnish.ops``."""

from burnish.passes.fold_batch_normalization import fold_batch_normalization
from burnish.passes.remove_unused import remove_unused

__all__ = ["fold_batch_normalization", "remove_unused"]
