"""Fusion of products with a weight: the weight's transposition, the bias and a ReLU go into the product, and so do their
gradients.

A linear layer reaches the graph as ``MatMul(x, Transpose(weight)) + bias`` or as a ``Gemm``; the gradient of its weight as a
``Gemm`` whose result is transposed. Each becomes one product, of the operands as they lie in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, constant_array, remove_node, replace_node
from burnish.graph.uses import only_user, remove_unread
from burnish.ops.activation import RELU_GRAD

SWAPPED = [1, 0]
DTYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


def fuse_linear(graph: ir.Graph) -> None:
    """Replace products with a matrix by ``burnish.FusedLinear`` and ``burnish.FusedLinearWeightGrad``, in place.

    Of float32 and bfloat16; the latter adds a bias before it rounds. All gradients of a layer of float32 over a matrix become one
    ``burnish.FusedLinearGrad``.
    """
    for node in list(graph):
        if node.domain != "" or node.op_type not in ("MatMul", "Gemm") or node.outputs[0].dtype not in DTYPES:
            continue
        if node.op_type == "Gemm" and attribute_value(node, "transA", 0):
            _fuse_weight_gradient(graph, node)
        else:
            _fuse_product(graph, node)
    places = {node: place for place, node in enumerate(graph)}
    for node in list(graph):
        if node.op_type == "FusedLinearWeightGrad" and node.domain == BURNISH_DOMAIN:
            _fuse_gradients(graph, node, places)


def _fuse_product(graph: ir.Graph, node: ir.Node) -> None:
    """x W or x W' with or without a bias: [..., K] and [K, N] or [N, K] to [..., N]."""
    x, matrix = node.inputs[:2]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or matrix is None or _rank(matrix) != 2 or (_rank(x) or 0) < 2 or attribute_value(node, "alpha", 1.0) != 1.0:
        return
    if bias is not None and (attribute_value(node, "beta", 1.0) != 1.0 or not _is_per_column(bias, node.outputs[0])):
        return
    transposed = bool(attribute_value(node, "transB", 0)) if node.op_type == "Gemm" else False
    swapped = matrix.producer()
    if swapped is not None and _swaps(swapped):
        matrix, transposed = swapped.inputs[0], not transposed
    else:
        swapped = None
    assert matrix is not None
    last = node
    addition = only_user(node.outputs[0], "Add") if bias is None else None
    if addition is not None:
        other = addition.inputs[1] if addition.inputs[0] is node.outputs[0] else addition.inputs[0]
        if other is not None and _is_per_column(other, node.outputs[0]):
            last, bias = addition, other
    activation = only_user(last.outputs[0], "Relu")
    if activation is not None:
        last = activation
    builder = Builder(graph, before=last)
    operands = [builder.tensor(x), builder.tensor(matrix), None if bias is None else builder.tensor(bias)]
    like = builder.tensor(last.outputs[0])
    relu = int(activation is not None)
    result = builder.op("FusedLinear", *operands, domain=BURNISH_DOMAIN, like=like, transposed=int(transposed), relu=relu)
    replace_node(last, result)
    remove_unread(graph, addition, node, swapped)


def _fuse_weight_gradient(graph: ir.Graph, node: ir.Node) -> None:
    """A'B, transposed where the graph transposes it: a transposed product is the product of the operands exchanged."""
    left, right = node.inputs[:2]
    if left is None or right is None or len(node.inputs) > 2 or attribute_value(node, "alpha", 1.0) != 1.0:
        return
    if attribute_value(node, "transB", 0):
        return
    last = node
    users = {user for user, _ in node.outputs[0].uses()}
    if len(users) == 1 and not node.outputs[0].is_graph_output():
        user = users.pop()
        if _swaps(user):
            last, left, right = user, right, left
    builder = Builder(graph, before=last)
    operands = [builder.tensor(left), builder.tensor(right)]
    like = builder.tensor(last.outputs[0])
    replace_node(last, builder.op("FusedLinearWeightGrad", *operands, domain=BURNISH_DOMAIN, like=like))
    if last is not node:
        remove_node(node)


class _Gradients(NamedTuple):
    """The gradients of a layer.

    Attributes:
        dy, x: the gradient of its result, and what it was given.
        swapped: whether the gradient of the weight is x' dy, in place of dy' x.
        weight: computes the gradient of the weight.
        sums: computes that of the bias, if anything does.
        product: computes that of x, if anything does.
        relu: the gradient of the ReLU that gave x, if that is all that reads the product.
    """

    dy: ir.Value
    x: ir.Value
    swapped: bool
    weight: ir.Node
    sums: ir.Node | None
    product: ir.Node | None
    relu: ir.Node | None

    @classmethod
    def around(cls, node: ir.Node, swapped: bool) -> _Gradients | None:
        """What is there beside the gradient of a weight that a node computes, from dy and x, or x and dy where ``swapped``."""
        dy, x = node.inputs[::-1] if swapped else node.inputs
        if dy is None or x is None or dy.dtype != ir.DataType.FLOAT or _rank(dy) != 2 or _rank(x) != 2:
            return None
        users = [user for user, _ in dy.uses() if user.graph is node.graph]
        sums = next((user for user in users if _sums_rows(user)), None)
        product = next((user for user in users if _is_plain_product(user, dy)), None)
        relu = None if product is None else only_user(product.outputs[0], RELU_GRAD.name, BURNISH_DOMAIN)
        if product is not None and relu is not None and (relu.inputs[0] is not product.outputs[0] or relu.inputs[1] is not x):
            relu = None
        return cls(dy, x, swapped, node, sums, product, relu)

    @property
    def matrix(self) -> ir.Value | None:
        """What the gradient of x is multiplied with."""
        return None if self.product is None else self.product.inputs[1]

    @property
    def replaced(self) -> tuple[ir.Node | None, ir.Node, ir.Node | None]:
        """What computes the gradients of x, of the weight and of the bias."""
        return self.relu or self.product, self.weight, self.sums

    def first(self, places: dict[ir.Node, int]) -> ir.Node | None:
        """The first of the nodes in the graph, where one may stand for all: what they read is there by then. Else None."""
        first = min((node for node in (*self.replaced, self.product) if node is not None), key=places.__getitem__)
        producers = [None if value is None else value.producer() for value in (self.dy, self.x, self.matrix)]
        return first if all(node is None or places.get(node, -1) < places[first] for node in producers) else None


def _fuse_gradients(graph: ir.Graph, node: ir.Node, places: dict[ir.Node, int]) -> None:
    """The gradients of the weight, of the bias and of what a layer was given, whatever of them is there, as one node."""
    found = [gradients for swapped in (False, True) if (gradients := _Gradients.around(node, swapped)) is not None]
    # The product of a forward pass looks like one of the backward pass: the more nodes, the likelier it is the latter.
    for gradients in sorted(found, key=lambda gradients: gradients.replaced.count(None)):
        first = gradients.first(places)
        if first is not None and gradients.replaced.count(None) < 2:
            _join_gradients(graph, gradients, first, places)
            return
    # Where x is there only later, as what is computed again is, the gradient of the bias waits for that of the weight.
    for gradients in found:
        alone = gradients._replace(product=None, relu=None)
        if alone.sums is not None and all(
            places.get(user, -1) > places[node] for user, _ in alone.sums.outputs[0].uses() if user.graph is graph
        ):
            _join_gradients(graph, alone, node, places)
            return


def _join_gradients(graph: ir.Graph, gradients: _Gradients, first: ir.Node, places: dict[ir.Node, int]) -> None:
    builder = Builder(graph, before=first)
    product, matrix = gradients.product, gradients.matrix
    flags: dict[str, Any] = {
        "transposed": 0 if product is None else attribute_value(product, "transposed", 0),
        "swapped": int(gradients.swapped),
        "relu": int(gradients.relu is not None),
        "bias": int(gradients.sums is not None),
    }
    operands = [builder.tensor(gradients.dy), builder.tensor(gradients.x), None if matrix is None else builder.tensor(matrix)]
    results = builder.op("FusedLinearGrad", *operands, domain=BURNISH_DOMAIN, outputs=3, **flags)
    made = results[0].value.producer()
    assert made is not None
    places[made] = places[first]
    for result, replaced in zip(results, gradients.replaced, strict=True):
        result.value.type = gradients.dy.type
        if replaced is not None:
            result.value.shape = replaced.outputs[0].shape
            replace_node(replaced, result)
    if gradients.relu is not None:
        remove_unread(graph, product)


def _is_plain_product(node: ir.Node, x: ir.Value) -> bool:
    """Whether a node multiplies x [M, N] with a matrix, and does nothing else."""
    if node.op_type != "FusedLinear" or node.domain != BURNISH_DOMAIN or node.inputs[0] is not x or node.inputs[1] is x:
        return False
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    return not has_bias and not attribute_value(node, "relu", 0)


def _sums_rows(node: ir.Node) -> bool:
    """Whether a node adds up the rows of a matrix, to a vector."""
    if node.op_type != "ReduceSum" or node.domain != "" or attribute_value(node, "keepdims", 1):
        return False
    axes = constant_array(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    return axes is not None and axes.tolist() == [0]


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _is_per_column(value: ir.Value, product: ir.Value) -> bool:
    """Whether a value holds one element per column of a product."""
    if value.shape is None or product.shape is None or len(value.shape) != 1 or value.dtype != product.dtype:
        return False
    return isinstance(value.shape[0], int) and value.shape[0] == product.shape[-1]


def _swaps(node: ir.Node) -> bool:
    """Whether a node transposes a matrix."""
    if node.op_type != "Transpose" or node.domain != "" or node.inputs[0] is None or _rank(node.inputs[0]) != 2:
        return False
    return list(attribute_value(node, "perm", SWAPPED)) == SWAPPED
