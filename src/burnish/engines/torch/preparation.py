"""A graph of a program as the engine translates it: lowered, and rewritten for what its device has kernels of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import onnx_ir as ir
import torch

from burnish.engines.torch.bindings import attention
from burnish.engines.torch.bindings.attention import cuda
from burnish.engines.torch.bindings.precision import narrow_dtypes
from burnish.engines.torch.fusion import fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from burnish.operators.attention import ATTENTION, ATTENTION_GRAD
from burnish.rewriting.recompute import run_in_order, wait_by_selection

if TYPE_CHECKING:
    from burnish.compiler.executable import Executable

Compilation = Literal["regions", "inductor", "none"]
KernelChoice = Literal["measured", "fixed"]


def prepared(
    executable: Executable,
    name: str,
    device: torch.device,
    fused: bool,
    *,
    compilation: Compilation = "regions",
    channels_last: bool = True,
    winograd: bool = True,
    kernel_choice: KernelChoice = "measured",
) -> ir.Model:
    """Return a copy of a graph of a program, rewritten.

    Args:
        executable: the program, lowered to the engine's target.
        name: of the graph.
        device: where it runs.
        fused: for the engine's own kernels; else for ATen's alone.
        compilation, channels_last, winograd, kernel_choice: as ``TorchEngine`` has them.
    """
    attended = cuda.dtypes(device) if device.type == "cuda" and compilation != "none" else ()
    lowered = executable
    if not fused:
        kernels = executable.target.kernels & translated_operators(BURNISH_DOMAIN)
        if attended:
            kernels |= {ATTENTION.name, ATTENTION_GRAD.name}
        lowered = lowered.lowered_to(executable.target.with_kernels(kernels))
    # Activations that are computed again wait for the backward pass: in what way depends on what orders the nodes.
    place_waits = wait_by_selection if compilation == "inductor" else run_in_order
    chooses = compilation == "regions" and device.type == "cpu" and channels_last
    model = lowered.copy_of(name)
    place_waits(model)
    return fuse(
        model,
        fused,
        winograd=winograd and channels_last,
        channels_last=channels_last,
        narrow=narrow_dtypes(device),
        attended=attended if device.type == "cuda" else attention.dtypes(),
        kernel_choice=kernel_choice if chooses else None,
        on_cuda=device.type == "cuda",
    )
