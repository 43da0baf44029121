"""The operators that the kernels of this folder implement."""

from burnish.engines.torch.native.kernels import Use, declare_kernel

_BATCH_NORM = (
    "batch_norm_training{}(Tensor x, Tensor scale, Tensor bias, Tensor? added, float epsilon, int activation, float limit)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_BATCH_NORM_GRADIENT = (
    "batch_norm_gradient{}(Tensor dy, Tensor x, Tensor scale, Tensor inverse_std, Tensor saved, Tensor? y, Tensor? more,"
    " Tensor? bias, int activation, float limit, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
)
_BATCH_NORM_SYNCHRONIZED = (
    "batch_norm_moments{}(Tensor x) -> (Tensor, Tensor)",
    "batch_norm_apply{}(Tensor x, Tensor pivot, Tensor center, Tensor gain, Tensor bias, Tensor? added, int activation,"
    " float limit) -> Tensor",
    "batch_norm_gradient_sums{}(Tensor dy, Tensor x, Tensor pivot, Tensor center, Tensor? y, Tensor? gain, Tensor? bias,"
    " Tensor? more, int activation, float limit, bool keep) -> (Tensor, Tensor)",
    "batch_norm_gradient_apply{}(Tensor dy, Tensor x, Tensor pivot, Tensor center, Tensor gain, Tensor slope, Tensor offset,"
    " Tensor? y, Tensor? bias, int activation, float limit) -> Tensor",
)

declare_kernel("batch_norm_gradient", *_BATCH_NORM_GRADIENT, use=Use.MOST)
declare_kernel("batch_norm", *_BATCH_NORM, use=Use.MOST)
declare_kernel(
    "standardize",
    "standardize(Tensor x, Tensor? scale, Tensor? bias, int axis, float epsilon, float offset, bool centered)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "standardize_gradient(Tensor dy, Tensor x, Tensor? mean, Tensor? shift, Tensor inverse, Tensor? scale, int axis,"
    " float offset, bool centered, bool parameters) -> (Tensor, Tensor, Tensor)",
    use=Use.SOME,
)
declare_kernel(
    "group_norm",
    "group_norm(Tensor x, Tensor scale, Tensor bias, int num_groups, float epsilon, int activation, float limit)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "group_norm_gradient(Tensor dy, Tensor x, Tensor scale, Tensor bias, Tensor mean, Tensor inverse_std, Tensor shift,"
    " int num_groups, int activation, float limit) -> (Tensor, Tensor, Tensor)",
    use=Use.SOME,
)
declare_kernel(
    "local_response",
    "local_response(Tensor x, int size, float alpha, float beta, float bias) -> Tensor",
    "local_response_gradient(Tensor dy, Tensor x, int size, float alpha, float beta, float bias) -> Tensor",
)
declare_kernel(
    "batch_norm_synchronized",
    "batch_norm_merge(Tensor gathered, Tensor scale, float epsilon) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "batch_norm_gradient_merge(Tensor total, Tensor count, Tensor inverse_std, Tensor scale) -> (Tensor, Tensor, Tensor, Tensor)",
    *_BATCH_NORM_SYNCHRONIZED,
)
declare_kernel("batch_norm_bfloat16", *_BATCH_NORM, suffix="_bfloat16")
declare_kernel("batch_norm_gradient_bfloat16", *_BATCH_NORM_GRADIENT, suffix="_bfloat16")
declare_kernel("batch_norm_synchronized_bfloat16", *_BATCH_NORM_SYNCHRONIZED, suffix="_bfloat16")
