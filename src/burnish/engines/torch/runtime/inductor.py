"""Whole graphs compiled by Inductor, PyTorch's own compiler: ``TorchEngine(compile="inductor")``.

A translated graph is a pure function of state and batch, so it is compiled without autograd. Open dimensions of the signature are
compiled as symbols, so that another batch size needs no compilation. Only a batch of one is compiled separately, because a size
of one broadcasts; the compiler's guards check that, and its other assumptions about sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from burnish.errors import EngineError
from burnish.installing import install_command
from burnish.program.signature import Entry, GraphSignature, Role


class InPlaceStep(torch.nn.Module):
    """A step graph that updates the state, so that a compiler can fuse the update with the computation.

    The device decides whether the state changes: the host need not know the loss before, and if nothing changes, each entry is
    overwritten with its own bits.

    Args:
        module: the step graph: inputs in the signature's order -> outputs.
        signature: signature of the step graph.
    """

    def __init__(self, module: torch.nn.Module, signature: GraphSignature):
        super().__init__()
        self._module = module
        names = [entry.name for entry in signature.inputs]
        outputs = list(enumerate(signature.outputs))
        self._moves = [(place, names.index(entry.updates)) for place, entry in outputs if entry.updates is not None]
        self._losses = [place for place, entry in outputs if entry.role == Role.LOSS]
        self._reported = [place for place, entry in outputs if entry.updates is None]

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run a step; return its report, in the signature's order.

        Args:
            arguments: the graph's inputs, among them the state entries that are written, and a bool of rank 0 that enables the
                writes.
        """
        *inputs, moves = arguments
        results = self._module(*inputs)
        for place in self._losses:
            moves = moves & results[place].isfinite().all()
        # An entry may take the value of another from before the step.
        following = [(target, torch.where(moves, results[place], inputs[target])) for place, target in self._moves]
        for target, tensor in following:
            inputs[target].copy_(tensor)
        return tuple(results[place] for place in self._reported)


Call = Callable[..., tuple[torch.Tensor, ...]]


class CompiledGraph:
    """A translated graph that is compiled when it is first called.

    Args:
        module: the graph.
        inputs: entries of its inputs, in order.
        graph: its name, for messages.
        around: module that is compiled instead, with more inputs.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Entry], graph: str, around: torch.nn.Module | None = None):
        self._graph = graph
        self._module = module
        self._number = len(inputs)
        self._call: Call = torch.compile(module if around is None else around, fullgraph=True)
        self._open = [
            (position, [axis for axis, extent in enumerate(entry.extents) if not isinstance(extent, int)])
            for position, entry in enumerate(inputs)
            if not entry.is_state
        ]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the graph; inputs must not be inference tensors, which the compiler treats differently.

        Raises:
            EngineError: the compiler cannot compile it.
        """
        for position, axes in self._open:
            for axis in axes:
                torch._dynamo.maybe_mark_dynamic(inputs[position], axis)
        try:
            with torch.no_grad():
                return self._call(*inputs)
        except Exception as error:
            # Errors of compiled code do not name the node, or look like compiler errors: the uncompiled graph names it.
            with torch.no_grad():
                self._module.forward(*inputs[: self._number])
            if not isinstance(error, _compiler_errors()):
                raise
            reason = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
            raise EngineError(
                f"Inductor of PyTorch {torch.__version__} cannot compile the {self._graph} graph: {reason}. No state has "
                "changed. Leave compile='inductor' out; the results are the same"
            ) from error


def _compiler_errors() -> tuple[type[Exception], ...]:
    """Return the compiler's own error classes; an error of the graph found while tracing is not among them."""
    from torch._dynamo import exc as tracing
    from torch._inductor import exc as building

    return (
        tracing.BackendCompilerFailed,
        tracing.Unsupported,
        tracing.FailOnRecompileLimitHit,
        building.InvalidCxxCompiler,
        building.CppCompileError,
    )


def check_compiler(device: torch.device, purpose: str) -> None:
    """Check that Inductor's code can be built: with a C++ compiler for the CPU, or Triton for CUDA.

    Args:
        device: device of the compiled graph.
        purpose: the requesting feature, for the message.

    Raises:
        EngineError: the compiler is missing.
    """
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise EngineError(
                f"{purpose} needs Triton on '{device}', and it is not there or does not know this GPU: install it "
                f"({install_command('triton')}), or leave compile out"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:
        raise EngineError(
            f"{purpose} needs a C++ compiler, and none was found: install one (g++ or clang++) or name it in the environment "
            "variable CXX; training without it needs none: leave compile out"
        ) from error


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the strides of another of its shape: a view if both address memory in the same way, else a copy.

    The guards of a compiled graph check the strides of its inputs, even for dimensions of extent 1, where they have no effect.
    """
    if tensor.stride() == like.stride():
        return tensor
    strides = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if all(extent == 1 or one == other for extent, one, other in strides):
        return tensor.as_strided(like.shape, like.stride())
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
