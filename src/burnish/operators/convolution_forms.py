"""Forms of a convolution's gradient in standard operators, their costs, and the choice between them.

Every form keeps the batch symbolic. A form counts its work for a batch in a few units; its time is the sum of the units times
their costs on ONNX Runtime. The costs were fitted to 336 measurements by ``benchmarks/convolution_gradients.py --fit``
(ONNX Runtime 1.32, float32, AVX-512, one thread). The chosen form took 1.03 times as long as the fastest one, in the geometric
mean. The costs of the product per tap were fitted separately, to 32 depthwise gradients on AVX2. Work that ONNX Runtime does on
one thread, however many it has, weighs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import log, prod
from types import MappingProxyType

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Builder, Tensor
from burnish.operators.registry import Operation
from burnish.operators.windows import Windows


class Convolution:
    """The convolution y [N, O, *space] = Conv(x [N, C, *space], w [O, C / group, *k]) of a gradient.

    The batch and spatial sizes are None if symbolic; so are numbers of channels, as in the gradient of a convolution that has
    images as channels.
    """

    def __init__(self, op: Operation, dy: Tensor, x: Tensor, weight: Tensor):
        self.windows = Windows.declared(op)
        self.rank = self.windows.rank
        self.kernel, self.strides, self.dilations = self.windows.kernel_shape, self.windows.strides, self.windows.dilations
        self.begin, self.end = self.windows.pads_begin, self.windows.pads_end
        self.group: int = op.attribute("group")
        self.out_channels, self.group_in_channels = (weight.dimension(axis) for axis in (0, 1))
        if self.group > 1 and self.out_channels is None and self.group_in_channels is None:
            raise UnsupportedOperatorError(
                f"{op}: both numbers of channels of the weight '{weight.name}' are symbolic: declare the shape of the weight"
            )
        self.group_out_channels = None if self.out_channels is None else self.out_channels // self.group
        self.batch = next((size for size in (_dimension(x, 0), _dimension(dy, 0)) if size is not None), None)
        self.sizes, self.out_sizes = spatial_sizes(x, self.rank), spatial_sizes(dy, self.rank)

    @property
    def channels(self) -> tuple[int, int]:
        """The static numbers of output and input channels of a group."""
        assert self.group_out_channels is not None
        assert self.group_in_channels is not None
        return self.group_out_channels, self.group_in_channels

    @property
    def has_static_channels(self) -> bool:
        return self.out_channels is not None and self.group_in_channels is not None

    @property
    def has_static_sizes(self) -> bool:
        return self.has_static_channels and None not in (*self.sizes, *self.out_sizes)

    @property
    def is_depthwise(self) -> bool:
        return self.group > 1 and self.group_in_channels == 1

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    def reach(self, axis: int) -> int:
        """Return the distance from the first to the last entry of a window."""
        return self.windows.span(axis) - 1

    def leftover(self, axis: int, size: int) -> int:
        """Return the number of trailing entries of the padded input that no window reaches."""
        return (size + self.begin[axis] + self.end[axis] - self.windows.span(axis)) % self.strides[axis]

    @property
    def is_pointwise(self) -> bool:
        """True if every output reads one input entry and there is no padding."""
        return all(size == 1 for size in self.kernel) and not any(self.begin) and not any(self.end)


def known(sizes: Iterable[int | None]) -> list[int]:
    return [size for size in sizes if size is not None]


def spatial_sizes(x: Tensor, rank: int) -> tuple[int | None, ...]:
    return tuple(_dimension(x, axis + 2) for axis in range(rank))


def _dimension(tensor: Tensor, axis: int) -> int | None:
    return None if tensor.shape is None else tensor.dimension(axis)


def without_leftover(b: Builder, x: Tensor, convolution: Convolution) -> tuple[Tensor, list[int]]:
    """Return ``x`` and its end pads without the trailing entries that no window reaches, if the sizes are known."""
    end = list(convolution.end)
    cropped: dict[int, int] = {}
    for axis, size in enumerate(spatial_sizes(x, convolution.rank)):
        if size is None:
            continue
        unread = convolution.leftover(axis, size)
        end[axis] = max(convolution.end[axis] - unread, 0)
        if unread > convolution.end[axis]:
            cropped[axis + 2] = size - (unread - convolution.end[axis])
    if cropped:
        axes = b.integers(list(cropped))
        x = b.op("Slice", x, b.integers([0] * len(cropped)), b.integers(list(cropped.values())), axes)
    return x, end


def target_shape(b: Builder, head: list[int], x: Tensor, rank: int, factor: int = 1, tail: list[int] | None = None) -> Tensor:
    """Return ``head``, the spatial sizes of ``x`` with the last one times ``factor``, ``tail``: a target of Reshape."""
    sizes = spatial_sizes(x, rank)
    known = [size for size in sizes if size is not None]
    if len(known) == rank:
        return b.integers([*head, *known[:-1], known[-1] * factor, *(tail or [])])
    space = b.op("Shape", x, start=2)
    if factor > 1:
        space = space * b.integers([1] * (rank - 1) + [factor])
    return b.op("Concat", b.integers(head), space, *([b.integers(tail)] if tail else []), axis=0)


THREADS = 2
"""The threads to count on, as phones and small machines give to training."""

SERIAL = frozenset(
    {
        "tap slices",
        "strided tap slices",
        "scattered groups",
        "scattered grouped products",
        "scattered depthwise products",
    }
)
"""The units that ONNX Runtime processes on one thread: its other threads took no processor time."""

NANOSECONDS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "reversed convolution": {
            "column rows": 2.99,
            "depthwise products": 0.189,
            "direct products": 0.252,
            "grouped products": 0.0601,
            "groups": 360.0,
            "moved weights": 0.728,
            "products": 0.0271,
            "turned weights": 2.76,
        },
        "transposed convolution": {
            "packed weights": 0.354,
            "products": 0.0304,
            "scattered": 0.276,
            "scattered by index": 0.229,
            "scattered depthwise products": 0.302,
            "scattered grouped products": 0.0701,
            "scattered groups": 439.0,
        },
        "product per image": {"products": 0.0274, "sums": 1.4},
        "product over images": {"moved": 0.461, "products": 0.0279},
        "row products": {"diagonals": 0.644, "matrices": 201.0, "moved": 0.276, "products": 0.0282, "slices": 0.726},
        "joined row products": {
            "matrices": 198.0,
            "moved": 0.473,
            "products": 0.0246,
            "slices": 0.844,
            "summed diagonals": 0.0195,
        },
        "product per tap": {
            "matrices": 182.0,
            "multiplied taps": 0.255,
            "strided tap slices": 1.81,
            "tap slices": 0.172,
        },
        "unfolded product": {"dot products": 0.0204, "products": 0.0227, "sums": 1.69, "unfolded": 1.65},
        "correlation": {"column rows": 5.3, "grouped columns": 0.173, "grouped products": 0.0817, "products": 0.0298},
    }
)
"""The time of one unit of a form's work on one thread, by form and unit."""


def nanoseconds(form: str, work: Mapping[str, float], threads: int = THREADS) -> float:
    unit_times = NANOSECONDS[form]
    return sum(unit_times[unit] * amount / (1 if unit in SERIAL else threads) for unit, amount in work.items())


Work = Mapping[str, float]
"""The amount of a form's work, by unit."""

BATCHES = (1, 4, 16)
"""The batches to optimize for if the batch is symbolic."""

_forced: ContextVar[frozenset[str]] = ContextVar("forced forms", default=frozenset())


@dataclass(frozen=True)
class Form:
    """One way to compute a gradient.

    Attributes:
        name: the name in ``NANOSECONDS``.
        applies: True if it can compute the gradient of a convolution.
        build: emits it, from the operands of the semantic operator in their order.
        work: its work for a batch with static sizes, in the units of ``NANOSECONDS``.
    """

    name: str
    applies: Callable[[Convolution], bool]
    build: Callable[[Builder, Convolution, Tensor, Tensor, Tensor], Tensor]
    work: Callable[[Convolution, int], Work]

    def nanoseconds(self, convolution: Convolution, batch: int) -> float:
        return nanoseconds(self.name, self.work(convolution, batch))


def choose(forms: Sequence[Form], convolution: Convolution) -> Form:
    """Return the cheapest form that applies; if sizes are unknown, the first one.

    For a symbolic batch it is the form with the least geometric mean of its times over ``BATCHES``. A branch by the batch would
    gain little: a choice per batch makes the 336 measured gradients 1 % faster in the geometric mean. The largest gain in time is
    for dx of a weight [512, 512, 3, 3] over 7x7, a quarter for 16 images.
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
    """Lower with forms of these names if they apply: for tests and benchmarks that compare forms."""
    token = _forced.set(frozenset(names))
    try:
        yield
    finally:
        _forced.reset(token)
