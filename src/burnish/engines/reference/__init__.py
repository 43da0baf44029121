"""The reference engine: ``onnx.reference``, the standard's own evaluator in numpy. Slow; an oracle for tests.

It computes in the dtypes of the graph, so a program compiled in float64 is computed in float64 throughout, except for values that
the standard stores in float32: attributes of nodes (``epsilon``, ``momentum``, ``alpha``), the scales of Resize, the statistics
that LayerNormalization's ``stash_type`` puts in float32, and the learning rate of a step.

``operators`` replaces operators that are wrong or less precise in the evaluator. BatchNormalization before version 14 is wrong
and must not serve as an oracle. Recurrent layers run in their training form: the evaluator ignores lengths of sequences, and has
no bidirectional GRU. Absent outputs get names, because the evaluator passes values under the empty name to every later node with
an absent input.
"""

from burnish.engines.reference.engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
