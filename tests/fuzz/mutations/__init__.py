"""What is done to a model's parsed form: to its nodes, names, attributes, tensors, types, functions and versions.

A mutation gets the source of chance and the model, which it changes in place, and returns what it did, or None where the model
has nothing of the kind. The order of registration decides which a case's number draws.
"""

from fuzz.mutations import nodes, attributes, tensors, interfaces, functions, elsewhere  # noqa: F401, I001
from fuzz.mutations.registry import mutate

__all__ = ["mutate"]
