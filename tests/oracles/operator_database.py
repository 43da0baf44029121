"""PyTorch's own databases of operators and modules, with samples of their inputs, through burnish: right, refused or wrong."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("expecttest", reason="PyTorch's databases need it")

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import burnish.torch
from burnish.errors import BurnishError

# The imports freeze what chooses how PyTorch multiplies, and other tests in this process set it.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

WAYS = ("wrap", "torch.compile")

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)

TOLERANCE = 1e-6

OPERATORS = {f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name: info for info in op_db}

NETWORKS = {info.name: info for info in module_db}


class Call(nn.Module):
    """A function of the tensors among its arguments; all else is fixed."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.function = [function]
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.examples = [leaves[index] for index in self.places]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.fixed)
        for index, tensor in zip(self.places, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function[0](*args, **kwargs)


@dataclass(frozen=True)
class Outcome:
    """What became of a sample: ``right``, ``refused``, ``wrong``, or ``skipped`` where PyTorch itself has no one answer."""

    kind: str
    why: str = ""


Sample = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module, and what it is called with."""


def operator_samples(name: str, count: int | None) -> list[Sample]:
    """The first samples of an operator, or all, in the widest dtype that it has: the same at each call."""
    info = OPERATORS[name]
    if "wrapper_set_seed" in getattr(getattr(info.op, "__code__", None), "co_names", ()):
        return []  # it draws the same numbers at each call, as no graph does
    dtype = next((dtype for dtype in DTYPES if info.supports_dtype(dtype, "cpu")), None)
    if dtype is None:
        return []
    differentiable = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    samples = itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=differentiable), count)
    calls = [Call(info.op, (sample.input, *sample.args), dict(sample.kwargs)) for sample in samples]
    return [(call, tuple(call.examples), {}) for call in calls]


def module_samples(name: str, count: int | None) -> list[Sample]:
    """The first samples of a module, or all."""
    info = NETWORKS[name]
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    samples = []
    for sample in itertools.islice(inputs, count):
        if sample.forward_input is not None:
            built = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double()
            samples.append((built, tuple(sample.forward_input.args), dict(sample.forward_input.kwargs)))
    return samples


def outcome(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], way: str, verify: bool = True) -> Outcome:
    """Call a module and the same by burnish, and compare what they return and the gradients of inputs and parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted, again = (_called(own, own, args, kwargs) for own in (copy.deepcopy(module), copy.deepcopy(module)))
        except Exception as error:
            return Outcome("skipped", f"PyTorch: {type(error).__name__}")
        if _difference(wanted, again) is not None:
            return Outcome("skipped", "it draws at random")
        taken = copy.deepcopy(module)
        try:
            if way == "wrap":
                called = burnish.torch.wrap(taken, _Examples(args, kwargs, module).given, verify=verify)
            else:
                torch._dynamo.reset()
                called = torch.compile(taken, backend="burnish", options={"verify": verify})
            found = _called(called, taken, args, kwargs)
        except BurnishError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome("refused", f"bare {type(error).__name__}: {error}")
        difference = _difference(found, wanted)
        return Outcome("right") if difference is None else Outcome("wrong", difference)


class _Examples:
    """Arguments as ``wrap`` takes them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module):
        fresh = pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        self.given: Any = fresh[0]
        if kwargs:
            self.given = dict(inspect.signature(module.forward).bind(*fresh[0], **fresh[1]).arguments)


def _called(call: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    def fresh(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    own_args, own_kwargs = pytree.tree_map(fresh, (args, kwargs))
    result = call(*own_args, **own_kwargs)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    carrying = [leaf for leaf in outputs if leaf.requires_grad]
    generator = torch.Generator().manual_seed(1)
    if carrying:
        cotangents = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype) for leaf in carrying]
        torch.autograd.backward(carrying, cotangents)
    leaves = [leaf for leaf in pytree.tree_leaves((own_args, own_kwargs)) if isinstance(leaf, torch.Tensor)]
    gradients = [leaf.grad for leaf in (*leaves, *module.parameters()) if leaf.requires_grad]
    constants = [leaf for leaf in pytree.tree_leaves(result) if not isinstance(leaf, torch.Tensor)]
    buffers = [buffer.detach().clone() for buffer in module.buffers()]
    return [constants, *(leaf.detach() for leaf in outputs), *gradients, *buffers]


def _difference(found: list[Any], wanted: list[Any]) -> str | None:
    if len(found) != len(wanted):
        return f"{len(found)} results in place of {len(wanted)}"
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if isinstance(theirs, torch.Tensor) or isinstance(mine, torch.Tensor):
            mine = torch.zeros_like(theirs) if mine is None else mine
            theirs = torch.zeros_like(mine) if theirs is None else theirs
            mine, theirs = mine.to_dense(), theirs.to_dense()
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                return f"result {index}: {mine.dtype} {list(mine.shape)} in place of {theirs.dtype} {list(theirs.shape)}"
            if not torch.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                return f"result {index} is off by {float((mine.to(torch.complex128) - theirs).abs().nan_to_num().max()):.3g}"
        elif mine != theirs:
            return f"{mine!r} in place of {theirs!r}"
    return None
