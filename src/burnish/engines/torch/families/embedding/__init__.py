"""Embedding tables: rows looked up, gradients of the same row added up, and updates of these rows alone, in place."""

from burnish.engines.torch.families.embedding import schemas  # noqa: F401  # declares the kernels
