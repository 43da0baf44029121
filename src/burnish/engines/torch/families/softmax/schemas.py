"""The operators that the kernels of this folder implement."""

from burnish.engines.torch.native.kernels import Use, declare_kernel

declare_kernel(
    "cross_entropy",
    "cross_entropy(Tensor logits, Tensor labels, int ignored) -> (Tensor, Tensor, Tensor)",
    "cross_entropy_gradient(Tensor logits, Tensor labels, Tensor saved, Tensor flow, int ignored) -> Tensor",
    use=Use.MOST,
)
