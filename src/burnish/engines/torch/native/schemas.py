"""The operators that the kernels implement, as PyTorch's dispatcher knows them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import torch

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

_DEPTHWISE = (
    "depthwise_convolution{}(Tensor x, Tensor weight, Tensor? bias, int stride, int[] pads) -> Tensor",
    "depthwise_convolution_gradient{}(Tensor dy, Tensor x, Tensor weight, int stride, int[] pads, bool input, bool weight_too)"
    " -> (Tensor, Tensor)",
)


def _named(schemas: Iterable[str], suffix: str) -> tuple[str, ...]:
    return tuple(schema.format(suffix) for schema in schemas)


SCHEMAS = {
    "allocator": ("keep_pages() -> bool",),
    "batch_norm_gradient": _named(_BATCH_NORM_GRADIENT, ""),
    "elementwise": (
        "elementwise(Tensor[] tensors, float[] constants, int[] program, int[] outputs) -> Tensor[]",
        "elementwise_sums(Tensor[] tensors, float[] constants, int[] program, int[] outputs, int[] summed, int kept) -> Tensor[]",
        "update_state_(Tensor(a!)[] tensors, Tensor plan, Tensor constants, Tensor(b!)[] entries, Tensor[] values,"
        " Tensor(c!)[] counters, Tensor[] increments) -> ()",
    ),
    "products": (
        "product(Tensor left, Tensor right, Tensor? bias) -> Tensor",
        "batched_product(Tensor left, Tensor right, int[] order) -> Tensor",
    ),
    "attention": (
        "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool zeros) -> (Tensor, Tensor)",
        "attention_gradient(Tensor flow, Tensor query, Tensor key, Tensor value, Tensor result, Tensor logarithms, Tensor? mask,"
        " float scale) -> (Tensor, Tensor, Tensor)",
    ),
    "linear": (
        "linear(Tensor x, Tensor weight, Tensor? bias, bool transposed, bool relu) -> Tensor",
        "linear_gradient(Tensor dy, Tensor x, Tensor? weight, bool transposed, bool swapped, bool relu, bool bias)"
        " -> (Tensor, Tensor, Tensor)",
    ),
    "cross_entropy": (
        "cross_entropy(Tensor logits, Tensor labels, int ignored) -> (Tensor, Tensor, Tensor)",
        "cross_entropy_gradient(Tensor logits, Tensor labels, Tensor saved, Tensor flow, int ignored) -> Tensor",
    ),
    "batch_norm": _named(_BATCH_NORM, ""),
    "winograd": (
        "winograd_convolution(Tensor x, Tensor weight, Tensor? bias, int[] padding) -> Tensor",
        "winograd_input_gradient(Tensor dy, Tensor weight, int[] padding) -> Tensor",
    ),
    "winograd_weights": (
        "winograd_weight_gradient(Tensor dy, Tensor x, int[] padding) -> Tensor",
        "convolution_weight_gradient(Tensor dy, Tensor x, int[] extents, int[] strides, int[] padding) -> Tensor",
    ),
    "pointwise_gradient": ("pointwise_gradient(Tensor dy, Tensor x, Tensor weight) -> (Tensor, Tensor)",),
    "depthwise": _named(_DEPTHWISE, ""),
    "standardize": (
        "standardize(Tensor x, Tensor? scale, Tensor? bias, int axis, float epsilon, float offset, bool centered)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        "standardize_gradient(Tensor dy, Tensor x, Tensor? mean, Tensor? shift, Tensor inverse, Tensor? scale, int axis,"
        " float offset, bool centered, bool parameters) -> (Tensor, Tensor, Tensor)",
    ),
    "group_norm": (
        "group_norm(Tensor x, Tensor scale, Tensor bias, int num_groups, float epsilon, int activation, float limit)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        "group_norm_gradient(Tensor dy, Tensor x, Tensor scale, Tensor bias, Tensor mean, Tensor inverse_std, Tensor shift,"
        " int num_groups, int activation, float limit) -> (Tensor, Tensor, Tensor)",
    ),
    "interpolate": (
        "interpolate(Tensor x, Tensor row_starts, Tensor row_places, Tensor row_weights, Tensor column_starts,"
        " Tensor column_places, Tensor column_weights) -> Tensor",
    ),
    "shared_memory": (
        "shared_give(Tensor marks, Tensor slots, Tensor value, int number, int operation) -> ()",
        "shared_take(Tensor[] marks, Tensor[] slots, Tensor(a!) result, int number, int operation, float seconds) -> int",
        "shared_show(Tensor marks, int number) -> ()",
        "shared_sum(Tensor[] marks, Tensor(a!)[] buffers, int rank, int number, float seconds) -> int",
        "shared_section(Tensor[] marks, Tensor(a!)[] buffers, int rank, int first, int last, int number, float seconds) -> int",
        "shared_await(Tensor[] marks, int number, float seconds) -> int",
        "shared_release(Tensor(a!) marks, int number) -> ()",
        "shared_settle(Tensor[] marks, int number, float seconds) -> int",
        "shared_leave(Tensor marks) -> ()",
    ),
    "batch_norm_synchronized": (
        "batch_norm_merge(Tensor gathered, Tensor scale, float epsilon)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        "batch_norm_gradient_merge(Tensor total, Tensor count, Tensor inverse_std, Tensor scale)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        *_named(_BATCH_NORM_SYNCHRONIZED, ""),
    ),
    "convolution_weights_bfloat16": (
        "convolution_weight_gradient_bfloat16(Tensor dy, Tensor x, int[] extents, int[] strides, int[] padding) -> Tensor",
    ),
    "depthwise_5x5": _named(_DEPTHWISE, "_5x5"),
    "depthwise_bfloat16": _named(_DEPTHWISE, "_bfloat16"),
    "depthwise_5x5_bfloat16": _named(_DEPTHWISE, "_5x5_bfloat16"),
    "batch_norm_bfloat16": _named(_BATCH_NORM, "_bfloat16"),
    "batch_norm_gradient_bfloat16": _named(_BATCH_NORM_GRADIENT, "_bfloat16"),
    "batch_norm_synchronized_bfloat16": _named(_BATCH_NORM_SYNCHRONIZED, "_bfloat16"),
}
"""By the file that implements them. Files are built in this order: first what most programs need, of that the longest."""

KERNEL_OF = {schema.partition("(")[0]: kernel for kernel, schemas in SCHEMAS.items() for schema in schemas}
"""The file that implements an operator."""


@functools.cache
def define() -> torch.library.Library:
    """Define the operators, once; what implements them is loaded later. They live as long as what is returned, which is kept."""
    library = torch.library.Library("burnish", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in itertools.chain(*SCHEMAS.values()):
        library.define(schema)  # type: ignore[no-untyped-call]
    return library
