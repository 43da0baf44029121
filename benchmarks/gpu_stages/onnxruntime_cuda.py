"""Programs on ONNX Runtime's CUDA provider, beside the PyTorch engine on the CPU."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import burnish
from burnish.engines.torch import TorchEngine
from gpu_stages.models import BERT_2, PERCEPTRON, RESNET18, Model, program_of, sized
from gpu_stages.setting import Report, Setting, Skipped

STEPS, BATCH = 5, 8
# A tenth of what is lost where a kernel computes something else; TF32 is off.
TOLERANCE = 1e-3
PROVIDERS = {"cuda": ("CUDAExecutionProvider", {"use_tf32": "0"}), "cpu": "CPUExecutionProvider"}


def run(setting: Setting, report: Report) -> None:
    """Train each model on the provider for a few steps."""
    for model in (PERCEPTRON, RESNET18, BERT_2):
        report.case(f"{model.title}, float32, batch {BATCH}", partial(steps_of, sized(model, setting.tiny), setting))


def steps_of(model: Model, setting: Setting) -> dict[str, Any]:
    """Largest relative difference of the losses.

    Raises:
        Skipped: ONNX Runtime or its CUDA provider is not installed.
        ValueError: losses differ.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise Skipped("onnxruntime is not installed")
    import onnxruntime

    from burnish.engines.onnxruntime import OnnxRuntimeEngine

    provider = PROVIDERS[setting.device]
    name = provider if isinstance(provider, str) else provider[0]
    if name not in onnxruntime.get_available_providers():
        raise Skipped(f"onnxruntime {onnxruntime.__version__} has no {name}: install onnxruntime-gpu")
    program, batches = program_of(model), model.batches(BATCH)
    differences = []
    with (
        burnish.Session(program, engine=OnnxRuntimeEngine(providers=[provider])) as session,
        burnish.Session(program, engine=TorchEngine(compile="none")) as reference,
    ):
        for index in range(STEPS):
            feeds = batches[index % len(batches)]
            loss, expected = session.step(feeds)["loss"], reference.step(feeds)["loss"]
            differences.append(abs(loss - expected) / abs(expected))
    if not max(differences) <= TOLERANCE:
        raise ValueError(f"losses differ by {max(differences):.1e}, relative; {TOLERANCE:g} is allowed")
    return {"provider": name, "largest_difference": max(differences), "steps": STEPS}
