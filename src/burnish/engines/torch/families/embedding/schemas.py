"""The operators that the kernels of this folder implement."""

from burnish.engines.torch.native.kernels import declare_kernel

declare_kernel(
    "rows",
    "coalesce_rows(Tensor indices, Tensor rows) -> (Tensor, Tensor)",
    "lookup_rows(Tensor[] tables, Tensor[] indices) -> Tensor[]",
    "update_rows_(Tensor(a!)[] tensors, Tensor plan, Tensor constants) -> ()",
)
