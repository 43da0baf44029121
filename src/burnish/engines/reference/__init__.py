"""The reference engine: ``onnx.reference``, the standard's own evaluator in numpy. Slow; an oracle for tests.

It computes in the dtypes of the graph, so a program compiled in float64 is computed in float64 throughout. What the standard
stores in float32 stays so: attributes of nodes (``epsilon``, ``momentum``, ``alpha``), the scales of Resize, the statistics
that LayerNormalization's ``stash_type`` puts in float32, and the learning rate of a step.

Operators that the evaluator has wrong or in fewer digits are in ``operators``. Known to be wrong in it, and not to be used as an
oracle for: BatchNormalization before version 14. Recurrent layers run as what they become in training: the evaluator takes no
notice of lengths of sequences, and has no GRU in two directions. Outputs that a node leaves out are named for it: it keeps them
under the empty name, and gives them to every later node that leaves an input out.
"""

from burnish.engines.reference.engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
