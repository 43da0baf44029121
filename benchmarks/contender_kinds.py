"""The contenders of a comparison that can be asked for by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PAGES = "+pages"
"""Behind a name, for an allocator that keeps pages."""


@dataclass(frozen=True)
class Kind:
    """A contender that can be asked for.

    Attributes:
        title: in tables.
        script: in ``benchmarks/peers``.
        settings: what its job holds beside the workload.
        environment: the environment of its own that it runs in; None is this one.
        images: whether it is for images (True) or for other samples (False) only; None is for both.
        precisions: in which it exists.
    """

    title: str
    script: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: str | None = None
    images: bool | None = None
    precisions: tuple[str, ...] = ("float32",)


BOTH = ("float32", "bfloat16")
ENGINES = {
    f"burnish-{engine}": Kind(f"burnish on {engine}", "with_burnish.py", {"engine": engine}, precisions=BOTH)
    for engine in ("onnxruntime", "torch")
}
# What PyTorch does unasked, and what someone who tunes it asks for: one call for the update of all parameters, too.
PYTORCH = {
    "eager": Kind("PyTorch eager", "with_pytorch.py", precisions=BOTH),
    "fused": Kind("PyTorch eager, fused optimizer", "with_pytorch.py", {"fused": True}, None, False, BOTH),
    "channels_last": Kind(
        "PyTorch eager, channels_last, fused optimizer",
        "with_pytorch.py",
        {"channels_last": True, "fused": True},
        None,
        True,
        BOTH,
    ),
    "compile": Kind(
        "PyTorch compile", "with_pytorch.py", {"channels_last": True, "compiled": True, "fused": True}, precisions=BOTH
    ),
}
WRAPPED = {
    "burnish-wrapped": Kind(
        "PyTorch, the module wrapped by burnish, fused optimizer",
        "with_pytorch.py",
        {"channels_last": True, "fused": True, "wrapped": True},
    )
}
# The engine's own choice, ``burnish-onnxruntime``, hangs on what is installed.
BY_KERNELS = {
    "burnish-standard": Kind(
        "burnish on onnxruntime, standard operators", "with_burnish.py", {"engine": "onnxruntime", "kernels": False}
    ),
    "burnish-kernels": Kind("burnish on onnxruntime, its kernels", "with_burnish.py", {"engine": "onnxruntime", "kernels": True}),
}
# For models with embedding tables, of which a batch reads few rows.
SPARSE = {
    "sparse": Kind("PyTorch eager, sparse gradients", "with_pytorch.py", {"sparse": True}, images=False),
    **{
        f"{name}-sparse": Kind(f"{kind.title}, updates by rows", kind.script, {**kind.settings, "sparse": True}, images=False)
        for name, kind in (ENGINES | BY_KERNELS).items()
    },
}
OTHERS = {
    "onnxruntime-training": Kind("onnxruntime-training", "with_onnxruntime_training.py", {}, "onnxruntime-training"),
    "jax": Kind("JAX jit", "with_jax.py", {}, "jax"),
    "onnxsim": Kind("onnxsim compile_training_loop", "with_onnxsim.py", {}, "onnxsim"),
    "onnx-ad": Kind("onnx-ad on onnxruntime", "with_onnx_ad.py", {}, "onnx-ad"),
}
KINDS = {**ENGINES, **BY_KERNELS, **SPARSE, **WRAPPED, **PYTORCH, **OTHERS}
ALL = [*ENGINES, *(name + suffix for name in PYTORCH for suffix in ("", PAGES)), *OTHERS]
