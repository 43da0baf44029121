"""Attention, where the evaluator departs from the standard's text."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.ops.op_attention import Attention_24 as EvaluatorAttention

WITH_SCORES = 4
"""Outputs of a node that gives its scores, too."""


class Attention(EvaluatorAttention):
    """With a mask that all queries share and causal, and with the scores as they are before the cap, where those are asked for.

    The evaluator's own takes such a mask for that of the first query, and gives capped scores.
    """

    op_domain = ""

    def _run(  # type: ignore[override]
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None, *cache: Any, **attributes: Any
    ) -> Any:
        if mask is not None:
            queries = q.shape[-2]
            mask = np.broadcast_to(mask, (*mask.shape[:-2], queries, mask.shape[-1]))
        results = super()._run(q, k, v, mask, *cache, **attributes)
        if len(self.output) < WITH_SCORES or attributes.get("qk_matmul_output_mode") or not attributes.get("softcap"):
            return results
        uncapped = super()._run(q, k, v, mask, *cache, **{**attributes, "softcap": None})
        return (*results[:3], uncapped[3])
