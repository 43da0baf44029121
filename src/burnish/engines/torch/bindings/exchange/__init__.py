"""Exchanges with other workers, and the kernels by which those of one machine share memory."""

from burnish.engines.torch.native.kernels import declare_kernel

declare_kernel(
    "shared_memory",
    "shared_give(Tensor marks, Tensor slots, Tensor value, int number, int operation) -> ()",
    "shared_take(Tensor[] marks, Tensor[] slots, Tensor(a!) result, int number, int operation, float seconds) -> int",
    "shared_show(Tensor marks, int number) -> ()",
    "shared_sum(Tensor[] marks, Tensor(a!)[] buffers, int rank, int number, float seconds) -> int",
    "shared_section(Tensor[] marks, Tensor(a!)[] buffers, int rank, int first, int last, int number, float seconds) -> int",
    "shared_await(Tensor[] marks, int number, float seconds) -> int",
    "shared_release(Tensor(a!) marks, int number) -> ()",
    "shared_settle(Tensor[] marks, int number, float seconds) -> int",
    "shared_leave(Tensor marks) -> ()",
)
