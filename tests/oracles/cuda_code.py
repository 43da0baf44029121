"""What Inductor writes for a GPU, without one: graphs on fake tensors, and a card that is told of and not there.

It needs the package ``triton``. The code says what a step reads and writes and in how many kernels, and nothing of its speed.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import burnish
from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.runtime.inductor import InPlaceStep
from burnish.engines.torch.translate import translation
from burnish.engines.torch.translate.dtypes import torch_dtype
from burnish.engines.torch.translate.translation import translate
from oracles.open_program import open_program

CUDA = torch.device("cuda", 0)
CARD = {
    "name": "NVIDIA H100",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "total_memory": 80 << 30,
    "L2_cache_size": 50 << 20,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
}


class Constant:
    """A constant that goes to a GPU which is not there: ``Tensor.to`` would look for it."""

    def __init__(self, array: Any, dtype: Any):
        self.shape, self.dtype = array.shape, torch_dtype(dtype)

    def to(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Launch:
    """A kernel that is launched, and the buffers and arguments that it reads or writes."""

    kernel: str
    operands: frozenset[str]


@dataclass(frozen=True)
class CudaCode:
    """Code of Inductor's.

    Attributes:
        source: as Inductor wrote it.
        arguments: the graph's inputs by the names that they have there.
        bytes: what all kernels and calls of libraries read and write, as Inductor counts them.
    """

    source: str
    arguments: dict[str, str]
    bytes: int

    @cached_property
    def body(self) -> str:
        """What a call runs, after the kernels."""
        return self.source[self.source.index("def call(") :]

    @cached_property
    def launches(self) -> list[Launch]:
        """Triton's kernels, in the order of their launches."""
        calls = re.findall(r"^\s*(triton_\w+)\.run\((.*), stream=", self.body, re.MULTILINE)
        return [Launch(kernel, frozenset(re.findall(r"\b(?:buf|arg)\d\w*", operands))) for kernel, operands in calls]

    @cached_property
    def library_calls(self) -> Counter[str]:
        """Calls of libraries: convolutions and products of matrices."""
        calls = re.findall(r"(?:= torch\.ops\.aten|extern_kernels)\.(\w+)[.(]", self.body)
        return Counter(calls)

    @cached_property
    def buffers(self) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
        """Shape, strides and dtype of all memory that is taken."""
        found = re.findall(r"= empty_strided_cuda\(\(([^)]*)\), \(([^)]*)\), torch\.(\w+)\)", self.body)
        return [(_numbers(shape), _numbers(strides), dtype) for shape, strides, dtype in found]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.replace(" ", "").split(",") if number)


def cuda_code(program: burnish.Program, batch: int, graph: str = "step", **options: Any) -> CudaCode:
    """Have Inductor write the code of a graph for an H100, whose images and convolutions have their channels last.

    The step writes the state in place, as it is recorded on a GPU.

    Args:
        program: what to compile.
        batch: how many samples; the code is for that number alone.
        graph: of the program.
        options: settings of Inductor's.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch.fx.experimental.proxy_tensor import make_fx

    runner = open_program(TorchEngine(compile="none"), program, program.initial_state(0), threads=1)
    runner._device, runner._engine.compile, runner._recorder = CUDA, "inductor", object()
    with _told_of_a_card():
        model = runner._prepared(graph, fused=False)
    entries = program.signature[graph].inputs
    written: list[tuple[str, int]] = []

    def write(self: GraphLowering) -> None:
        source = self.codegen()[0].value
        written.append((source, int(self.count_bytes()[0])))
        raise _Written

    with FakeTensorMode(), torch.no_grad(), mock.patch.object(translation, "tensor_of", Constant):
        module = translate(model, CUDA)
        inputs = []
        for entry in entries:
            shape = [extent if isinstance(extent, int) else batch for extent in entry.extents]
            layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            inputs.append(torch.empty(shape, dtype=torch_dtype(entry.dtype), device=CUDA, memory_format=layout))
        inputs += _constants_as_inputs(module)
        called: torch.nn.Module = module
        if graph == "step":
            called = InPlaceStep(module, program.signature[graph])
            inputs.append(torch.empty((), dtype=torch.bool, device=CUDA))
        with (
            _told_of_a_card(),
            mock.patch.object(GraphLowering, "compile_to_module", write),
            config.patch(fx_graph_cache=False, **options),
        ):
            table = {**select_decomp_table(), torch.ops.aten.index_select.default: _selected}
            traced = make_fx(called, decomposition_table=table)(*inputs)
            try:
                compile_fx.compile_fx_inner(traced, inputs)
            except Exception:
                if not written:
                    raise
    names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    source, traffic = written[0]
    return CudaCode(source, {entry.name: name for entry, name in zip(entries, names, strict=False)}, traffic)


def _selected(x: torch.Tensor, axis: int, indices: torch.Tensor) -> torch.Tensor:
    """PyTorch's own form indexes by brackets, which look for the device."""
    return torch.ops.aten.index.Tensor(x, [None] * (axis % x.dim()) + [indices])


class _Written(Exception):
    """The code is there, and nothing is to be built of it."""


def _constants_as_inputs(module: fx.GraphModule) -> list[torch.Tensor]:
    """Make a graph's constants further inputs: Inductor would read the numbers of small ones, which fake tensors have not."""
    inputs: dict[str, fx.Node] = {}
    tensors = []
    last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in inputs:
            with module.graph.inserting_after(last):
                last = inputs[node.target] = module.graph.placeholder(f"constant_{len(inputs)}")
            tensors.append(getattr(module, node.target))
        node.replace_all_uses_with(inputs[node.target])
        module.graph.erase_node(node)
    module.recompile()
    return tensors


def _format_of_cudnn(x: torch.Tensor, weight: torch.Tensor, _: Any) -> torch.memory_format:
    """What cuDNN lays the result of a convolution out in; a PyTorch without CUDA would say that of its slow kernels."""

    def is_channels_last(tensor: torch.Tensor) -> bool:
        return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()

    return torch.channels_last if is_channels_last(x) or is_channels_last(weight) else torch.contiguous_format


def _always(result: Any) -> Callable[..., Any]:
    return lambda *_, **__: result


@contextlib.contextmanager
def _told_of_a_card() -> Iterator[None]:
    """Answer what PyTorch asks of a GPU while it writes code for one."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget

    card = SimpleNamespace(gcnArchName="", **CARD)
    properties = {name: CARD[name] for name in CARD if name in DeviceProperties._fields}
    described = DeviceProperties(type="cuda", index=0, cc=90, **properties)
    driver = SimpleNamespace(
        get_current_target=_always(GPUTarget("cuda", 90, 32)),
        get_current_device=_always(0),
        get_device_interface=_always(torch.cuda),
    )
    answers = {
        "torch.cuda.is_available": True,
        "torch.backends.cuda.is_flash_attention_available": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda.get_device_properties": card,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.get_device_name": CARD["name"],
        "torch.cuda._lazy_init": None,
        "torch.cuda._exchange_device": 0,
        "torch.cuda._maybe_exchange_device": 0,
        "torch.cuda.synchronize": None,
        "torch._dynamo.utils.preserve_rng_state": contextlib.nullcontext(),
    }
    of_the_interface = {
        "is_available": True,
        "get_compute_capability": 90,
        "current_device": 0,
        "device_count": 1,
        "is_bf16_supported": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "synchronize": None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, _always(answer)))
        for name, answer in of_the_interface.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(_always(answer))))
        for name, answer in {"get_device_properties": card, "current_device": 0}.items():
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(_always(answer))))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", staticmethod(_always(described))))
        stack.enter_context(mock.patch("torch.version.cuda", "12.8"))
        stack.enter_context(mock.patch.object(torch.Tensor, "copy_", lambda x, source: torch.ops.aten.copy_.default(x, source)))
        stack.enter_context(mock.patch("torch._C._conv_determine_backend_memory_format", _format_of_cudnn))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        yield
