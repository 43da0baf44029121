"""Whole graphs through Inductor, PyTorch's own compiler: ``TorchEngine(compile="inductor")``.

A translated graph is a pure function of state and batch, so that it is compiled as it is, without autograd. Dimensions that the
signature leaves open are compiled as symbols: another batch size runs what is there. Only a batch of one is compiled apart, as a
size of one broadcasts; the compiler's guards see to that, and to whatever else it assumed of a size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from burnish.errors import EngineError
from burnish.installing import install_command
from burnish.program.signature import Entry, GraphSignature, Role


class InPlaceStep(torch.nn.Module):
    """A step graph whose results move the state on, for a compiler to fuse with what computes them.

    Whether the state moves is decided where it lies: the host need not know the loss before it does, and where nothing moves each
    entry is written over with its own bits.

    Args:
        module: the step graph: its inputs in the signature's order to its outputs.
        signature: of the step graph.
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
        """Run a step; returns what it reports, in the signature's order.

        Args:
            arguments: the graph's inputs, of which the state entries are written, and whether to write them, a bool of rank 0.
        """
        *inputs, moves = arguments
        results = self._module(*inputs)
        for place in self._losses:
            moves = moves & results[place].isfinite().all()
        # An entry may take over another, from before the step.
        following = [(target, torch.where(moves, results[place], inputs[target])) for place, target in self._moves]
        for target, tensor in following:
            inputs[target].copy_(tensor)
        return tuple(results[place] for place in self._reported)


Call = Callable[..., tuple[torch.Tensor, ...]]


class CompiledGraph:
    """A translated graph that is compiled when it is first called.

    Args:
        module: the graph.
        inputs: its inputs as the signature has them, in their order.
        graph: its name, for messages.
        around: what is compiled in its place, and called with its inputs and more.
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
        """Run the graph; inputs must not be inference tensors, which the compiler tells from others.

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
            # What is compiled does not say at which node it fails, or fails as if the compiler had: the graph as it was
            # translated does say it.
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
    """What the compiler raises of its own; an error of the graph that it meets while it traces is none of these."""
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
    """Check that what Inductor generates can be built: a C++ compiler for the CPU, Triton for CUDA.

    Args:
        device: where the compiled graph runs.
        purpose: what asks for it, for the message.

    Raises:
        EngineError: there is none.
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
    """The tensor with the strides of another of its shape: a view where they address the same memory alike, else a copy.

    A compiled graph is guarded by the strides of its inputs, of dimensions of extent 1 too, where they mean nothing.
    """
    if tensor.stride() == like.stride():
        return tensor
    strides = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if all(extent == 1 or one == other for extent, one, other in strides):
        return tensor.as_strided(like.shape, like.stride())
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
