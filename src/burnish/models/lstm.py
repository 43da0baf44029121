"""An LSTM sequence classifier, after Hochreiter and Schmidhuber 1997, "Long short-term memory"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.models.layers import Layers, check_extents, check_input_shape
from burnish.validation import check_count


def lstm(input_shape: Sequence[int], classes: int = 10, width: int = 64, seed: int = 0) -> ir.Model:
    """Build an LSTM sequence classifier in standard ONNX, in inference form, with initial weights.

    A dense layer computes the classes from the LSTM's last state.

    Args:
        input_shape: shape of a sequence: (length, features).
        classes: number of classes.
        width: size of the state.
        seed: seed of the initial weights: uniform with bound 1 / sqrt(width), as in PyTorch.

    Returns:
        A model with the input ``x`` (float32, [batch, length, features]) and the output ``logits`` (float32, [batch, classes]).

    Raises:
        ConfigurationError: a size that is not a whole number of at least 1 or is too large, or an input shape that is not a
            sequence's.
    """
    check_input_shape("lstm", input_shape, "length", "features")
    check_extents("lstm", classes=classes, width=width)
    check_count("lstm", 0, seed=seed)
    network = Layers("lstm", seed)
    builder = network.builder
    steps = builder.op("Transpose", network.input("x", ir.DataType.FLOAT, *input_shape), perm=[1, 0, 2])
    bound = 1 / np.sqrt(width)
    weights = (
        network.uniform("lstm.weight", bound, 1, 4 * width, input_shape[1]),
        network.uniform("lstm.recurrent_weight", bound, 1, 4 * width, width),
        network.uniform("lstm.bias", bound, 1, 8 * width),
    )
    _, last = builder.op("LSTM", steps, *weights, outputs=2, hidden_size=width)
    state = builder.op("Squeeze", last, builder.integers([0]))
    return network.model(network.dense("classifier", state, width, classes), classes)
