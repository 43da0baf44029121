"""What to compute a second time: whole segments between checkpoints, or as little as fits a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from burnish.rewriting.forward import Forward

SEGMENT_SIZES = 24
PREFIXES = 24
NEARLY_LEAST = 1.05
"""The cheapest plan is taken among those whose peaks lie within this factor of the least."""


@dataclass(frozen=True)
class Plan:
    """What is dropped after the forward pass and computed again.

    Attributes:
        dropped: the values by number.
        peak: the planned peak with it, inputs left out, in the sizes that the forward part was given.
        cost: of computing them again, in bytes moved.
    """

    dropped: frozenset[int]
    peak: int
    cost: float


def plan(forward: Forward, dropped: set[int]) -> Plan:
    tasks = forward.schedule(dropped)
    return Plan(frozenset(dropped), forward.peak_of(tasks), forward.cost_of(tasks))


def layers(forward: Forward) -> Plan:
    """Keep checkpoints where the forward pass is narrow, and compute the segments between them again.

    The boundaries are those with the fewest bytes of checkpoints for a largest segment, and the largest segment is the one of the
    least planned peak (the sweep of Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4).
    """
    plans = [plan(forward, set()), *(plan(forward, dropped) for dropped in _segmentations(forward))]
    least = min(candidate.peak for candidate in plans)
    return min((p for p in plans if p.peak <= least * NEARLY_LEAST), key=lambda p: (p.cost, p.peak))


def fitting(forward: Forward, fits: Callable[[Plan], bool]) -> tuple[Plan | None, Plan]:
    """The cheapest of the plans that fit, None when none does; and the plan of the least peak.

    Plans are: the values that save the most bytes for the work of giving them again, one more at a time; and segments.
    """
    plans = [plan(forward, set())]
    if fits(plans[0]):
        return plans[0], plans[0]
    order = _by_bytes_saved_per_cost(forward)
    counts = sorted({max(1, round(len(order) * share / PREFIXES)) for share in range(1, PREFIXES + 1)} if order else set())
    plans += [plan(forward, forward.droppable - (set(forward.saved) - set(order[:count]))) for count in counts]
    plans += [plan(forward, dropped) for dropped in _segmentations(forward)]
    least = min(plans, key=lambda p: (p.peak, p.cost))
    return min((p for p in plans if fits(p)), key=lambda p: p.cost, default=None), least


def _by_bytes_saved_per_cost(forward: Forward) -> list[int]:
    """Saved values in the order in which a greedy choice drops them.

    The work of giving a value again grows when what it was to be computed from is dropped before it.
    """
    held = set(forward.saved)
    order: list[int] = []
    ratios = {value: _ratio(forward, value, held) for value in held}
    while ratios:
        best = max(ratios, key=lambda value: (ratios[value], -value))
        current = _ratio(forward, best, held)
        if current < ratios[best]:
            ratios[best] = current
            continue
        del ratios[best]
        held.discard(best)
        order.append(best)
    return order


def _ratio(forward: Forward, value: int, held: set[int]) -> float:
    dropped = forward.droppable - (held - {value})
    cost = sum(forward.cost(index) for index in forward.repeated_for(value, dropped))
    return forward.sizes[value] / max(cost, 1.0)


def _segmentations(forward: Forward) -> Iterator[set[int]]:
    """What is dropped for different sizes of the largest segment, from whole to small."""
    cuts = _narrow_cuts(forward)
    saved_before = _saved_bytes_before(forward, [cut.position for cut in cuts])
    total = saved_before[-1] if saved_before else 0
    seen: set[frozenset[int]] = set()
    for step in range(1, SEGMENT_SIZES + 1):
        chosen = _fewest_checkpoint_bytes(cuts, saved_before, total / step)
        if chosen is None:
            return
        held = {value for cut in chosen for value in cut.values}
        last = chosen[-1].position if chosen else 0
        # What follows the last checkpoint is needed at once: dropping it saves nothing.
        held.update(value for value in forward.saved if forward.producer[value] >= last)
        dropped = frozenset(forward.droppable - held)
        if dropped not in seen:
            seen.add(dropped)
            yield set(dropped)


@dataclass(frozen=True)
class _Cut:
    """A place between two forward nodes: the values that have to be kept for the work after it, and their bytes."""

    position: int
    values: tuple[int, ...]
    bytes: int


def _narrow_cuts(forward: Forward) -> list[_Cut]:
    """The places where less passes through than at both sides, or no more than at any of them; beginning and end are such."""
    last: dict[int, int] = {}
    for index in range(forward.end):
        last.update(dict.fromkeys(forward.reads[index], index))
    ending: dict[int, list[int]] = {}
    for value, index in last.items():
        if value in forward.droppable:
            ending.setdefault(index, []).append(value)
    passing: dict[int, None] = {}
    cuts: list[_Cut] = []
    for index in range(forward.end):
        for value in ending.get(index, ()):
            passing.pop(value, None)
        passing.update({v: None for v in forward.writes[index] if v in forward.droppable and last.get(v, index) > index})
        if passing:
            cuts.append(_Cut(index + 1, tuple(passing), sum(forward.sizes[value] for value in passing)))
    return [
        cut
        for before, cut, after in zip([None, *cuts], cuts, [*cuts[1:], None], strict=False)
        if (before is None or cut.bytes <= before.bytes) and (after is None or cut.bytes <= after.bytes)
    ]


def _saved_bytes_before(forward: Forward, positions: list[int]) -> list[int]:
    """For every position, the bytes of the saved values computed before it; and last of all, of all of them."""
    result, total = [], 0
    saved = iter([*((forward.producer[value], forward.sizes[value]) for value in forward.saved), (forward.end + 1, 0)])
    position, size = next(saved)
    for boundary in positions:
        while position < boundary:
            total += size
            position, size = next(saved)
        result.append(total)
    return [*result, sum(forward.sizes[value] for value in forward.saved)]


def _fewest_checkpoint_bytes(cuts: list[_Cut], saved_before: list[int], largest: float) -> list[_Cut] | None:
    """The cuts with the fewest bytes between which no more than ``largest`` bytes are saved; None where there are none.

    The shortest path over the cuts, from the beginning to the end.
    """
    places = [0, *saved_before]
    best: list[tuple[float, int]] = [(0.0, -1)]
    # The places that may lie before the next one: a window that moves on, of which those remain that may still be the best.
    window: deque[int] = deque([0])
    for end in range(1, len(places)):
        weight = cuts[end - 1].bytes if end <= len(cuts) else 0
        while window and places[end] - places[window[0]] > largest:
            window.popleft()
        best.append((best[window[0]][0] + weight, window[0]) if window else (float("inf"), -1))
        while window and best[window[-1]][0] > best[end][0]:
            window.pop()
        window.append(end)
    if best[-1][0] == float("inf"):
        return None
    chosen = []
    place = best[-1][1]
    while place > 0:
        chosen.append(cuts[place - 1])
        place = best[place][1]
    return chosen[::-1]
