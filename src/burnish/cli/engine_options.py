"""Which engine computes, and whether with kernels of burnish's own: what the commands that run a model have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from burnish.errors import ConfigurationError

if TYPE_CHECKING:
    from burnish.engines import Engine

KernelsOption = Annotated[
    bool | None,
    typer.Option(
        "--kernels/--no-kernels",
        help="Kernels of burnish's own on the engine onnxruntime: build them where they are missing, or go without; by default "
        "it uses them where they are built.",
    ),
]


def chosen_engine(engine: str, kernels: bool | None) -> str | Engine:
    """Return an engine: its name, or ONNX Runtime's with its kernels chosen.

    Raises:
        ConfigurationError: kernels are chosen for another engine than ``onnxruntime``.
        EngineError: they are to be built, and cannot be.
    """
    if kernels is None:
        return engine
    if engine not in ("auto", "onnxruntime"):
        raise ConfigurationError(
            f"--kernels and --no-kernels are for --engine onnxruntime, not for '{engine}': leave them out, or set "
            "BURNISH_KERNELS=off in the environment"
        )
    from burnish.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(kernels=kernels)
