"""Operators that are decomposed before PyTorch's exporter translates the others: those that its translations get wrong.

A translation has an operator's arguments and need not read them. What it does not read is seen here, from its code: an argument
that says something is decomposed by PyTorch itself, where PyTorch can, and is an error by name elsewhere.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.onnx._internal.exporter._registration import ONNXRegistry

from burnish.importer.pytorch.refusals import UnreadArgumentError
from burnish.importer.pytorch.translation import OPSET, TRANSLATIONS

aten = torch.ops.aten

WITHOUT_EFFECT = frozenset(
    "layout device pin_memory memory_format generator non_blocking copy sparse sparse_grad cudnn_enabled cudnn_enable benchmark "
    "deterministic allow_tf32 requires_grad path implicit output_size stride sorted return_complex return_debug_mask "
    "scales scales_d scales_h scales_w".split()
)
"""Arguments that say how something is computed or stored, or what others say too; scales are looked at by themselves."""


def average_pool(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """``avg_pool2d`` and ``avg_pool3d`` that divide by a number of their own: a pool over padded values, scaled."""
    if divisor_override is None:
        return NotImplemented
    rank = len(kernel_size)
    pool = aten.avg_pool2d.default if rank == 2 else aten.avg_pool3d.default
    kernel, pads = _each(kernel_size, rank), _each(padding, rank)
    strides = _each(stride, rank) if len(stride) else kernel
    following = []
    for extent, size, step, pad in zip(x.shape[-rank:], kernel, strides, pads, strict=True):
        results = (extent + 2 * pad - size + (step - 1 if ceil_mode else 0)) // step + 1
        if ceil_mode and (results - 1) * step >= extent + pad:
            results = results - 1
        following.append(max((results - 1) * step + size - extent - pad, 0) if ceil_mode else pad)
    edges = [edge for pad, last in zip(reversed(pads), reversed(following), strict=True) for edge in (pad, last)]
    padded = aten.constant_pad_nd.default(x, edges, 0.0) if any(edges) else x
    count = 1
    for size in kernel:
        count *= size
    return pool(padded, kernel, strides) * (count / divisor_override)


def _each(setting: Sequence[int], rank: int) -> list[int]:
    return list(setting) * rank if len(setting) == 1 else list(setting)


def scatter_means(x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """``scatter_reduce`` by means: sums over counts."""
    if reduce != "mean":
        return NotImplemented
    for axis in range(index.dim()):
        src = src.narrow(axis, 0, index.shape[axis]) if src.shape[axis] != index.shape[axis] else src
    ones = torch.ones_like(src)
    if include_self:
        total = x.scatter_reduce(dim, index, src, "sum")
        count = torch.ones_like(x).scatter_reduce(dim, index, ones, "sum")
    else:
        total = torch.zeros_like(x).scatter_reduce(dim, index, src, "sum")
        count = torch.zeros_like(x).scatter_reduce(dim, index, ones, "sum")
    least = count if include_self else count.clamp(min=1)
    mean = total / least if x.is_floating_point() else torch.div(total, least, rounding_mode="floor")
    return mean if include_self else torch.where(count > 0, mean, x)


OWN: dict[Any, Callable[..., Any]] = {
    aten.avg_pool2d.default: average_pool,
    aten.avg_pool3d.default: average_pool,
    aten.scatter_reduce.two: scatter_means,
}
"""Decompositions that PyTorch does not have. Each returns ``NotImplemented`` where the exporter's translation is right."""

LOSSES = (
    aten.cross_entropy_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
)
"""Losses over classes, which PyTorch decomposes one into the next."""


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program without the operators that the exporter's translations would get wrong.

    Raises:
        UnreadArgumentError: there is one that PyTorch cannot decompose: it is named.
    """
    table: dict[Any, Callable[..., Any]] = {}
    known = torch.export.default_decompositions().materialize()
    for node in _operators(program):
        operator: Any = node.target
        if operator == aten.embedding_renorm_.default:
            raise UnreadArgumentError(
                "forward writes to the table of an embedding, as max_norm does, and a graph does not: write to it after the "
                "optimizer's step, outside of forward"
            )
        if operator in OWN:
            table[operator] = OWN[operator]
        elif (reason := _misread(node)) is None:
            continue
        elif operator in LOSSES:
            table.update({loss: known[loss] for loss in LOSSES if loss in known})
        elif operator in known:
            table[operator] = known[operator]
        else:
            raise UnreadArgumentError(f"{operator} has {reason}, which the translation to ONNX does not read")
    return program.run_decompositions(table) if table else program


def refuse_misread(program: torch.export.ExportedProgram) -> None:
    """Refuse a program, as the exporter decomposed it, with arguments that translations do not read.

    Raises:
        UnreadArgumentError: there is one: it is named.
    """
    for node in _operators(program):
        if (reason := _misread(node)) is not None:
            raise UnreadArgumentError(f"{node.target} has {reason}, which the translation to ONNX does not read")


def _operators(program: torch.export.ExportedProgram) -> Iterator[fx.Node]:
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            yield from (node for node in part.graph.nodes if isinstance(node.target, torch._ops.OpOverload))


def _misread(node: fx.Node) -> str | None:
    """What a translation does not read of a node's arguments, in words; None where it reads all that counts."""
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
    """The arguments of an operator that its translation has not, or does not read."""
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
    """Scales other than the quotients of the extents, which translations of interpolations read in their place."""
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
"""Arguments that a translation reads, and takes for something else."""
