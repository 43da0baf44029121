"""The operators that the kernels of this folder implement."""

from burnish.engines.torch.native.kernels import Use, declare_kernel

declare_kernel(
    "products",
    "product(Tensor left, Tensor right, Tensor? bias) -> Tensor",
    "batched_product(Tensor left, Tensor right, int[] order) -> Tensor",
    use=Use.MOST,
)
declare_kernel(
    "linear",
    "linear(Tensor x, Tensor weight, Tensor? bias, bool transposed, bool relu) -> Tensor",
    "linear_gradient(Tensor dy, Tensor x, Tensor? weight, bool transposed, bool swapped, bool relu, bool bias)"
    " -> (Tensor, Tensor, Tensor)",
    use=Use.MOST,
)
