"""The operators that the kernels of this folder implement."""

from burnish.engines.torch.native.kernels import Use, declare_kernel

_DEPTHWISE = (
    "depthwise_convolution{}(Tensor x, Tensor weight, Tensor? bias, int stride, int[] pads) -> Tensor",
    "depthwise_convolution_gradient{}(Tensor dy, Tensor x, Tensor weight, int stride, int[] pads, bool input, bool weight_too)"
    " -> (Tensor, Tensor)",
)

declare_kernel(
    "winograd",
    "winograd_convolution(Tensor x, Tensor weight, Tensor? bias, int[] padding) -> Tensor",
    "winograd_input_gradient(Tensor dy, Tensor weight, int[] padding) -> Tensor",
    use=Use.SOME,
)
declare_kernel(
    "winograd_weights",
    "winograd_weight_gradient(Tensor dy, Tensor x, int[] padding) -> Tensor",
    "convolution_weight_gradient(Tensor dy, Tensor x, int[] extents, int[] strides, int[] padding) -> Tensor",
    use=Use.SOME,
)
declare_kernel(
    "pointwise_gradient",
    "pointwise_gradient(Tensor dy, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    use=Use.SOME,
)
declare_kernel("depthwise", *_DEPTHWISE, use=Use.SOME)
declare_kernel(
    "convolution_weights_bfloat16",
    "convolution_weight_gradient_bfloat16(Tensor dy, Tensor x, int[] extents, int[] strides, int[] padding) -> Tensor",
)
declare_kernel("depthwise_5x5", *_DEPTHWISE, suffix="_5x5")
declare_kernel("depthwise_bfloat16", *_DEPTHWISE, suffix="_bfloat16")
declare_kernel("depthwise_5x5_bfloat16", *_DEPTHWISE, suffix="_5x5_bfloat16")
