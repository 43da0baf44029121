"""Products of many factors, whose slopes are exact where factors are zero: ReduceProd, CumProd and scattered products."""

from __future__ import annotations

from burnish.graph import Tensor
from burnish.operators.registry import Operation, gradient


def without_zeros(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a factor is zero (bool), and the factor with ones there; both have its shape."""
    builder = factor.builder
    is_zero = builder.op("Equal", factor, builder.scalar(0, factor))
    return is_zero, builder.op("Where", is_zero, builder.scalar(1, factor), factor)


def zeros_alone(factor: Tensor, is_zero: Tensor) -> Tensor:
    """The factor where it is zero, and zeros elsewhere: zeros everywhere, of which some have a slope."""
    builder = factor.builder
    return builder.op("Where", is_zero, factor, builder.scalar(0, factor))


def slope_of_product(factor: Tensor, product: Tensor, rest: Tensor, zeros: Tensor, sum_of_zeros: Tensor) -> Tensor:
    """The product of all factors but this one.

    It is the product / the factor where the factor is not zero. Of a factor that is, it is the product of those that are not
    zero (``rest``) where no other is zero. One other zero makes it that zero * rest: zero too, and with a slope, which a second
    derivative sees. More of them leave zero.

    Args:
        factor: the factors.
        product: of all factors that one belongs to, zeros included; like what follows, it broadcasts against ``factor``.
        rest: the product of those that are not zero.
        zeros: how many are zero.
        sum_of_zeros: the sum of those that are, see ``zeros_alone``.
    """
    builder = factor.builder
    is_zero, safe = without_zeros(factor)
    single = builder.op("Equal", zeros, builder.scalar(1, zeros))
    double = builder.op("Equal", zeros, builder.scalar(2, zeros))
    other = builder.op("Where", double, sum_of_zeros - factor, builder.scalar(0, factor))
    at_zero = builder.op("Where", single, rest, rest * other)
    return builder.op("Where", is_zero, at_zero, product / safe)


@gradient("CumProd")
def cumprod(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    """dx_k = Σ_i dy_i · (the other factors of y_i), over the products y_i that x_k enters.

    These are y_i / x_k where x_k is not zero. The first zero is left out of the products by a one in its place. So is the second
    one: what remains is zero, and has a slope by the first. After a third factor of zero nothing is left to second order.
    """
    builder, x, axis = op.builder, op.input, op.required(1)
    exclusive, reverse = op.attribute("exclusive", 0), op.attribute("reverse", 0)

    def gathered(products: Tensor) -> Tensor:
        return builder.op("CumSum", dy * products, axis, exclusive=exclusive, reverse=1 - reverse)

    def without(place: Tensor) -> Tensor:
        factors = builder.op("Where", place, builder.scalar(1, x), x)
        return gathered(builder.op("CumProd", factors, axis, exclusive=exclusive, reverse=reverse, like=x))

    is_zero, safe = without_zeros(x)
    number = builder.op("CumSum", builder.cast(is_zero, x.dtype), axis, reverse=reverse)
    slope = gathered(op.output) / safe
    at_zero = builder.scalar(0, x)
    for position in (2, 1):
        place = builder.op("And", is_zero, builder.op("Equal", number, builder.scalar(position, number)))
        at_zero = builder.op("Where", place, without(place), at_zero)
    return builder.op("Where", is_zero, at_zero, slope), None
