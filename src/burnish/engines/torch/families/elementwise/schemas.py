"""The operators that the kernels of this folder implement."""

from burnish.engines.torch.native.kernels import Use, declare_kernel

declare_kernel(
    "elementwise",
    "elementwise(Tensor[] tensors, float[] constants, int[] program, int[] outputs) -> Tensor[]",
    "elementwise_sums(Tensor[] tensors, float[] constants, int[] program, int[] outputs, int[] summed, int kept) -> Tensor[]",
    "update_state_(Tensor(a!)[] tensors, Tensor plan, Tensor constants, Tensor(b!)[] entries, Tensor[] values,"
    " Tensor(c!)[] counters, Tensor[] increments) -> ()",
    use=Use.ALL,
)
