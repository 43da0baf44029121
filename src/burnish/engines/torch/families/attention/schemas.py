"""The operators that the kernels of this folder implement."""

from burnish.engines.torch.native.kernels import Use, declare_kernel

declare_kernel(
    "attention",
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool zeros) -> (Tensor, Tensor)",
    "attention_gradient(Tensor flow, Tensor query, Tensor key, Tensor value, Tensor result, Tensor logarithms, Tensor? mask,"
    " float scale) -> (Tensor, Tensor, Tensor)",
    use=Use.MOST,
)
