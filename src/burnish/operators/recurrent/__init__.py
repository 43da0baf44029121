"""Recurrent layers: LSTM, GRU and RNN, in each direction, with padded batches.

In a training graph a layer becomes, per direction, the product of all frames with its input weight, in front of the recursion,
and a semantic operator for the recursion itself, which keeps what the gradient reads:

    LSTMSteps(z, r, initial_h, initial_c, live, p; reverse) -> h, last_h, last_c, c, iof, g
    GRUSteps(z, r, initial_h, b, live; reverse, linear_before_reset) -> h, last_h, update_reset, n, q
    RNNSteps(z, r, initial_h, live; reverse, activation) -> h, last_h

z ``[T, N, G * H]`` is what frames and biases give to the G gates, in the standard's order of them; r ``[G * H, H]``; live
``[T, N, 1]``, bool, left out where every sequence has all T frames: a frame that is not live leaves the state as it is.

The gradients, ``LSTMStepsGrad`` and so on, go through time the other way. What a state's cotangent is multiplied with is known
before they begin, for all frames at once: a step of them is a product with r and few multiplications. The gradients of the
weights are one product each after the recursion, over all frames.
"""

from burnish.operators.recurrent import gru, lstm, rnn
from burnish.operators.recurrent.layer import is_recurrent, lacks_kernel

__all__ = ["gru", "is_recurrent", "lacks_kernel", "lstm", "rnn"]
