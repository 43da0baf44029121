"""Arithmetic on shapes: the elements of small integer lists, as products of extents."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce

from burnish.operators.axes import LONGEST, Call, Untold
from burnish.operators.extents import Number

Numbers = tuple[Number, ...]
NumbersRule = Callable[[Call], Numbers | None]


def shape(call: Call) -> Numbers:
    return tuple(map(Number.of, call.axes()[call.attribute("start", 0) : call.attribute("end")]))


def size(call: Call) -> Numbers:
    return (Number.of(factor for axis in call.axes() for factor in axis),)


def same(call: Call) -> Numbers | None:
    return call.layout(0).numbers


def cast(call: Call) -> Numbers | None:
    dtype = call.node.outputs[0].dtype
    return call.layout(0).numbers if dtype is not None and dtype.is_integer() else None


def concat(call: Call) -> Numbers | None:
    if all(call.layout(index).numbers is None for index in range(len(call))):
        return None
    return tuple(number for index in range(len(call)) for number in call.numbers(index))


def gather(call: Call) -> Numbers | None:
    data, indices = call.layout(0).numbers, call.integers(1)
    if data is None or indices is None or not all(-len(data) <= index < len(data) for index in indices):
        return None
    return tuple(data[index] for index in indices)


def slice_(call: Call) -> Numbers | None:
    data, starts, ends = call.layout(0).numbers, call.integers(1), call.integers(2)
    steps = call.integers(4) if call.has(4) else [1]
    if data is None or not starts or not ends or not steps or not steps[0]:
        return None
    end = ends[0]
    return data[starts[0] : (None if end < -len(data) else end) : steps[0]]


def product(call: Call) -> Numbers | None:
    data = call.layout(0).numbers
    if data is None:
        return None
    return (reduce(operator.mul, data, Number(1)),)


def filled(call: Call) -> Numbers | None:
    extents = call.integers(0)
    value = call.node.attributes.get("value")
    array = None if value is None else value.as_tensor().numpy().reshape(-1)
    if extents is None or len(extents) > 1 or (array is not None and array.dtype.kind not in "iub") or array is None:
        return None
    count = extents[0] if extents else 1
    return (Number(int(array[0])),) * count if count <= LONGEST else None


def expand(call: Call) -> Numbers | None:
    data, extents = call.layout(0).numbers, call.integers(1)
    if data is None or extents is None or len(extents) != 1 or len(data) not in (1, extents[0]) or extents[0] > LONGEST:
        return None
    return data * (extents[0] if len(data) == 1 else 1)


def _elementwise(compute: Callable[..., Number | None]) -> Callable[[Call], Numbers | None]:
    """Return an elementwise rule; an element that ``compute`` cannot give becomes a new unknown."""

    def rule(call: Call) -> Numbers | None:
        if any(call.layout(index).numbers is None for index in range(len(call))):
            return None
        columns = [call.numbers(index) for index in range(len(call))]
        length = max(map(len, columns))
        if any(len(column) not in (1, length) for column in columns):
            raise Untold(call.reason)
        results = []
        for place in range(length):
            operands = [column[place if len(column) > 1 else 0] for column in columns]
            number = compute(*operands)
            constant = all(operand.is_fixed for operand in operands)
            results.append(call.unknown(str(place), constant) if number is None else number)
        return tuple(results)

    return rule


def _of_integers(compute: Callable[..., int]) -> Callable[..., Number | None]:
    def rule(*operands: Number) -> Number | None:
        integers = [operand.coefficient for operand in operands if not operand.factors]
        return Number(compute(*integers)) if len(integers) == len(operands) else None

    return rule


def _divided(left: Number, right: Number) -> Number | None:
    if not left.factors and not right.factors and right.coefficient:
        quotient = abs(left.coefficient) // abs(right.coefficient)
        return Number(quotient if (left.coefficient < 0) == (right.coefficient < 0) else -quotient)
    return left.over(right)


def _added(left: Number, right: Number) -> Number | None:
    if Number(0) in (left, right):
        return right if left == Number(0) else left
    return _of_integers(lambda a, b: a + b)(left, right)


def _subtracted(left: Number, right: Number) -> Number | None:
    if left == right:
        return Number(0)
    return left if right == Number(0) else _of_integers(lambda a, b: a - b)(left, right)


def _equal(left: Number, right: Number) -> Number | None:
    """Compare extents, which are not negative; different names may have equal extents."""
    if left == right:
        return Number(1)
    if not left.factors and not right.factors:
        return Number(0)
    known = [number.coefficient for number in (left, right) if not number.factors]
    return Number(0) if known and known[0] < 0 else None


def _chosen(condition: Number, then: Number, otherwise: Number) -> Number | None:
    if then == otherwise:
        return then
    return None if condition.factors else (then if condition.coefficient else otherwise)


def _extreme(choose: Callable[[Sequence[int]], int]) -> Callable[..., Number | None]:
    def compute(*operands: Number) -> Number | None:
        if len(set(operands)) == 1:
            return operands[0]
        return _of_integers(lambda *integers: choose(integers))(*operands)

    return compute


ARITHMETIC: dict[str, Callable[..., Number | None]] = {
    "Mul": operator.mul,
    "Div": _divided,
    "Add": _added,
    "Sub": _subtracted,
    "Mod": _of_integers(lambda a, b: a % b if b else 0),
    "Neg": _of_integers(lambda a: -a),
    "Abs": _of_integers(abs),
    "Equal": _equal,
    "Less": _of_integers(lambda a, b: int(a < b)),
    "Greater": _of_integers(lambda a, b: int(a > b)),
    "Not": _of_integers(lambda a: int(not a)),
    "And": _of_integers(lambda a, b: int(bool(a and b))),
    "Or": _of_integers(lambda a, b: int(bool(a or b))),
    "Where": _chosen,
    "Max": _extreme(max),
    "Min": _extreme(min),
}

NUMBERS: dict[str, NumbersRule] = {
    "Shape": shape,
    "Size": size,
    **dict.fromkeys(("Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten"), same),
    "Cast": cast,
    "Concat": concat,
    "Gather": gather,
    "Slice": slice_,
    "ReduceProd": product,
    "ConstantOfShape": filled,
    "Expand": expand,
    **{name: _elementwise(compute) for name, compute in ARITHMETIC.items()},
}
"""The rule for the elements of a small result, by operator; a rule returns None if they are unknown."""
