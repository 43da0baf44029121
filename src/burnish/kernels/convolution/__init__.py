"""Convolutions, their gradients and max pooling, for images with channels last: the operators that graph passes insert.

``ChannelsLast...`` are for engines whose tensors are stored in the order of their axes: images are [N, H, W, C], kernels [K, C /
group, height, width] as usual. Their attributes are ``kernel_shape``, ``strides``, ``dilations``, ``pads`` and ``group`` of the
convolution, and ``threads``, the number of parts that sums are split into. The attributes ``input`` and ``weight`` of the
gradient select its outputs: the other one is absent.
"""

from burnish.kernels.engine_operator import EngineOperator

CHANNELS_LAST_CONV = EngineOperator("ChannelsLastConv", ("x", "w", "b"), ("y",))
CHANNELS_LAST_CONV_GRAD = EngineOperator("ChannelsLastConvGrad", ("dy", "x", "w"), ("dx", "dw"))
CHANNELS_LAST_MAX_POOL = EngineOperator("ChannelsLastMaxPool", ("x",), ("y",))
CHANNELS_LAST_MAX_POOL_GRAD = EngineOperator("ChannelsLastMaxPoolGrad", ("dy", "x", "y"), ("dx",))


CHOSEN_CONV = EngineOperator("ChosenConv", ("x", "w", "b"), ("y",))
CHOSEN_CONV_TRANSPOSE = EngineOperator("ChosenConvTranspose", ("x", "w", "b"), ("y",))
CHOSEN_CONV_INPUT_GRAD = EngineOperator("ChosenConvInputGrad", ("dy", "w", "x"), ("dx",))
CHOSEN_CONV_WEIGHT_GRAD = EngineOperator("ChosenConvWeightGrad", ("dy", "x", "w"), ("dw",))
CONV_INPUT_GRAD_NARROW = EngineOperator("ConvInputGradNarrow", ("dy", "w", "x"), ("dx",))
CONV_WEIGHT_GRAD_NARROW = EngineOperator("ConvWeightGradNarrow", ("dy", "x", "w"), ("dw",))
DEPTHWISE_CONV = EngineOperator("DepthwiseConv", ("x", "w", "b"), ("y",))
DEPTHWISE_CONV_GRAD = EngineOperator("DepthwiseConvGrad", ("dy", "x", "w"), ("dx", "dw"))
WINOGRAD_CONV = EngineOperator("WinogradConv", ("x", "w", "b"), ("y",))
WINOGRAD_CONV_INPUT_GRAD = EngineOperator("WinogradConvInputGrad", ("dy", "w"), ("dx",))
WINOGRAD_CONV_WEIGHT_GRAD = EngineOperator("WinogradConvWeightGrad", ("dy", "x"), ("dw",))
POINTWISE_CONV = EngineOperator("PointwiseConv", ("x", "w", "b"), ("y",))
POINTWISE_CONV_INPUT_GRAD = EngineOperator("PointwiseConvInputGrad", ("dy", "w", "x"), ("dx",))
POINTWISE_CONV_GRAD = EngineOperator("PointwiseConvGrad", ("dy", "x", "w"), ("dx", "dw"))
CONV_WEIGHT_GRAD_PRODUCTS = EngineOperator("ConvWeightGradProducts", ("dy", "x"), ("dw",))
