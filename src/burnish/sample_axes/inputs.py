"""Which inputs of a model have samples along their first axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Extents = Sequence[int | str | None]


def sample_inputs(inputs: Mapping[str, Extents]) -> list[str]:
    """Return the names of the inputs whose first axis is that of samples; by the first of them a worker's samples are counted.

    A symbolic first axis is one of samples, unless other axes have that symbol: positions ``[time]`` beside tokens ``[batch,
    time]``. Of a model without symbolic first axes the inputs with the first extent of the first input are those of samples.

    Args:
        inputs: the extents of the model's inputs, by name; a string is a symbol, None an extent without one.
    """
    ranked = {name: extents for name, extents in inputs.items() if len(extents)}
    symbolic = [name for name, extents in ranked.items() if not isinstance(extents[0], int)]
    if not symbolic:
        first = next(iter(ranked.values()), ())
        return [name for name, extents in ranked.items() if extents[0] == first[0]]
    others = {extent for extents in ranked.values() for extent in extents[1:] if isinstance(extent, str)}
    return [name for name in symbolic if ranked[name][0] not in others] or symbolic
