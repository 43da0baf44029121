"""Differentiable calls of a graph for autograd, without the Python objects of a ``torch.autograd.Function``.

The autograd node is in C++ (``autograd_node.cpp``), and calls only the two passes of a graph in Python. It is built like kernels,
once, in the background; until it is available, and if it cannot be built, callers use their own function in Python.
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
    """Start to build the node, if possible."""
    kernels.request(NAME)


def graph_calls() -> type[Any] | None:
    """Return the type of callables for graphs; None while it is being built, and if it cannot be.

    It is constructed with keywords only, and called with the inputs:

    - ``forward``, ``backward``: the passes, which return tuples of tensors; the first takes tensors, the second a list of them,
      which it empties;
    - ``again``: a function of the inputs and the cotangents, as tuples, that returns the list of the differentiable gradients of
      all inputs, None for no gradient;
    - ``failed``: a function of the name of a pass and its error, which raises a better error, or returns;
    - ``inputs``, ``results``: the numbers of inputs and outputs;
    - ``differentiated``: positions of the outputs that have cotangents;
    - ``reached``, ``images``: positions of the inputs that get gradients from the backward pass, and of those read as images;
    - ``written``, ``kept``: positions of the inputs that are written after a call, and of those among them whose old values a
      second derivative reads;
    - ``channels_last``: True if cotangents of images have channels last;
    - ``serve``: address of the function that allocates tensors from kept pages, or 0.
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
