"""A case without what its defect does not need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import onnx

from fuzz.mutants import Mutant, make
from fuzz.outcomes import Outcome
from fuzz.pool import Limits, run
from fuzz.seeds import MODEL


def minimised(seed: int, number: int, limits: Limits) -> tuple[dict[str, bytes], Outcome]:
    """Return the files of a smaller mutant that has the same defect: mutations, then parts of the model, left out one by one.

    Raises:
        ValueError: the case has no defect.
    """
    whole = make(seed, number)
    expected = _outcome(whole, seed, number, limits)
    if not expected.is_defect:
        raise ValueError(f"case {number} has no defect: it is {expected.kind}")

    def reproduces(mutant: Mutant) -> bool:
        return _outcome(mutant, seed, number, limits).group == expected.group

    without: set[int] = set()
    for position in range(len(whole.mutations)):
        if reproduces(make(seed, number, without | {position})):
            without.add(position)
    mutant = make(seed, number, without)
    tried = 0
    while paths := _removable(mutant)[tried:]:
        smaller = _without(mutant, paths[0])
        if reproduces(smaller):
            mutant = smaller
        else:
            tried += 1
    return mutant.files, _outcome(mutant, seed, number, limits)


def _outcome(mutant: Mutant, seed: int, number: int, limits: Limits) -> Outcome:
    again = replace(mutant, options=Random(f"{seed}/{number}/options"))
    return next(run([number], seed, 1, limits, lambda _: True, lambda _: again))


def _removable(mutant: Mutant) -> list[tuple[str | int, ...]]:
    """Where the elements of a model's lists are, those inside others after them; none where it is no model any more."""
    try:
        model = onnx.ModelProto.FromString(mutant.files.get(MODEL, b""))
    except Exception:  # the protobuf library's errors share no class of their own
        return []
    return list(_elements(model, ()))


def _without(mutant: Mutant, path: tuple[str | int, ...]) -> Mutant:
    model = onnx.ModelProto.FromString(mutant.files[MODEL])
    *way, last = path
    items: Any = model
    for step in way:
        items = getattr(items, step) if isinstance(step, str) else items[step]
    del items[last]
    return replace(mutant, files={**mutant.files, MODEL: model.SerializeToString()})


def _elements(message: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    for descriptor, value in message.ListFields():
        if descriptor.type != descriptor.TYPE_MESSAGE:
            continue
        here = (*path, descriptor.name)
        if not descriptor.is_repeated:
            yield from _elements(value, here)
            continue
        yield from ((*here, index) for index in range(len(value)))
        for index, inner in enumerate(value):
            yield from _elements(inner, (*here, index))
