"""What the forms of a convolution's gradients cost on ONNX Runtime, by which one is chosen.

A form counts its work in a few units for a batch; the time is the sum of the units times what each takes. Those times were
fitted to 336 measurements by ``benchmarks/convolution_gradients.py --fit`` (ONNX Runtime 1.32, float32, AVX-512, one thread).
By them the chosen form took 1.03 times as long as the fastest one, in the geometric mean. Those of the product per tap were
fitted apart, to 32 depthwise gradients on AVX2. What ONNX Runtime does on one thread however many it has weighs more.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

THREADS = 2
"""How many threads a choice counts on: what phones and small machines give to training."""

SERIAL = frozenset(
    {
        "tap slices",
        "strided tap slices",
        "scattered groups",
        "scattered grouped products",
        "scattered depthwise products",
    }
)
"""The units that ONNX Runtime works off on one thread: the others were seen to take no processor time."""

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
    """The time that a form takes for an amount of work, by unit."""
    unit_times = NANOSECONDS[form]
    return sum(unit_times[unit] * amount / (1 if unit in SERIAL else threads) for unit, amount in work.items())
