"""Models that were made for one sample at a time take batches of any size.

``open_batch`` goes through the nodes of a canonical model in their order, as ``jax.vmap`` goes through a function: for each
value that samples reach it knows along which axis they stand (``operands``), and for each operator there is a rule (``rules``)
that emits what computes the same for every sample. What is not known is refused by name. Nothing else is done with the model.
"""

from burnish.importer.open_batch.model import open_batch

__all__ = ["open_batch"]
