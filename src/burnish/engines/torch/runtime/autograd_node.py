"""Calls of a graph that autograd goes back through, without the Python objects of a ``torch.autograd.Function``.

What autograd goes through is a node in C++ (``autograd_node.cpp``), which calls the two passes of a graph and nothing else of
Python. It is built as kernels are, once, in the background; until it is there, and where it cannot be built, callers have a
function of their own in Python.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from burnish.engines.torch import native as kernels
from burnish.engines.torch.native import Use, declare_kernel

NAME = "autograd_node"

declare_kernel(NAME, use=Use.FEW)


def request_graph_calls() -> None:
    """Start building the node, where it can be built."""
    kernels.request(NAME)


def graph_calls() -> type[Any] | None:
    """The type of what calls a graph; None while it is being built, and where it cannot be.

    It is called with the inputs, and made with keywords alone:

    - ``forward``, ``backward``: the passes, which return tuples of tensors; the first takes tensors, the second a list of them,
      which it empties;
    - ``again``: takes the inputs and the cotangents, as tuples, and returns the list of the gradients of all inputs, None where
      there is none, so that they can be differentiated;
    - ``failed``: takes the name of a pass and what that raised, and raises what is said of it, or returns;
    - ``inputs``, ``results``: how many inputs and outputs there are;
    - ``differentiated``: the positions of the outputs that have cotangents;
    - ``reached``, ``images``: those of the inputs that the backward pass returns gradients of, and that are read as images;
    - ``written``, ``kept``: those of the inputs that are written to after a call, and of these the ones that a gradient of a
      gradient reads as they were;
    - ``channels_last``: whether cotangents of images have their channels last;
    - ``serve``: the address of the function that lets tensors come from pages that are kept, or 0.
    """
    return None if kernels.is_awaited(NAME) else _loaded()


@functools.cache
def _loaded() -> type[Any] | None:
    if not kernels.is_obtainable(NAME) or not kernels.available(NAME):
        return None
    library = ctypes.PyDLL(str(kernels.library(NAME)))
    library.burnish_graph_calls.argtypes, library.burnish_graph_calls.restype = [], ctypes.py_object
    made: type[Any] = library.burnish_graph_calls()
    return made
