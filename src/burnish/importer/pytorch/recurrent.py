"""``aten.rnn_tanh`` and ``aten.rnn_relu`` as the standard's RNN, with dropout between layers; the exporter drops that, and writes
one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset20
from onnxscript.onnx_types import TensorType

op: Any = opset20


def recurrent(activation: str) -> Callable[..., Any]:
    """Return the translation of a recurrent network.

    Args:
        activation: ``Tanh`` or ``Relu``.
    """

    def translated(
        input: TensorType,
        hx: TensorType,
        params: Sequence[TensorType],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
        state: Any = hx
        x: Any = input
        size = state.shape[2]
        if batch_first:
            x = op.Transpose(x, perm=[1, 0, 2])
        states = []
        for layer in range(num_layers):
            first = layer * directions
            start = op.Slice(hx, _integers(first), _integers(first + directions), _integers(0))
            weights = [params[(first + direction) * each : (first + direction + 1) * each] for direction in range(directions)]
            x, last = op.RNN(
                x,
                _together([one[0] for one in weights]),
                _together([one[1] for one in weights]),
                _together([op.Concat(one[2], one[3], axis=0) for one in weights]) if has_biases else None,
                None,
                start,
                activations=[activation] * directions,
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=size,
            )
            # From [time, direction, batch, size] to [time, batch, direction and size].
            x = op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), _integers(0, 0, directions * size))
            states.append(last)
            if train and dropout > 0 and layer + 1 < num_layers:
                ratio = op.Constant(value=ir.tensor(np.asarray(dropout, input.dtype.numpy())))
                x, _ = op.Dropout(x, ratio, op.Constant(value=ir.tensor(np.asarray(True))))
        if batch_first:
            x = op.Transpose(x, perm=[1, 0, 2])
        return x, states[0] if num_layers == 1 else op.Concat(*states, axis=0)

    return translated


def _together(matrices: Sequence[Any]) -> Any:
    """One tensor of those of each direction."""
    each = [op.Unsqueeze(matrix, _integers(0)) for matrix in matrices]
    return each[0] if len(each) == 1 else op.Concat(*each, axis=0)


def _integers(*values: int) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(values, np.int64)))
