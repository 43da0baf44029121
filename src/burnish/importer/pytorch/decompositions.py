"""Choice of the operators that PyTorch decomposes before its exporter translates the others.

PyTorch's decompositions are reliable, so every operator with one is decomposed unless kept deliberately. The translation of a
kept operator may ignore some arguments, as its code shows: calls that use them are decomposed too, or refused with the argument's
name.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.onnx._internal.exporter import _decomp
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.utils import _pytree as pytree

from burnish.importer.pytorch.own_decompositions import COMPLEX, OWN, WRITTEN_OUT
from burnish.importer.pytorch.refusals import UnreadArgumentError
from burnish.importer.pytorch.translation import OPSET, TRANSLATIONS

aten = torch.ops.aten

WITHOUT_EFFECT = frozenset(
    "layout device pin_memory memory_format generator non_blocking copy sparse sparse_grad cudnn_enabled cudnn_enable benchmark "
    "deterministic allow_tf32 requires_grad path implicit output_size stride sorted return_complex return_debug_mask "
    "scales scales_d scales_h scales_w".split()
)
"""Arguments without effect on the result, or redundant; scales are checked separately."""


KEPT = frozenset(
    # layers with burnish's own gradients, kernels and numerics
    "conv1d conv2d conv3d linear matmul einsum layer_norm group_norm instance_norm lstm gru rnn_tanh rnn_relu "
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu embedding_bag grid_sampler "
    "avg_pool1d max_pool1d max_pool1d_with_indices max_pool2d max_pool3d pixel_shuffle pixel_unshuffle col2im im2col stft "
    # activations and losses
    "celu glu hardsigmoid hardswish log_sigmoid log_softmax mish _prelu_kernel prelu relu6 selu silu softmax softplus sinc "
    "special_log_softmax special_softmax special_sinc special_erf special_erfc special_expm1 xlogy special_xlogy logsumexp "
    "cross_entropy_loss nll_loss nll_loss_forward mse_loss "
    # quantization with straight-through gradients
    "fake_quantize_per_channel_affine fake_quantize_per_tensor_affine "
    # extents, copies and indexing: one ONNX operator each
    "arange concat concatenate detach diagonal_copy empty_like fill masked_fill new_empty new_full new_ones new_zeros ones "
    "ones_like pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
    "repeat_interleave roll split squeeze stack sym_size t tile transpose tril triu type_as unbind unsafe_split _unsafe_index "
    "_unsafe_index_put _unsafe_view upsample_bicubic2d upsample_linear1d upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_trilinear3d where zeros zeros_like "
    # arithmetic: one ONNX operator each; bounds have PyTorch's gradients
    "addcdiv addcmul all baddbmm bernoulli clamp_max clamp_min det divide dot floor_divide greater greater_equal heaviside "
    "isfinite isneginf isposinf is_nonzero less less_equal linalg_det logdet multiply mv subtract sum true_divide".split()
)
"""Operators that are not decomposed, since burnish reads their translations."""

REFUSED = {
    aten.embedding_renorm_.default: "forward writes to the table of an embedding, as max_norm does, and a graph does not: write "
    "to it after the optimizer's step, outside of forward",
    aten.special_erfcx.default: "the translation of torch.special.erfcx to ONNX loses all digits above 6",
}
"""Operators that cannot be translated, with the reason."""

LOSSES = (
    aten.cross_entropy_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
)
"""Losses over classes, which PyTorch decomposes into one another."""


def decompositions(program: torch.export.ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions for a program: all except operators that a translation computes correctly.

    Raises:
        UnreadArgumentError: an operator can be neither translated correctly nor decomposed; the message names it.
    """
    known = torch.export.default_decompositions().materialize()
    table = {**_of_pytorch(known), **OWN}
    if has_complex_numbers(program):
        table.update({**{operator: known[operator] for operator in WRITTEN_OUT}, **COMPLEX})
    for node in _operators(program):
        operator: Any = node.target
        if operator in REFUSED:
            raise UnreadArgumentError(REFUSED[operator])
        if operator in table or (reason := _misread(node)) is None:
            continue
        if operator in LOSSES:
            table.update({loss: known[loss] for loss in LOSSES if loss in known})
        elif operator in known:
            table[operator] = known[operator]
        else:
            raise UnreadArgumentError(f"{operator} has {reason}, which the translation to ONNX does not read")
    return table


def _of_pytorch(known: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    return {
        operator: function
        for operator, function in {**torch._decomp.decomposition_table, **known}.items()
        if hasattr(operator, "_schema") and (not _is_translated(operator) or (operator in known and _name(operator) not in KEPT))
    }


def _name(operator: Any) -> str:
    return str(operator.overloadpacket.__name__)


def _is_translated(operator: Any) -> bool:
    return operator in TRANSLATIONS or _registry().is_registered(operator)


@contextmanager
def decomposing(table: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let the exporter use this decomposition table instead of its own."""
    own = _decomp.create_onnx_friendly_decomposition_table
    try:
        _decomp.create_onnx_friendly_decomposition_table = lambda _: table  # type: ignore[assignment]
        yield
    finally:
        _decomp.create_onnx_friendly_decomposition_table = own


def refuse_misread(program: torch.export.ExportedProgram) -> None:
    """Refuse a decomposed program with arguments that translations ignore.

    Raises:
        UnreadArgumentError: there is one; the message names it.
    """
    for node in _operators(program):
        if (reason := _misread(node)) is not None:
            raise UnreadArgumentError(f"{node.target} has {reason}, which the translation to ONNX does not read")


def has_complex_numbers(program: torch.export.ExportedProgram) -> bool:
    """True if a program uses complex numbers."""
    return any(
        isinstance(value, torch.Tensor) and value.is_complex()
        for part in program.graph_module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        for value in pytree.tree_leaves(node.meta.get("val"))
    )


def _operators(program: torch.export.ExportedProgram) -> Iterator[fx.Node]:
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            yield from (node for node in part.graph.nodes if isinstance(node.target, torch._ops.OpOverload))


def _misread(node: fx.Node) -> str | None:
    """Return the arguments of a node that its translation ignores, in words; None if none matters."""
    operator = node.target
    assert isinstance(operator, torch._ops.OpOverload)
    own = _OWN_CONDITIONS.get(operator)
    if own is not None and (reason := own(node)) is not None:
        return reason
    unread = _unread(operator)
    if not unread:
        return None
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name not in unread or not argument.has_default_value():
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        if given != argument.default_value and not (given is None or given == []):
            return f"{argument.name}={given}"
    return None


@functools.cache
def _unread(operator: torch._ops.OpOverload) -> frozenset[str]:
    """Return the arguments of an operator that its translation lacks or ignores."""
    if operator in TRANSLATIONS:
        functions = [TRANSLATIONS[operator]]
    else:
        functions = [meta.onnx_function for meta in _registry().get_decomps(operator) if not meta.is_complex]
    unread: set[str] = set()
    for function in functions[:1]:
        plain = getattr(function, "func", None) or getattr(function, "function", function)
        code = getattr(plain, "__code__", None)
        if code is None:
            continue
        read = _names_read(code)
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for position, argument in enumerate(operator._schema.arguments):
            name = argument.name if argument.kwarg_only or position >= code.co_argcount else parameters[position]
            if name not in read and argument.name not in WITHOUT_EFFECT:
                unread.add(argument.name)
    return frozenset(unread)


def _names_read(code: Any) -> set[str]:
    read: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_"):
            read.update(instruction.argval if isinstance(instruction.argval, tuple) else [instruction.argval])
    return read


@functools.cache
def _registry() -> ONNXRegistry:
    return ONNXRegistry.from_torchlib(OPSET)


def _is_soft(node: fx.Node) -> str | None:
    target, ignored = node.args[1], node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index")
    value = target.meta.get("val") if isinstance(target, fx.Node) else None
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return "probabilities as targets"
    return "an ignore_index that is an extent" if isinstance(ignored, fx.Node) else None


def _draws_without_replacement(node: fx.Node) -> str | None:
    number = node.args[1]
    replacement = node.args[2] if len(node.args) > 2 else node.kwargs.get("replacement", False)
    return None if replacement or number == 1 else f"num_samples={number} without replacement"


def _scales_otherwise(node: fx.Node) -> str | None:
    """Describe scales that are not the quotients of the extents, which translations of interpolations use instead."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    size: Any = given["output_size"]
    if given["align_corners"]:
        return None
    value = given["self"].meta["val"]
    scales = [given.get(name) for name in names if name.startswith("scales")]
    for scale, extent, result in zip(scales, value.shape[2:], size, strict=False):
        is_whole = scale is None or float(scale) == int(scale)
        known = isinstance(extent, int) and isinstance(result, int)
        if not is_whole and not (known and abs(float(scale) * extent - result) < 1e-9 * result):  # type: ignore[arg-type]
            return f"scale_factor={scale}, which is no quotient of the extents ({extent} to {result}): give size= in its place;"
    return None


_OWN_CONDITIONS: dict[Any, Callable[[fx.Node], str | None]] = {
    **dict.fromkeys(LOSSES, _is_soft),
    aten.multinomial.default: _draws_without_replacement,
    **dict.fromkeys(
        (
            aten._upsample_bilinear2d_aa.default,
            aten._upsample_bicubic2d_aa.default,
            aten.upsample_linear1d.default,
            aten.upsample_bilinear2d.default,
            aten.upsample_bicubic2d.default,
            aten.upsample_trilinear3d.default,
        ),
        _scales_otherwise,
    ),
}
"""Checks of arguments that a translation misinterprets."""
