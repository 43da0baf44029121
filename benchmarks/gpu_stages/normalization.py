"""How many digits batch and layer normalization keep where the mean is large: kappa is about mean / deviation.

burnish's graphs on the device beside PyTorch's own layers there, both against the layer in float64 on the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

import burnish
from burnish.engines.torch import TorchEngine
from gpu_stages.setting import Report, Setting
from normalization_accuracy import LAYERS, Layer, in_pytorch, model_of, relative

MEANS, COUNT = (0.0, 1e2, 1e3, 1e4), 65536
TINY_MEANS, TINY_COUNT = (0.0, 1e3), 1024
MEASURED = ("BatchNormalization [N, C, L]", "BatchNormalization [N, C]", "LayerNormalization")
# Of y and of dx: a few roundings of float32 for each digit that the mean takes off the input; see normalization-accuracy.md.
ROUNDING = 6e-8
ALLOWED = 40.0


def run(setting: Setting, report: Report) -> None:
    """Measure each layer at each mean."""
    for layer in [each for each in LAYERS if each.name in MEASURED]:
        for mean in TINY_MEANS if setting.tiny else MEANS:
            count = TINY_COUNT if setting.tiny else COUNT
            report.case(f"{layer.name}, N {count}, mean / std {mean:g}", partial(errors_of, layer, count, mean, setting))


def errors_of(layer: Layer, count: int, mean: float, setting: Setting) -> dict[str, Any]:
    """Relative errors of y and dx.

    Raises:
        ValueError: burnish's are larger than roundings of the normalized values explain.
    """
    random = np.random.default_rng(0)
    shape = layer.shape(count)
    x = (random.standard_normal(shape) + mean).astype(np.float32)
    cotangent = random.standard_normal(shape).astype(np.float32)
    exact = in_pytorch(layer, x, cotangent, torch.float64)
    theirs = in_pytorch(layer, x, cotangent, torch.float32, setting.device)
    gradient = burnish.grad(model_of(layer, count), "x", of="y")
    outputs = TorchEngine(setting.device).run(gradient, {"x": x, "cotangent:y": cotangent})
    figures = {
        "y": relative(outputs["y"], exact[0]),
        "y_of_pytorch": relative(theirs[0], exact[0]),
        "dx": relative(outputs["grad:x"], exact[1]),
        "dx_of_pytorch": relative(theirs[1], exact[1]),
    }
    if (worst := max(figures["y"], figures["dx"])) > ALLOWED * ROUNDING:
        raise ValueError(f"burnish's relative error is {worst:.1e}, and {ALLOWED * ROUNDING:.1e} is allowed: {figures}")
    return figures
