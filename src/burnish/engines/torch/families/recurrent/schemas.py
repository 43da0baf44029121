"""The operators that the kernels of this folder implement."""

from burnish.engines.torch.native.kernels import declare_kernel

declare_kernel(
    "lstm",
    "lstm_steps(Tensor z, Tensor r, Tensor initial_h, Tensor initial_c, bool reverse)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "lstm_steps_gradient(Tensor r, Tensor initial_c, Tensor c, Tensor iof, Tensor g, Tensor? dh, Tensor? d_last_h,"
    " Tensor? d_last_c, bool reverse) -> (Tensor, Tensor, Tensor)",
)
