"""Axis rules of the standard's operators: the correspondence between axes of operands and axes of results.

Places picked by indices may belong to other samples, or to the same in another order: then a sample axis is lost. The last
rules return the axes that an operator works along.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import onnx_ir as ir

from burnish.operators.axes import Call, Layout, Untold, einsum_terms
from burnish.operators.extents import Axes, Axis, Kind, Number, Target, axis_of, broadcast, has, is_fixed, normal, regrouped


def broadcast_axes(call: Call, operands: Iterable[Axes]) -> Axes:
    def two(one: Axes, other: Axes) -> Axes:
        rank = max(len(one), len(other))
        padded: list[Axes] = [((),) * (rank - len(axes)) + axes for axes in (one, other)]
        pairs = enumerate(zip(*padded, strict=True))
        return tuple(broadcast(a, b, f"{call.key}:{axis - rank}", call.reason) for axis, (a, b) in pairs)

    return reduce(two, operands)


def elementwise_axes(call: Call) -> Axes:
    return broadcast_axes(call, [call.axes(index) for index in range(len(call)) if call.has(index)])


def like_first(call: Call) -> Axes:
    return call.axes()


def dropout(call: Call) -> list[Axes | None]:
    return [call.axes(), call.axes()]


def reduction(call: Call) -> Axes:
    rank = call.rank()
    named = call.named_axes()
    if not named:
        if call.attribute("noop_with_empty_axes", 0):
            return call.axes()
        named = range(rank)
    return _without(call, {axis % rank for axis in named})


def position(call: Call) -> Axes:
    return _without(call, {call.axis()})


def _without(call: Call, reduced: set[int]) -> Axes:
    axes = call.axes()
    if call.attribute("keepdims", 1):
        return tuple(() if index in reduced else axis for index, axis in enumerate(axes))
    return tuple(axis for index, axis in enumerate(axes) if index not in reduced)


def determinant(call: Call) -> Axes:
    return call.axes()[:-2]


def largest(call: Call) -> list[Axes | None]:
    """TopK: along a sample axis it reorders the samples."""
    at = call.axis(default=-1)
    axes, (count,) = call.axes(), call.numbers(1)
    chosen: Axis = call.lost()
    if is_fixed(axes[at]) and count.is_fixed:
        chosen = call.fixed("chosen") if count.integer is None else call.places(count.integer)
    return [(*axes[:at], chosen, *axes[at + 1 :])] * 2


def reversed_sequence(call: Call) -> Axes:
    axes, at = list(call.axes()), int(call.attribute("time_axis", 0))
    axes[at] = axes[at] if is_fixed(axes[at]) else call.lost()
    return tuple(axes)


_EXPONENTIAL = ("Exp", "Softmax", "LogSoftmax")

LARGEST = 2**31 - 1
"""A slice bound from here on means "to the end"."""


def reshape(call: Call) -> Axes:
    axes = call.axes()
    copies = not call.attribute("allowzero", 0)
    target: list[Target] = []
    for at, number in enumerate(call.numbers(1)):
        if number == Number(0) and copies and at < len(axes):
            number = Number.of(axes[at])
        target.append(None if number == Number(-1) else number)
    return regrouped(axes, target, call.key, call.reason)


def flatten(call: Call) -> Axes:
    axes, at = call.axes(), int(call.attribute("axis", 1))
    at = at % len(axes) if axes and at != len(axes) else at
    return tuple(normal(factor for axis in part for factor in axis) for part in (axes[:at], axes[at:]))


def squeeze(call: Call) -> Axes:
    axes = call.axes()
    named = call.named_axes()
    if named is None:
        extents = [Number.of(axis).integer for axis in axes]
        if None in extents:
            raise Untold(f"{call.reason}: it does not say which axes it removes")
        named = [at for at, extent in enumerate(extents) if extent == 1]
    removed = {axis % len(axes) for axis in named}
    target = [Number.of(axis) for at, axis in enumerate(axes) if at not in removed]
    return regrouped(axes, target, call.key, call.reason)


def unsqueeze(call: Call) -> Axes:
    named = call.named_axes()
    if named is None:
        raise Untold(call.reason)
    rank = call.rank() + len(named)
    added, rest = {axis % rank for axis in named}, iter(call.axes())
    return tuple(() if at in added else next(rest) for at in range(rank))


def transpose(call: Call) -> Axes:
    axes, order = call.axes(), call.attribute("perm")
    return tuple(axes[axis] for axis in (range(len(axes))[::-1] if order is None else order))


def concat(call: Call) -> Axes:
    """Along a sample axis the samples of one operand follow all those of another: a worker's samples are not adjacent."""
    at = call.axis()
    parts = [call.axes(index) for index in range(len(call))]
    if len(parts) == 1:
        return parts[0]
    joined = list(broadcast_axes(call, [(*axes[:at], (), *axes[at + 1 :]) for axes in parts]))
    along = [axes[at] for axes in parts]
    joined[at] = call.lost("along")
    if all(map(is_fixed, along)):
        extents = [Number.of(axis).integer for axis in along]
        known = [extent for extent in extents if extent is not None]
        joined[at] = call.places(sum(known)) if len(known) == len(extents) else call.fixed("along")
    return tuple(joined)


def split(call: Call) -> list[Axes | None]:
    axes, at, count = call.axes(), call.axis(), len(call.node.outputs)
    if count == 1:
        return [axes]
    sizes = call.integers(1) if call.has(1) else None
    parts: list[Axes | None] = []
    for index in range(count):
        part = call.lost(f"part {index}")
        if is_fixed(axes[at]):
            part = call.fixed(f"part {index}") if sizes is None else call.places(sizes[index])
        parts.append((*axes[:at], part, *axes[at + 1 :]))
    return parts


def slice_(call: Call) -> Axes:
    axes = list(call.axes())
    starts, ends = call.numbers(1), call.numbers(2)
    along = call.integers(3) if call.has(3) else list(range(len(starts)))
    steps = call.integers(4) if call.has(4) else [1] * len(starts)
    if along is None or not len(starts) == len(ends) == len(along):
        raise Untold(call.reason)
    for index, (start, end, axis) in enumerate(zip(starts, ends, along, strict=True)):
        step = None if steps is None else steps[index]
        axes[axis] = _sliced(call, axes[axis], start, end, step, f"along {axis}")
    return tuple(axes)


def _sliced(call: Call, axis: Axis, start: Number, end: Number, step: int | None, name: str) -> Axis:
    from_first = start == Number(0) and step == 1
    last = end.integer if not end.factors else None
    if from_first and (end == Number.of(axis) or (last is not None and last >= LARGEST)):
        return axis
    if not is_fixed(axis) or not start.is_fixed or not end.is_fixed:
        return call.lost(name)
    extent = Number.of(axis).integer
    first = start.integer
    if extent is not None and first is not None and last is not None and step:
        end_of = None if step < 0 and last < -extent else last
        return call.places(len(range(*slice(first, end_of, step).indices(extent))))
    return axis_of(end, f"{call.key}:{name}", call.reason) if from_first and end.factors else call.fixed(name)


def expand(call: Call) -> Axes:
    numbers = call.numbers(1)
    target = tuple(axis_of(number, f"{call.key}:target {at}", call.reason) for at, number in enumerate(numbers))
    return broadcast_axes(call, [call.axes(), target])


def tile(call: Call) -> Axes:
    """Copies of a whole axis follow one another: their number is the slowest factor."""
    axes = []
    for at, (axis, number) in enumerate(zip(call.axes(), call.numbers(1), strict=True)):
        copies = axis_of(number, f"{call.key}:copies {at}", call.reason)
        axes.append(normal((*copies, *axis)))
    return tuple(axes)


def pad(call: Call) -> Axes:
    axes = list(call.axes())
    added = call.numbers(1)
    along = call.integers(3) if call.has(3) else list(range(len(axes)))
    if along is None or len(added) != 2 * len(along):
        raise Untold(call.reason)
    for at, (before, behind) in zip(along, zip(added[: len(along)], added[len(along) :], strict=True), strict=True):
        if before == behind == Number(0):
            continue
        sizes = (Number.of(axes[at]).integer, before.integer, behind.integer)
        known = [size for size in sizes if size is not None]
        if not is_fixed(axes[at]) or not (before.is_fixed and behind.is_fixed):
            axes[at] = call.lost(f"along {at}")
        else:
            axes[at] = call.places(sum(known)) if len(known) == len(sizes) else call.fixed(f"along {at}")
    return tuple(axes)


def filled(call: Call) -> Axes:
    return tuple(axis_of(number, f"{call.key}:{at}", call.reason) for at, number in enumerate(call.numbers(0)))


def drawn(call: Call) -> Axes:
    return tuple(call.places(int(extent)) for extent in call.attribute("shape"))


def multinomial(call: Call) -> Axes:
    return call.axes()[0], call.places(int(call.attribute("sample_size", 1)))


def counted(call: Call) -> Axes:
    """A Range from 0 to the number of samples numbers a worker's own samples."""
    start, limit, step = (call.numbers(index) for index in range(3))
    if start == (Number(0),) and step == (Number(1),):
        return (axis_of(limit[0], f"{call.key}:0", call.reason),)
    if not all(number.is_fixed for (number,) in (start, limit, step)):
        return (call.lost(),)
    bounds = [number.integer for (number,) in (start, limit, step)]
    known = [bound for bound in bounds if bound is not None]
    return (call.places(len(range(*known))) if len(known) == 3 and known[2] else call.fixed("count"),)


def non_zero(call: Call) -> Axes:
    count = call.fixed("count") if call.layout(0).is_constant else call.lost("count")
    return call.places(max(1, call.rank())), count


def compressed(call: Call) -> Axes:
    if "axis" not in call.node.attributes:
        return (call.lost(),)
    at, axes = call.axis(), call.axes()
    count = call.fixed("count") if is_fixed(axes[at]) and call.layout(1).is_constant else call.lost("count")
    return (*axes[:at], count, *axes[at + 1 :])


def resized(call: Call) -> Axes:
    """Axes of unchanged extent stay the same if samples are among them; the others belong to the image or signal."""
    axes = call.axes()
    if any(has(axis, Kind.LOST) for axis in axes):
        raise Untold(call.reason)
    unchanged = _kept(call, len(axes))
    results: list[Axis] = []
    for at, (axis, extent) in enumerate(zip(axes, call.declared(), strict=True)):
        if is_fixed(axis):
            results.append(call.fixed(f"along {at}") if extent is None else call.places(extent))
        else:
            results.append(axis if at in unchanged else call.lost(f"along {at}"))
    return tuple(results)


def _kept(call: Call, rank: int) -> set[int]:
    operator = call.node.op_type
    if operator == "DFT":
        transformed = call.integers(2) if call.has(2) else [int(call.attribute("axis", -2))]
        return set(range(rank)) - {transformed[0] % rank} if transformed else set()
    along = [axis % rank for axis in call.attribute("axes", None) or range(rank)]
    unchanged = set(range(rank)) - set(along)
    sizes = {"CenterCropPad": 1, "Resize": 3}.get(operator)
    if sizes is not None and call.has(sizes):
        if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
            return unchanged
        axes = call.axes()
        return unchanged | {at for at, number in zip(along, call.numbers(sizes), strict=False) if number == Number.of(axes[at])}
    scales = call.array(2 if operator == "Resize" else 1)
    return unchanged if scales is None else unchanged | {at for at, scale in zip(along, scales, strict=False) if scale == 1.0}


def product_axes(call: Call, left: Axes, right: Axes) -> Axes:
    """Return the axes of a product by the rules of ``numpy.matmul``."""
    if not left or not right:
        raise Untold(call.reason)
    outer = broadcast_axes(call, [left[:-2], right[:-2]])
    return (*outer, *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))


def matmul(call: Call) -> Axes:
    return product_axes(call, call.axes(0), call.axes(1))


def quantized_matmul(call: Call) -> Axes:
    return product_axes(call, call.axes(0), call.axes(3))


def gemm(call: Call) -> Axes:
    left, right = call.axes(0), call.axes(1)
    rows, columns = left[1 if call.attribute("transA", 0) else 0], right[0 if call.attribute("transB", 0) else 1]
    added = [call.axes(2)] if call.has(2) else []
    return broadcast_axes(call, [(rows, columns), *added])


def einsum(call: Call) -> Axes:
    terms, result = einsum_terms(str(call.attribute("equation")))
    letters: dict[str, Axis] = {}
    ellipses: list[Axes] = []
    for index, term in enumerate(terms):
        axes = call.axes(index)
        before, dots, behind = term.partition("...")
        for letter, axis in (*zip(before, axes, strict=False), *zip(reversed(behind), reversed(axes), strict=False)):
            letters[letter] = broadcast(letters.get(letter, ()), axis, f"{call.key}:{letter}", call.reason)
        if dots:
            ellipses.append(axes[len(before) : len(axes) - len(behind)])
    before, _, behind = result.partition("...")
    wide = broadcast_axes(call, ellipses) if ellipses else ()
    # A letter without an operand is an error in the model, which the operator reports.
    return (*(letters.get(letter, ()) for letter in before), *wide, *(letters.get(letter, ()) for letter in behind))


def image(call: Call) -> list[Axes | None]:
    return _of_each_sample(call, call.rank(), 0)


def moved_image(call: Call) -> list[Axes | None]:
    return _of_each_sample(call, call.rank(), 1)


def of_another_rank(call: Call) -> list[Axes | None]:
    return _of_each_sample(call, None, 0)


def _of_each_sample(call: Call, rank: int | None, batch: int) -> list[Axes | None]:
    """Keep the samples along the first axis; the other axes of the result are made from the other axes.

    Args:
        call: the node.
        rank: the rank of the result if shape inference has none.
        batch: number of leading sample axes in the other operands.
    """
    if not call.axes():
        return [None] * len(call.node.outputs)  # the operator does not accept a scalar: the engine will report it
    first, *others = call.axes()
    for index in range(1, len(call)):
        others += call.axes(index)[batch:] if call.has(index) else ()
    rest = call.rest if all(map(is_fixed, others)) else call.lost_rest
    return [(first, *rest(output, 1, rank)) for output in range(len(call.node.outputs))]


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


def attention(call: Call) -> Axes:
    axes = call.axes()
    return (*axes[:-1], *call.rest(0, len(axes) - 1))


def _picked(call: Call, axes: Sequence[Axis]) -> Axes:
    return tuple(axis if is_fixed(axis) else call.lost(f"picked {at}") for at, axis in enumerate(axes))


def gather(call: Call) -> Axes:
    data, indices, at = call.axes(0), call.axes(1), call.axis()
    return (*data[:at], *(indices if is_fixed(data[at]) else _picked(call, indices)), *data[at + 1 :])


def gather_elements(call: Call) -> Axes:
    data, indices, at = call.axes(0), call.axes(1), call.axis()
    if not is_fixed(data[at]):
        return _picked(call, indices)
    pairs = enumerate(zip(data, indices, strict=True))
    return tuple(
        index_axis if axis == at or is_fixed(index_axis) else broadcast(index_axis, data_axis, f"{call.key}:{axis}", call.reason)
        for axis, (data_axis, index_axis) in pairs
    )


def gather_slices(call: Call) -> Axes:
    data, indices = call.axes(0), call.axes(1)
    batch = int(call.attribute("batch_dims", 0))
    depth = Number.of(indices[-1]).integer
    if depth is None:
        raise Untold(call.reason)
    addressed, places = data[batch : batch + depth], indices[batch:-1]
    if not all(map(is_fixed, addressed)):
        places = _picked(call, places)
    return (*indices[:batch], *places, *data[batch + depth :])


def scatter_elements(call: Call) -> Axes:
    axes, at = call.axes(), call.axis()
    put = _where_told(call, axes, call.axes(1))
    return (*put[:at], *_picked(call, axes[at : at + 1]), *put[at + 1 :])


def scatter_slices(call: Call) -> Axes:
    axes, depth = call.axes(), Number.of(call.axes(1)[-1]).integer
    if depth is None:
        raise Untold(call.reason)
    rest = axes[depth:]
    return (*_picked(call, axes[:depth]), *_where_told(call, rest, call.axes(2)[-len(rest) :] if rest else ()))


def _where_told(call: Call, axes: Axes, put: Axes) -> Axes:
    """Return the axes of the tensor that is written to; an axis is lost if the one of the written values is."""
    pairs = enumerate(zip(axes, put, strict=True))
    return tuple(call.lost(f"put {at}") if has(new, Kind.LOST) else axis for at, (axis, new) in pairs)


def one_hot(call: Call) -> Axes:
    axes = list(call.axes())
    (depth,) = call.numbers(1)
    at = int(call.attribute("axis", -1)) % (len(axes) + 1)
    count = call.lost("depth")
    if depth.is_fixed:
        count = call.fixed("depth") if depth.integer is None else call.places(depth.integer)
    axes.insert(at, count)
    return tuple(axes)


def regions(call: Call) -> Axes:
    """One row per region, of any sample."""
    return (call.axes(1)[0], *call.rest(0, 1))


def shape(call: Call) -> Axes:
    return (call.places(len(call.axes()[call.attribute("start", 0) : call.attribute("end")])),)


def scalar(call: Call) -> Axes:
    return ()


ROUNDS = 4
"""After this many rounds, the layouts carried by a loop have settled, or are lost."""


def branches(call: Call) -> list[Layout]:
    told = []
    for name in ("then_branch", "else_branch"):
        branch = call.node.attributes[name].as_graph()
        call.analysis.follow(branch)
        told.append([call.analysis.layout(value) for value in branch.outputs])
    constant = call.layout(0).is_constant
    return [_either(call, one, other, f"result {index}", constant) for index, (one, other) in enumerate(zip(*told, strict=True))]


def loop(call: Call) -> list[Layout]:
    body = call.node.attributes["body"].as_graph()
    constant = all(layout.is_constant for layout in call.operands[:2] if layout is not None)
    carried = [_without_numbers(call.layout(index)) for index in range(2, len(call))]
    call.analysis.assume(body.inputs[0], Layout((), is_constant=True))
    call.analysis.assume(body.inputs[1], Layout((), is_constant=constant))
    carried, results = _settled(call, body, body.inputs[2:], carried, 1)
    constant = constant and call.analysis.layout(body.outputs[0]).is_constant
    count = call.fixed("count") if constant else call.lost("count")
    return [*carried, *(_stacked(result, count, 0) for result in results)]


def scan(call: Call) -> list[Layout]:
    body = call.node.attributes["body"].as_graph()
    number = int(call.attribute("num_scan_inputs"))
    states = [_without_numbers(call.layout(index)) for index in range(len(call) - number)]
    scanned: Axis = ()
    along = call.attribute("scan_input_axes", [0] * number)
    for index, at in zip(range(len(states), len(call)), along, strict=True):
        axes = call.axes(index)
        at = at % len(axes)
        scanned = axes[at]
        call.analysis.assume(body.inputs[index], Layout((*axes[:at], *axes[at + 1 :]), call.layout(index).is_constant))
    directions = [*call.attribute("scan_input_directions", ()), *call.attribute("scan_output_directions", ())]
    if any(directions) and not is_fixed(scanned):
        scanned = call.lost("scanned")
    states, results = _settled(call, body, body.inputs[: len(states)], states, 0)
    places = call.attribute("scan_output_axes", [0] * len(results))
    return [*states, *(_stacked(result, scanned, at) for result, at in zip(results, places, strict=True))]


def _settled(
    call: Call, body: ir.Graph, inputs: Sequence[ir.Value], carried: list[Layout], first: int
) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts that a body carries from one round to the next, and those of its other outputs.

    ``first`` is the index of the first carried output.
    """
    for last in (*[False] * ROUNDS, True):
        for value, layout in zip(inputs, carried, strict=True):
            call.analysis.assume(value, layout)
        call.analysis.follow(body)
        told = [call.analysis.layout(value) for value in body.outputs[first:]]
        pairs = enumerate(zip(carried, told, strict=False))
        following = [_either(call, one, other, f"carried {index}", True) for index, (one, other) in pairs]
        if following == carried:
            break
        carried = [Layout(None, reason=call.reason) for _ in carried] if last else following
    return carried, told[len(carried) :]


def _without_numbers(layout: Layout) -> Layout:
    return Layout(layout.axes, layout.is_constant, None, layout.reason)


def _stacked(layout: Layout, count: Axis, at: int) -> Layout:
    if layout.axes is None:
        return layout
    at = at % (len(layout.axes) + 1)
    return Layout((*layout.axes[:at], count, *layout.axes[at:]), layout.is_constant and is_fixed(count))


def _either(call: Call, one: Layout, other: Layout, name: str, constant: bool) -> Layout:
    constant = constant and one.is_constant and other.is_constant
    if one.axes is None or other.axes is None or len(one.axes) != len(other.axes):
        return Layout(None, constant, reason=one.reason or other.reason or call.reason)
    axes = tuple(
        _either_axis(call, a, b, f"{name} axis {at}") for at, (a, b) in enumerate(zip(one.axes, other.axes, strict=True))
    )
    return Layout(axes, constant)


def _either_axis(call: Call, one: Axis, other: Axis, name: str) -> Axis:
    if one == other:
        return one
    if is_fixed(one) and is_fixed(other):
        return call.fixed(name)
    if all(has(axis, Kind.SAMPLES) and not has(axis, Kind.LOST) for axis in (one, other)):
        return broadcast(one, other, f"{call.key}:{name}", call.reason)
    return call.lost(name)


def named_axis(call: Call) -> Axes:
    return (call.axes()[call.axis(default=-1)],)


def following_axes(call: Call) -> Axes:
    return call.axes()[call.axis(default=-1) :]


def reduced_axes(call: Call) -> Axes:
    axes, named = call.axes(), call.named_axes()
    if not named:
        return () if call.attribute("noop_with_empty_axes", 0) else axes
    return tuple(axes[axis % len(axes)] for axis in named)


def extreme_axes(call: Call) -> Axes:
    """ReduceMax and ReduceMin: no axes if the result is only subtracted in the exponents of a softmax, which cancels it."""
    readers = call.node.outputs[0].consumers()
    return () if readers and all(_is_exponent(reader) for reader in readers) else reduced_axes(call)


def _is_exponent(node: ir.Node) -> bool:
    return node.op_type == "Sub" and any(reader.op_type in _EXPONENTIAL for reader in node.outputs[0].consumers())


def contracted(call: Call) -> Axes:
    return call.axes(0)[-1:] if len(call.axes(1)) > 0 else ()


def contracted_by_gemm(call: Call) -> Axes:
    return (call.axes(0)[0 if call.attribute("transA", 0) else 1],)


def summed_by_einsum(call: Call) -> Axes:
    equation = str(call.attribute("equation"))
    if "->" not in equation or "..." in equation.partition("->")[0]:
        return ()
    terms, result = einsum_terms(equation)
    pairs = [(letter, axis) for index, term in enumerate(terms) for letter, axis in zip(term, call.axes(index), strict=True)]
    return tuple(axis for letter, axis in pairs if letter not in result)


def time_axis(call: Call) -> Axes:
    return (call.axes()[1 if call.attribute("layout", 0) else 0],)


def keys_axis(call: Call) -> Axes:
    return (call.axes(1)[-2],)


def scanned(call: Call) -> Axes:
    """The axes that a Scan iterates over, if each round reads a state from the round before."""
    number = int(call.attribute("num_scan_inputs"))
    states = len(call) - number
    along = call.attribute("scan_input_axes", [0] * number)
    return tuple(call.axes(states + index)[axis] for index, axis in enumerate(along)) if states else ()


def cumulated(call: Call) -> Axes:
    at = call.integers(1)
    return () if not at else (call.axes()[at[0] % call.rank()],)


def places_of_instance(call: Call) -> Axes:
    return call.axes()[2:]
