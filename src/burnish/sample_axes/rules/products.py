"""Products of matrices, and operators on images and sequences, whose samples are along one axis."""

from __future__ import annotations

from burnish.sample_axes.extents import Axes, Axis, broadcast, is_fixed
from burnish.sample_axes.layouts import Call, Untold, gives_axes
from burnish.sample_axes.rules.elements import broadcast_axes


def product_axes(call: Call, left: Axes, right: Axes) -> Axes:
    """Those of a product by ``numpy.matmul``."""
    if not left or not right:
        raise Untold(call.reason)
    outer = broadcast_axes(call, [left[:-2], right[:-2]])
    return (*outer, *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))


@gives_axes("MatMul", "MatMulInteger")
def matmul(call: Call) -> Axes:
    return product_axes(call, call.axes(0), call.axes(1))


@gives_axes("QLinearMatMul")
def quantized_matmul(call: Call) -> Axes:
    return product_axes(call, call.axes(0), call.axes(3))


@gives_axes("Gemm")
def gemm(call: Call) -> Axes:
    left, right = call.axes(0), call.axes(1)
    rows, columns = left[1 if call.attribute("transA", 0) else 0], right[0 if call.attribute("transB", 0) else 1]
    added = [call.axes(2)] if call.has(2) else []
    return broadcast_axes(call, [(rows, columns), *added])


@gives_axes("Einsum")
def einsum(call: Call) -> Axes:
    terms, _, result = str(call.attribute("equation")).replace(" ", "").partition("->")
    letters: dict[str, Axis] = {}
    ellipses: list[Axes] = []
    for index, term in enumerate(terms.split(",")):
        axes = call.axes(index)
        before, dots, behind = term.partition("...")
        for letter, axis in (*zip(before, axes, strict=False), *zip(reversed(behind), reversed(axes), strict=False)):
            letters[letter] = broadcast(letters.get(letter, ()), axis, f"{call.key}:{letter}", call.reason)
        if dots:
            ellipses.append(axes[len(before) : len(axes) - len(behind)])
    if not result and "->" not in str(call.attribute("equation")):
        once = sorted(letter for letter in letters if terms.count(letter) == 1)
        result = ("..." if ellipses else "") + "".join(once)
    before, _, behind = result.partition("...")
    wide = broadcast_axes(call, ellipses) if ellipses else ()
    # A letter of no operand is an error of the model, which the operator names.
    return (*(letters.get(letter, ()) for letter in before), *wide, *(letters.get(letter, ()) for letter in behind))


@gives_axes(
    "Conv",
    "ConvInteger",
    "ConvTranspose",
    "QLinearConv",
    "DepthToSpace",
    "SpaceToDepth",
    "GlobalAveragePool",
    "GlobalLpPool",
    "GlobalMaxPool",
    "AveragePool",
    "LpPool",
    "MaxPool",
)
def image(call: Call) -> list[Axes | None]:
    return _of_each_sample(call, call.rank(), 0)


@gives_axes("DeformConv", "GridSample", "MaxUnpool")
def moved_image(call: Call) -> list[Axes | None]:
    return _of_each_sample(call, call.rank(), 1)


@gives_axes("AffineGrid", "Col2Im", "STFT")
def of_another_rank(call: Call) -> list[Axes | None]:
    return _of_each_sample(call, None, 0)


def _of_each_sample(call: Call, rank: int | None, batch: int) -> list[Axes | None]:
    """The samples stay along the first axis; the other axes of the result are made of the other axes.

    Args:
        call: the node.
        rank: of the result, where shape inference knows none.
        batch: how many first axes of the other operands are those of the samples.
    """
    if not call.axes():
        return [None] * len(call.node.outputs)  # a scalar, which such an operator does not take: the engine will say so
    first, *others = call.axes()
    for index in range(1, len(call)):
        others += call.axes(index)[batch:] if call.has(index) else ()
    rest = call.rest if all(map(is_fixed, others)) else call.lost_rest
    return [(first, *rest(output, 1, rank)) for output in range(len(call.node.outputs))]


@gives_axes("RNN", "GRU", "LSTM")
def recurrent(call: Call) -> list[Axes | None]:
    time, samples = call.axes()[:2]
    first = bool(call.attribute("layout", 0))
    if first:
        time, samples = samples, time
    directions = call.places(2 if call.attribute("direction", "forward") == "bidirectional" else 1)
    size = call.places(int(call.attribute("hidden_size"))) if "hidden_size" in call.node.attributes else call.fixed("size")
    whole = (samples, time, directions, size) if first else (time, directions, samples, size)
    last = (samples, directions, size) if first else (directions, samples, size)
    return [whole, last, last]


@gives_axes("Attention")
def attention(call: Call) -> Axes:
    axes = call.axes()
    return (*axes[:-1], *call.rest(0, len(axes) - 1))
