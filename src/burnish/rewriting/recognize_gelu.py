"""Recognition of the Gaussian error linear unit (Hendrycks and Gimpel 2016), exact and in its tanh approximation."""

from __future__ import annotations

import math
from functools import partial

import onnx_ir as ir

from burnish.graph import Builder
from burnish.graph.matching import Either, Match, Node, Number, Pattern, Product, Variable, find_match
from burnish.graph.versions import raise_opset
from burnish.rewriting.normalization_patterns import replace_pieces

OPSET = 20
"""First opset with Gelu."""

DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""The standard's function has float32 constants, too imprecise for float64."""


def recognize_gelu(model: ir.Model) -> bool:
    """Replace, in place, ``x / 2 * (1 + erf(x / sqrt(2)))``, and its approximation by tanh, by Gelu.

    Factors may be in any order, and constants rounded to their dtype. The opset is raised to 20 if every other node keeps its
    meaning; otherwise nothing is replaced. Intermediate values must have no other readers.
    """
    changed = False
    for node in reversed(list(model.graph)):
        if node.graph is None or node.domain != "" or node.op_type not in ("Div", "Mul"):
            continue
        for pattern, approximate in ((_EXACT, None), (_APPROXIMATION, "tanh")):
            match = find_match(pattern, node.outputs[0], partial(_keeps_shape, node.outputs[0]))
            if match is None:
                continue
            if not raise_opset(model.graph, OPSET):
                return changed
            builder = Builder(model.graph, before=node)
            x = builder.tensor(match["x"])
            replace_pieces(model.graph, node.outputs[0], builder.op("Gelu", x, approximate=approximate))
            changed = True
            break
    return changed


def _keeps_shape(output: ir.Value, match: Match) -> bool:
    """True if no constant gave the output more axes than x has."""
    x: ir.Value = match["x"]
    return x.dtype in DTYPES and x.shape is not None and output.shape is not None and len(x.shape) == len(output.shape)


def _halved_product(x: Pattern, gate: Pattern) -> Pattern:
    return Either(
        Product(x, gate, Number(0.5)),
        Node("Div", Node("Mul", x, gate), Number(2.0)),
        Node("Mul", Node("Div", x, Number(2.0)), gate),
        Node("Mul", x, Node("Div", gate, Number(2.0))),
    )


def _exact() -> Pattern:
    x = Variable("x")
    argument = Either(Node("Div", x, Number(math.sqrt(2.0))), Node("Mul", x, Number(math.sqrt(0.5))))
    return _halved_product(x, Node("Add", Node("Erf", argument), Number(1.0)))


def _approximation() -> Pattern:
    """Return the pattern for ``u = sqrt(2 / pi) * (x + 0.044715 * x^3)``, also with x factored out."""
    x, cubic, outer = Variable("x"), Number(0.044715), Number(math.sqrt(2.0 / math.pi))
    cube = Either(Node("Mul", cubic, Node("Pow", x, Number(3.0))), Product(cubic, x, x, x))
    square = Either(Node("Mul", cubic, Node("Pow", x, Number(2.0))), Product(cubic, x, x))
    argument = Either(
        Node("Mul", outer, Node("Add", x, cube)),
        Product(outer, x, Node("Add", Number(1.0), square)),
    )
    return _halved_product(x, Node("Add", Node("Tanh", argument), Number(1.0)))


_EXACT, _APPROXIMATION = _exact(), _approximation()
