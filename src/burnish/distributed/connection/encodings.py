"""How gradients travel between workers: as they are, or in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burnish.registry import Registry

if TYPE_CHECKING:
    import torch

TOP_EXPONENT = 15
"""A row of float16 is scaled so that its largest element is in [2^14, 2^15): none overflows, also by rounding."""
EXPONENTS = (-100, 128)
"""What rows of smaller or larger numbers are scaled by: the factor itself must be a float32."""


class Encoding:
    """Numbers travel as they are; rows in, rows out."""

    def encoded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what travels for some numbers, [rows, n]: [rows, m]."""
        return rows

    def width(self, count: int) -> int:
        """How many elements travel for a row of ``count`` numbers; none for none."""
        return count

    def decoded(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers, [rows, n] of a dtype, that came as ``wire``."""
        return wire.to(dtype)


class BFloat16(Encoding):
    """Numbers are rounded to bfloat16: the range of float32, and an error of up to 2^-8 of each number."""

    def encoded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.bfloat16()


class Float16(Encoding):
    """Numbers are rounded to float16, each row times a power of two that travels after it.

    The error is up to 2^-11 of each number that is at least 2^-29 of the largest in its row, and below that 2^-39 of the largest.
    NaN and infinities stay what they are.
    """

    def encoded(self, rows: torch.Tensor) -> torch.Tensor:
        import torch

        largest = rows.abs().amax(dim=1, keepdim=True)
        exponents = torch.where(largest.isfinite(), largest, 0).double().frexp().exponent.clamp(*EXPONENTS)
        scaled = rows.ldexp(TOP_EXPONENT - exponents)
        return torch.cat([scaled.half(), exponents.half()], dim=1)

    def width(self, count: int) -> int:
        return count + 1 if count else 0

    def decoded(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return wire[:, :-1].to(dtype).ldexp(wire[:, -1:].int() - TOP_EXPONENT)


COMPRESSIONS: Registry[Encoding] = Registry("compression", {"bfloat16": BFloat16, "float16": Float16}, bare=True)
