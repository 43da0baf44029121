"""Products of matrices."""

from __future__ import annotations

from itertools import chain

from burnish.importer.open_batch.call import Call, Result, Rule, outcome
from burnish.importer.open_batch.opening import Opening
from burnish.importer.open_batch.operands import FIRST, STACKED, Batch, Operand, Refused, Shape, broadcast_extents
from burnish.importer.open_batch.rules.elements import combined


def matmul(call: Call) -> Result:
    return outcome(product(call.opening, call.operand(0), call.operand(1)))


def product(opening: Opening, a: Operand, b: Operand) -> Operand:
    """Emit the product of two operands, at least one of which has samples."""
    vectors = (a.rank == 1, b.rank == 1)
    a = opening.inserted(a, [0]) if vectors[0] else a
    b = opening.inserted(b, [1]) if vectors[1] else b
    result = _matrices(opening, a, b)
    added = [result.rank - 2 + index for index, is_vector in enumerate(vectors) if is_vector]
    return opening.removed(result, added) if added else result


def _matrices(opening: Opening, a: Operand, b: Operand) -> Operand:
    leading = broadcast_extents([a.shape[:-2], b.shape[:-2]])
    shape = (*leading, a.shape[-2], b.shape[-1])
    rank = len(shape)
    batch = _stays(a, b, shape, rows=True) or _stays(b, a, shape, rows=False)
    if batch is not None:
        return Operand(opening.emit("MatMul", a.value, b.value), shape, batch)
    batch = _shared(a, b, shape) or FIRST
    values = [operand.value if operand.batch is None else opening.placed(operand, batch, rank) for operand in (a, b)]
    return Operand(opening.emit("MatMul", *values), shape, batch)


def _stays(x: Operand, other: Operand, shape: Shape, rows: bool) -> Batch | None:
    """Return where the samples of the only operand with samples stand in the product; None where they must move first."""
    if x.batch is None or other.batch is not None:
        return None
    rank = len(shape)
    at = x.batch.axis + rank - x.rank
    if x.batch.is_extra:
        is_last = x.batch.axis > x.rank - 2 + rows
        return None if is_last or other.rank > 2 else x.batch
    place = rank - 2 if rows else rank - 1
    return Batch(at, is_extra=False) if at == place or (at < rank - 2 and shape[at] == 1) else None


def _shared(a: Operand, b: Operand, shape: Shape) -> Batch | None:
    """The axis in front of the matrices in the place of which samples of both can stand."""
    for operand in (a, b):
        if operand.batch is not None and not operand.batch.is_extra:
            at = operand.batch.axis + len(shape) - operand.rank
            if at < len(shape) - 2 and shape[at] == 1:
                return Batch(at, is_extra=False)
    return None


def gemm(call: Call) -> Result:
    opening = call.opening
    a, b = call.operand(0), call.operand(1)
    transposed = [bool(call.attribute(name, 0)) for name in ("transA", "transB")]
    row = Batch(int(transposed[0]), is_extra=False)
    c = call.operand(2) if call.has(2) else None
    if a.batch == row and b.batch is None and (c is None or c.batch is None):
        return call.again(*call.with_rest())[0], STACKED
    a, b = (
        _transposed(opening, operand) if is_transposed else operand
        for operand, is_transposed in zip((a, b), transposed, strict=True)
    )
    factors = [Operand(opening.scalar(float(call.attribute(name, 1.0)), call.node.inputs[0]), ()) for name in ("alpha", "beta")]  # type: ignore[arg-type]
    result: Operand
    if a.batch is None and b.batch is None:
        result = Operand(opening.emit("MatMul", a.value, b.value), (a.shape[0], b.shape[1]))
        result = Operand(opening.emit("Mul", result.value, factors[0].value), result.shape)
    else:
        result = product(opening, a, b)
        if call.attribute("alpha", 1.0) != 1.0:
            result = combined(opening, "Mul", result, factors[0])
    if c is None:
        return outcome(result)
    if call.attribute("beta", 1.0) != 1.0:
        c = (
            combined(opening, "Mul", c, factors[1])
            if c.batch is not None
            else Operand(opening.emit("Mul", c.value, factors[1].value), c.shape)
        )
    return outcome(combined(opening, "Add", result, c))


def _transposed(opening: Opening, operand: Operand) -> Operand:
    shape = (operand.shape[1], operand.shape[0])
    if operand.batch is None:
        return Operand(opening.emit("Transpose", operand.value, perm=[1, 0]), shape)
    value = opening.placed(operand, FIRST)
    return Operand(opening.emit("Transpose", value, perm=[0, 2, 1]), shape, FIRST)


def einsum(call: Call) -> Result:
    """A letter more for the samples; or none where they stand in the place of the same letter in every operand that has them."""
    equation = str(call.attribute("equation")).replace(" ", "")
    terms, result = _terms(equation)
    operands = call.present
    if len(terms) != len(operands):
        raise Refused(f"has {len(operands)} operands for the equation '{equation}'")
    _check_letters(terms, operands)
    letter_of_samples = _kept_letter(terms, result, operands)
    if letter_of_samples is not None:
        return call.again(*(operand.value for operand in operands))[0], Batch(result.index(letter_of_samples), is_extra=False)
    letter = next(
        (letter for letter in "bBnNzZabcdefghijklmnopqrstuvwxyzACDEFGHIJKLMOPQRSTUVWXY" if letter not in equation), None
    )
    if letter is None:
        raise Refused(f"uses every letter in its equation '{equation}'")
    new_terms = [term if operand.batch is None else letter + term for term, operand in zip(terms, operands, strict=True)]
    values = [operand.value if operand.batch is None else call.opening.placed(operand, FIRST) for operand in operands]
    return call.again(*values, equation=f"{','.join(new_terms)}->{letter}{result}")[0], FIRST


def _terms(equation: str) -> tuple[list[str], str]:
    """What stands for each operand and for the result, which is each letter that occurs once where the equation leaves it out."""
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = [letter for letter in left if letter.isalpha()]
        result = ("..." if "..." in left else "") + "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    return terms, result


def _check_letters(terms: list[str], operands: list[Operand]) -> None:
    """Raise Refused where a letter stands for axes of two extents, which engines broadcast or refuse as they like."""
    extents: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        before, _, behind = term.partition("...")
        for letter, extent in chain(
            zip(before, operand.shape, strict=False), zip(behind[::-1], operand.shape[::-1], strict=False)
        ):
            if isinstance(extent, int) and extents.setdefault(letter, extent) != extent:
                raise Refused(f"has axes of {extents[letter]} and {extent} places for the letter '{letter}' of its equation")


def _kept_letter(terms: list[str], result: str, operands: list[Operand]) -> str | None:
    if any("." in term for term in terms):
        return None
    letters = set()
    for term, operand in zip(terms, operands, strict=True):
        if operand.batch is None:
            continue
        if operand.batch.is_extra:
            return None
        letters.add(term[operand.batch.axis])
    letter = letters.pop()
    holders = [operand for term, operand in zip(terms, operands, strict=True) if letter in term]
    once = all(term.count(letter) <= 1 for term in terms)
    alone = not letters and once and result.count(letter) == 1 and all(operand.batch is not None for operand in holders)
    return letter if alone else None


RULES: dict[str, Rule] = {
    "MatMul": matmul,
    "Gemm": gemm,
    "Einsum": einsum,
}
