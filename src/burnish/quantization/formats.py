"""What weights and activations are quantized to, as text says it."""

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
        per_channel: whether every output channel has a scale of its own.
        block: weights along the axis of the inputs that share a scale; 0 without blocks.
        levels: the greatest integer; the least is its negative.
    """

    bits: int
    per_channel: bool
    block: int
    levels: int

    @property
    def keeps_sign(self) -> bool:
        """Whether scales can take in a factor for each output channel, as that of a batch normalization."""
        return self.per_channel or self.block > 0


def weight_format(text: str, reduce_range: bool) -> WeightFormat:
    """Return the format that a text names.

    Args:
        text: ``int8``, ``int8 per channel``, ``int4``, ``int4 per channel`` or ``int4 blocks of 32``.
        reduce_range: use 7 of 8 bits.

    Raises:
        ConfigurationError: it names none.
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
    """Integers of 8 bits for activations.

    Attributes:
        dtype: ``uint8`` or ``int8``.
        symmetric: whether zero is the middle integer, 128 or 0; else the range of the data decides.
    """

    dtype: str
    symmetric: bool

    @property
    def lowest(self) -> int:
        """The least integer."""
        return 0 if self.dtype == "uint8" else -128

    @property
    def middle(self) -> int:
        """The zero point of a symmetric range."""
        return self.lowest + 128

    @property
    def levels(self) -> int:
        """The integers that a scale divides the range by."""
        return 127 if self.symmetric else 255


def activation_format(text: str | None, symmetric: bool) -> ActivationFormat | None:
    """Return the format that a text names; None for None.

    Raises:
        ConfigurationError: it names none.
    """
    if text is None:
        return None
    if text not in _ACTIVATIONS:
        raise ConfigurationError(f"quantize: activations={text!r} is no format: give 'uint8', 'int8' or None")
    return ActivationFormat(text, symmetric)
