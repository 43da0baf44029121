"""Number formats of quantized weights and activations."""

from __future__ import annotations

import re
from dataclasses import dataclass

from burnish.errors import ConfigurationError

_WEIGHTS = re.compile(r"int(8|4)(?: (per channel)| blocks of (\d+))?")
_ACTIVATIONS = ("uint8", "int8")


@dataclass(frozen=True)
class WeightFormat:
    """Signed integers, symmetric about zero.

    Attributes:
        bits: 8 or 4.
        per_channel: True for a scale per output channel.
        block: weights along the input axis that share a scale; 0 without blocks.
        levels: the greatest integer; the least is its negative.
    """

    bits: int
    per_channel: bool
    block: int
    levels: int

    @property
    def keeps_sign(self) -> bool:
        """True if scales can absorb a factor per output channel, such as that of batch normalization."""
        return self.per_channel or self.block > 0


def weight_format(text: str, reduce_range: bool) -> WeightFormat:
    """Parse a weight format.

    Args:
        text: ``int8``, ``int8 per channel``, ``int4``, ``int4 per channel`` or ``int4 blocks of 32``.
        reduce_range: True to use 7 of 8 bits.

    Raises:
        ConfigurationError: an unknown format.
    """
    matched = _WEIGHTS.fullmatch(text) if isinstance(text, str) else None
    if matched is None or (matched[1] == "8" and matched[3]):
        raise ConfigurationError(
            f"quantize: weights={text!r} is no format: give 'int8', 'int8 per channel', 'int4', 'int4 per channel' or "
            "'int4 blocks of 32'"
        )
    bits, block = int(matched[1]), int(matched[3] or 0)
    if matched[3] and (block < 16 or block & (block - 1)):
        raise ConfigurationError(f"quantize: weights={text!r}: a block has 16 weights or another power of two above it")
    levels = 7 if bits == 4 else 63 if reduce_range else 127
    return WeightFormat(bits, matched[2] is not None, block, levels)


@dataclass(frozen=True)
class ActivationFormat:
    """8-bit integers for activations.

    Attributes:
        dtype: ``uint8`` or ``int8``.
        symmetric: True if zero is the middle integer, 128 or 0; else the range of the data decides.
    """

    dtype: str
    symmetric: bool

    @property
    def lowest(self) -> int:
        """The least integer."""
        return 0 if self.dtype == "uint8" else -128

    @property
    def middle(self) -> int:
        """Zero point of a symmetric range."""
        return self.lowest + 128

    @property
    def levels(self) -> int:
        """Divisor of a range for its scale."""
        return 127 if self.symmetric else 255


def activation_format(text: str | None, symmetric: bool) -> ActivationFormat | None:
    """Parse an activation format; None stays None.

    Raises:
        ConfigurationError: an unknown format.
    """
    if text is None:
        return None
    if text not in _ACTIVATIONS:
        raise ConfigurationError(f"quantize: activations={text!r} is no format: give 'uint8', 'int8' or None")
    return ActivationFormat(text, symmetric)
