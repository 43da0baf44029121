"""A form of a gradient in standard operators, and the choice between several by what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import log

from burnish.graph import Builder, Tensor
from burnish.operators.convolution_gradients.costs import nanoseconds
from burnish.operators.convolution_gradients.geometry import Convolution

Work = Mapping[str, float]
"""How much a form does, by unit."""

BATCHES = (1, 4, 16)
"""The batches that a choice is made for where the batch is symbolic."""

_forced: ContextVar[frozenset[str]] = ContextVar("forced forms", default=frozenset())


@dataclass(frozen=True)
class Form:
    """One way to compute a gradient.

    Attributes:
        name: as ``costs.py`` knows it.
        applies: whether it computes the gradient of a convolution.
        build: emits it, from the operands of the semantic operator in their order.
        work: how much it does for a batch, where sizes are static; of the units in ``costs.py``.
    """

    name: str
    applies: Callable[[Convolution], bool]
    build: Callable[[Builder, Convolution, Tensor, Tensor, Tensor], Tensor]
    work: Callable[[Convolution, int], Work]

    def nanoseconds(self, convolution: Convolution, batch: int) -> float:
        """What it takes by the model of costs."""
        return nanoseconds(self.name, self.work(convolution, batch))


def choose(forms: Sequence[Form], convolution: Convolution) -> Form:
    """Return the cheapest form that applies; with sizes that are not known, the first one.

    For a symbolic batch it is the one whose times over ``BATCHES`` have the least geometric mean. A branch by the batch would
    gain little: choosing for each batch makes the 336 gradients that were measured 1 % faster in the geometric mean. The one
    that it helps most in time is dx of a weight [512, 512, 3, 3] over 7x7, for 16 images by a quarter.
    """
    possible = [form for form in forms if form.applies(convolution)]
    forced = [form for form in possible if form.name in _forced.get()]
    if forced:
        return forced[0]
    if len(possible) == 1 or not convolution.has_static_sizes:
        return possible[0]
    batches = BATCHES if convolution.batch is None else (max(convolution.batch, 1),)
    return min(possible, key=lambda form: sum(log(form.nanoseconds(convolution, batch)) for batch in batches))


@contextmanager
def forced_forms(*names: str) -> Iterator[None]:
    """Lower with forms of these names wherever they apply: for tests and benchmarks, which compare them."""
    token = _forced.set(frozenset(names))
    try:
        yield
    finally:
        _forced.reset(token)
