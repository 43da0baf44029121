"""The operators that a graph pass puts where convolutions and max pooling were, for engines whose tensors lie in the order of
their axes: images are [N, H, W, C], kernels [K, C / group, height, width] as everywhere.

They carry ``kernel_shape``, ``strides``, ``dilations``, ``pads`` and ``group`` of the convolution, and ``threads``, in how many
parts sums are cut. The gradient says which of its outputs are wanted, ``input`` and ``weight``: the other is left out.
"""

from burnish.engines.kernels.engine_operator import EngineOperator

CHANNELS_LAST_CONV = EngineOperator("ChannelsLastConv", ("x", "w", "b"), ("y",))
CHANNELS_LAST_CONV_GRAD = EngineOperator("ChannelsLastConvGrad", ("dy", "x", "w"), ("dx", "dw"))
CHANNELS_LAST_MAX_POOL = EngineOperator("ChannelsLastMaxPool", ("x",), ("y",))
CHANNELS_LAST_MAX_POOL_GRAD = EngineOperator("ChannelsLastMaxPoolGrad", ("dy", "x", "y"), ("dx",))
