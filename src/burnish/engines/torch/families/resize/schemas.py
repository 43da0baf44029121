"""The operators that the kernels of this folder implement."""

from burnish.engines.torch.native.kernels import Use, declare_kernel

declare_kernel(
    "interpolate",
    "interpolate(Tensor x, Tensor row_starts, Tensor row_places, Tensor row_weights, Tensor column_starts,"
    " Tensor column_places, Tensor column_weights) -> Tensor",
    use=Use.SOME,
)
