"""The rate of one layer, from the norms of its weights and of its update: what LARS and LAMB share."""

from __future__ import annotations

from burnish.graph import Builder, Tensor


def trust_ratio(builder: Builder, parameter: Tensor, update: Tensor, coefficient: float = 1.0, eps: float = 0.0) -> Tensor:
    """Emit ``coefficient * |parameter| / (|update| + eps)``, a scalar in the dtype of the parameter, with Euclidean norms.

    It is 1 where either norm is 0, as a layer that starts at zero would never leave it. Sources: You et al., "Large batch
    training of convolutional networks", 2017; You et al., "Large batch optimization for deep learning", 2020.
    """
    weight = builder.op("ReduceL2", parameter, keepdims=0)
    length = builder.op("ReduceL2", update, keepdims=0)
    ratio = (weight if coefficient == 1.0 else weight * coefficient) / (length + eps if eps else length)
    # A norm that is not a number fails the comparison, and reaches the weights by the update itself.
    defined = builder.op("Greater", builder.op("Min", weight, length), 0.0)
    return builder.op("Where", defined, ratio, builder.scalar(1.0, parameter))
