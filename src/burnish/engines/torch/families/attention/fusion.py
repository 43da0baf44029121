"""Fusion of scaled dot-product attention and its gradient, whose probabilities PyTorch's kernels do not keep (``attention``).

Attention reaches the graph as softmax(Q K') V. Scaling stands before the product, on one operand or on both, or behind it; a mask
may be added to the scores. What reads the probabilities beside their product with V must be the gradient; dropout of them, for
which the kernels have no place, leaves everything as it is. In mixed precision the products are of bfloat16, and casts stand
around the softmax, which is of float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, constant_array, replace_value
from burnish.graph.uses import is_read_once, only_user, remove_unread
from burnish.ops.activation import SOFTMAX_GRAD

RANK = 4
LAST_TWO = [0, 1, 3, 2]


class _Scaled(NamedTuple):
    """A value that is another one times a number, or itself."""

    result: ir.Value
    value: ir.Value
    scale: float

    @classmethod
    def of(cls, result: ir.Value) -> _Scaled:
        node = result.producer()
        if node is not None and node.domain == "" and node.op_type in ("Mul", "Div"):
            for place, value in enumerate(node.inputs):
                array = constant_array(node.inputs[1 - place])
                if value is None or array is None or array.size != 1 or array.ndim > RANK or (node.op_type == "Div" and place):
                    continue
                number = float(array.reshape(-1)[0])
                if number != 0.0:
                    return cls(result, value, 1.0 / number if node.op_type == "Div" else number)
        return cls(result, result, 1.0)

    @property
    def is_scaled(self) -> bool:
        return self.result is not self.value


@dataclass
class _Attention:
    """softmax(query key (+ mask)) value, times numbers on the way.

    Attributes:
        softmax, product: the nodes that make the probabilities, and the result.
        guard: what puts zeros in the place of probabilities that are NaN, if anything does.
        probabilities: what the result is a product of: the softmax's, or the guard's, in the dtype of the value.
        query, key: what is multiplied; the key is transposed, [N, H, D, L].
        factor: what their product is multiplied by.
        value, mask: see above.
    """

    softmax: ir.Node
    product: ir.Node
    guard: ir.Node | None
    probabilities: ir.Value
    query: _Scaled
    key: _Scaled
    factor: float
    value: ir.Value
    mask: ir.Value | None

    @property
    def scale(self) -> float:
        return self.query.scale * self.key.scale * self.factor


@dataclass
class _Gradient:
    """What computes the gradients of the value, of the query and of the transposed key, as these are multiplied.

    Attributes:
        flow: the gradient of the result.
        product: computes that of the probabilities.
    """

    flow: ir.Value
    product: ir.Node
    value: ir.Node
    query: ir.Node
    key: ir.Node


def fuse_attention(graph: ir.Graph, dtypes: Collection[ir.DataType] = (ir.DataType.FLOAT,)) -> None:
    """Replace attention by ``burnish.FusedAttention`` and ``burnish.FusedAttentionGrad``, in place.

    Of heads [N, H, M, D] of these ``dtypes``, float32 or bfloat16.
    """
    for node in list(graph):
        if node.op_type != "Softmax" or node.domain != "" or not _is_of_heads(node.outputs[0], (ir.DataType.FLOAT,)):
            continue
        found = _attention(node, dtypes)
        gradient = None if found is None else _gradient(found)
        if found is None or (gradient is None and _readers(found)):
            continue
        _fuse(graph, found, gradient)


def _attention(softmax: ir.Node, dtypes: Collection[ir.DataType]) -> _Attention | None:
    guard, given = _guard(softmax), softmax.inputs[0]
    probabilities = _rounded(softmax.outputs[0] if guard is None else guard.outputs[0])
    products = [user for user, place in probabilities.uses() if _is(user, "MatMul") and place == 0]
    if int(attribute_value(softmax, "axis", -1)) not in (-1, RANK - 1) or len(products) != 1:
        return None
    between = [softmax.outputs[0], probabilities, *(() if guard is None else guard.outputs)]
    if any(value.is_graph_output() for value in between):
        return None
    assert given is not None
    scores, mask = given, None
    widened = given.producer()
    if widened is not None and _is_cast(widened) and is_read_once(given) and widened.inputs[0] is not None:
        scores = widened.inputs[0]
    added = scores.producer()
    if added is not None and _is(added, "Add"):
        sides = [value for value in added.inputs if value is not None]
        masked = scores
        scores, mask = sides if _product(sides[0]) is not None else sides[::-1]
        if (
            not is_read_once(masked)
            or mask.dtype not in (ir.DataType.FLOAT, *dtypes)
            or not _broadcasts(mask, softmax.outputs[0])
        ):
            return None
    of_scores = _product(scores)
    if of_scores is None:
        return None
    maker, factor = of_scores
    query, key, value = *maker.inputs, products[0].inputs[1]
    if query is None or key is None or value is None or not _fit(query, key, value, dtypes):
        return None
    return _Attention(softmax, products[0], guard, probabilities, _Scaled.of(query), _Scaled.of(key), factor, value, mask)


def _guard(softmax: ir.Node) -> ir.Node | None:
    """What puts zeros in the place of probabilities that are NaN: those of a query that no key is shown to."""
    guards = [user for user, place in softmax.outputs[0].uses() if place == 2 and _replaces_nan(user, softmax.outputs[0])]
    return guards[0] if len(guards) == 1 else None


def _replaces_nan(node: ir.Node, probabilities: ir.Value) -> bool:
    """Whether a node puts zeros where probabilities are NaN."""
    condition = node.inputs[0].producer() if _is(node, "Where") and node.inputs[0] is not None else None
    zero = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    if condition is None or not _is(condition, "IsNaN") or condition.inputs[0] is not probabilities:
        return False
    return zero is not None and zero.size == 1 and not zero.any()


def _rounded(value: ir.Value) -> ir.Value:
    """A value in the dtype that products read it in: what the one cast of it gives, or itself where there is none."""
    casts = [user for user, _ in value.uses() if _is_cast(user)]
    return casts[0].outputs[0] if len(casts) == 1 else value


def _product(scores: ir.Value) -> tuple[ir.Node, float] | None:
    """The product that scores are, and what it is multiplied by on the way, where casts may stand; nothing else reads it."""
    factor = 1.0
    while (node := scores.producer()) is not None and is_read_once(scores):
        if _is(node, "MatMul"):
            return node, factor
        scaled = _Scaled.of(scores)
        if scaled.is_scaled:
            scores, factor = scaled.value, factor * scaled.scale
        elif _is_cast(node) and node.inputs[0] is not None:
            scores = node.inputs[0]
        else:
            break
    return None


def _readers(found: _Attention) -> list[tuple[ir.Node, int]]:
    """What reads the probabilities, each with the operand that they are, beside what makes others of them, and the product."""
    values = {found.softmax.outputs[0]: None, found.probabilities: None}
    readers = []
    if found.guard is not None:
        values[found.guard.outputs[0]] = None
        assert found.guard.inputs[0] is not None
        # Zeros stand in the gradient, too, where there are zeros in place of the probabilities.
        readers += [(user, place) for user, place in found.guard.inputs[0].uses() if not _guards_gradient(found, user)]
    readers += [use for value in values for use in value.uses()]
    makers = {value.producer() for value in values} | {found.product}
    if found.guard is not None and found.guard.inputs[0] is not None:
        makers.add(found.guard.inputs[0].producer())
    return [(user, place) for user, place in readers if user not in makers]


def _guards_gradient(found: _Attention, node: ir.Node) -> bool:
    """Whether a node puts zeros where probabilities are NaN in what is their gradient alone."""
    user = only_user(node.outputs[0])
    return _replaces_nan(node, found.softmax.outputs[0]) and SOFTMAX_GRAD.is_of(user)


def _gradient(found: _Attention) -> _Gradient | None:
    """What computes the gradient of attention; None where it is not there, or not of this form."""
    users = _readers(found)
    projections = [user for user, place in users if SOFTMAX_GRAD.is_of(user) and place == 1]
    transposed = [user for user, _ in users if _is(user, "Transpose") and _perm(user) == LAST_TWO]
    if len(users) != 2 or len(projections) != 1 or len(transposed) != 1:
        return None
    of_value, before = only_user(transposed[0].outputs[0]), projections[0].inputs[0]
    if found.guard is not None:
        shown = None if before is None else before.producer()
        if shown is None or not _guards_gradient(found, shown):
            return None
        before = shown.inputs[2]
    of_flow = None if before is None else _product(before)
    if of_value is None or not _is(of_value, "MatMul") or of_flow is None or of_flow[1] != 1.0:
        return None
    product = of_flow[0]
    flow = product.inputs[0]
    if of_value.inputs[0] is not transposed[0].outputs[0] or of_value.inputs[1] is not flow or flow is None:
        return None
    if flow.shape is None or not _are_transposed(product.inputs[1], found.value):
        return None
    scores = _scaled_like(projections[0].outputs[0], found.factor)
    if scores is None:
        return None
    users = list(scores.uses())
    of_query = [user for user, place in users if _is(user, "MatMul") and place == 0]
    of_key = [user for user, place in users if _is(user, "MatMul") and place == 1]
    if len(users) != 2 or len(of_query) != 1 or len(of_key) != 1 or scores.is_graph_output():
        return None
    if not _are_transposed(of_query[0].inputs[1], found.key.result):
        return None
    if not _are_transposed(of_key[0].inputs[0], found.query.result):
        return None
    return _Gradient(flow, product, of_value, of_query[0], of_key[0])


def _scaled_like(value: ir.Value, factor: float) -> ir.Value | None:
    """The gradient of the scores' product, from that of the scores: times the same numbers, with casts on the way; else None."""
    left = factor
    while (user := only_user(value)) is not None:
        result = user.outputs[0]
        scaled = _Scaled.of(result)
        if scaled.is_scaled and scaled.value is value:
            left /= scaled.scale
        elif not _is_cast(user):
            return None
        value = result
    return value if math.isclose(left, 1.0) else None


def _fuse(graph: ir.Graph, found: _Attention, gradient: _Gradient | None) -> None:
    wanted: dict[str, ir.Value] = {}
    if gradient is not None:
        for name, maker in (("query", gradient.query), ("key", gradient.key)):
            scaled = getattr(found, name)
            following = _scaled_back(maker.outputs[0], scaled) if scaled.is_scaled else None
            if following is None:  # what reads the gradient of the scaled operand stays
                setattr(found, name, _Scaled(scaled.result, scaled.result, 1.0))
            wanted[name] = following or maker.outputs[0]
        wanted["value"] = gradient.value.outputs[0]
    settings: dict[str, Any] = {"scale": found.scale, "zeros": int(found.guard is not None)}
    builder = Builder(graph, before=found.product)
    query, key, value = (builder.tensor(operand) for operand in (found.query.value, found.key.value, found.value))
    key = builder.op("Transpose", key, perm=LAST_TWO)
    mask = None if found.mask is None else builder.cast(builder.tensor(found.mask), ir.DataType.FLOAT)
    like = builder.tensor(found.product.outputs[0])
    result, logarithms = builder.op(
        "FusedAttention", query, key, value, mask, domain=BURNISH_DOMAIN, outputs=2, like=like, **settings
    )
    logarithms.value.type = ir.TensorType(ir.DataType.FLOAT)
    if gradient is not None:
        first = next(node for node in graph if node is gradient.product or node is gradient.value)
        builder = Builder(graph, before=first)
        added = None if mask is None else mask.value
        operands = [gradient.flow, query.value, key.value, value.value, result.value, logarithms.value, added]
        flows = builder.op(
            "FusedAttentionGrad",
            *(None if operand is None else builder.tensor(operand) for operand in operands),
            domain=BURNISH_DOMAIN,
            outputs=3,
            **settings,
        )
        for flow, operand in zip(flows, (query, key, value), strict=True):
            flow.value.type, flow.value.shape = operand.value.type, operand.value.shape
        of_key = builder.op("Transpose", flows[1], perm=LAST_TWO)
        for name, made in {"query": flows[0], "key": of_key, "value": flows[2]}.items():
            replace_value(wanted[name], made.value)
    replace_value(found.product.outputs[0], result.value)
    for node in [found.product, *(output.producer() for output in wanted.values())]:
        remove_unread(graph, node)


def _scaled_back(value: ir.Value, scaled: _Scaled) -> ir.Value | None:
    """The gradient of what was scaled: ``value``, that of the result, times the same number, if nothing else reads it."""
    user = only_user(value)
    if user is None:
        return None
    again = _Scaled.of(user.outputs[0])
    return again.result if again.value is value and again.scale == scaled.scale else None


def _is_of_heads(value: ir.Value, dtypes: Collection[ir.DataType]) -> bool:
    return value.dtype in dtypes and value.shape is not None and len(value.shape) == RANK


def _fit(query: ir.Value, key: ir.Value, value: ir.Value, dtypes: Collection[ir.DataType]) -> bool:
    """Whether [N, H, M, D], [N, H, D, L] and [N, H, L, D] are given, of one dtype, with extents that are known to be the same."""
    operands = (query, key, value)
    if not all(_is_of_heads(operand, dtypes) and operand.dtype == query.dtype for operand in operands):
        return False
    one, two, three = (list(operand.shape or ()) for operand in (query, key, value))
    pairs = [(one[0], two[0]), (one[0], three[0]), (one[1], two[1]), (one[1], three[1])]
    pairs += [(one[3], two[2]), (one[3], three[3]), (two[3], three[2])]
    return all(_are_same(left, right) for left, right in pairs)


def _are_same(one: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
    return one == other and (isinstance(one, int) or one.value is not None)


def _broadcasts(mask: ir.Value, scores: ir.Value) -> bool:
    """Whether a mask has a shape that the kernels read: on each axis, of all four or the last two, one or the scores' extent."""
    if mask.shape is None or scores.shape is None or len(mask.shape) not in (2, RANK):
        return False
    pairs = zip(mask.shape, scores.shape[-len(mask.shape) :], strict=True)
    return all(extent == 1 or _are_same(extent, wanted) for extent, wanted in pairs)


def _are_transposed(one: ir.Value | None, other: ir.Value) -> bool:
    """Whether one value is the other with its last two axes exchanged."""
    if one is None:
        return False
    (source, order), (base, expected) = _origin(one), _origin(other)
    return source is base and order == [*expected[:-2], expected[-1], expected[-2]]


def _origin(value: ir.Value) -> tuple[ir.Value, list[int]]:
    """What a value is a transposition of, and the order of its axes there."""
    order = list(range(RANK))
    while (node := value.producer()) is not None and _is(node, "Transpose") and node.inputs[0] is not None:
        perm = _perm(node)
        if len(perm) != RANK:
            break
        order = [perm[axis] for axis in order]
        value = node.inputs[0]
    return value, order


def _perm(node: ir.Node) -> list[int]:
    return [int(axis) for axis in attribute_value(node, "perm", list(range(RANK))[::-1])]


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == ""


def _is_cast(node: ir.Node) -> bool:
    """Whether a node is a cast of mixed precision, between float32 and bfloat16."""
    given = node.inputs[0] if node.inputs else None
    kinds = {None if given is None else given.dtype, node.outputs[0].dtype}
    return _is(node, "Cast") and kinds == {ir.DataType.FLOAT, ir.DataType.BFLOAT16}
