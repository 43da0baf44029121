"""The Hessian of a whole model's loss times a vector, beside PyTorch's double backward, in float64.

All of a model's parameters at once: ``burnish.grad`` of the gradients that ``burnish.grad`` emits, times a vector each.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from architectures.attention import Style
from architectures.catalogue import ARCHITECTURES
from oracles.second_order import Arrays, Objective

TOLERANCE = 1e-8
# What the exporters write in float32: TorchScript's the loss of the detectors, the newer one scales and epsilons as attributes.
ROUNDED = 1e-6
QUICKEST = ("lstm", "bert")
QUICK = ("vit", "bert", "gpt2", "lstm", "video_resnet")
# Beside another that has the same parts.
ALIKE = ("distilbert", "llama", "vit", "swin", "gru", "frames_lstm", "unet", "deeplab", "lraspp", "ssd", "t5", "yolo")
NORMALIZED = ("deeplab", "lraspp", "unet", "video_resnet", "yolo", "ssd")
# The newer exporter writes batch normalization in inference mode, and the tied head of GPT-2 by another of its names.
BIASED = ("t5", "swin", "swin_v2")
WRITTEN_BY_DYNAMO = [name for name in ARCHITECTURES if name not in (*NORMALIZED, "gpt2", "mnist")]


@cache
def case(name: str, style: Style = "eager", training: bool = True) -> tuple[Objective, float, float, Arrays]:
    objective = Objective.of(name, style, training)
    return objective, *objective.in_pytorch()


def check(
    name: str,
    style: Style = "eager",
    exporter: str = "torchscript",
    opset: int = 18,
    engine: str = "torch",
    training: bool = True,
) -> None:
    objective, expected, size, second = case(name, style, training)
    tolerance = ROUNDED if exporter == "dynamo" or name in ("yolo", "ssd") else TOLERANCE
    product, ours = objective.in_burnish(objective.export(exporter, opset), engine)
    assert abs(product - expected) <= tolerance * size
    assert set(ours) == set(second)
    whole = np.sqrt(sum(np.sum(array**2) for array in second.values()))
    assert sum(np.linalg.norm(array) > 1e-3 * whole for array in second.values()) > 3
    errors = {key: np.linalg.norm(ours[key] - array) / max(np.linalg.norm(array), 1e-6 * whole) for key, array in second.items()}
    assert {key: error for key, error in errors.items() if not error <= tolerance} == {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.campaign if name in ALIKE else [pytest.mark.slow] * (name not in QUICKEST))
        for name in ARCHITECTURES
    ],
)
def test_second_order_products_are_pytorchs(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.campaign] * (name not in QUICK)) for name in NORMALIZED])
def test_second_order_products_with_frozen_statistics(name: str) -> None:
    check(name, training=False)


@pytest.mark.parametrize(
    ("name", "style", "opset"),
    [
        # Of each architecture one form, and of the next the other.
        pytest.param(name, style, opset, marks=pytest.mark.slow if index < 2 and (index + opset) % 2 else pytest.mark.campaign)
        for index, name in enumerate(name for name in WRITTEN_BY_DYNAMO if name in (*QUICK, *BIASED))
        for style, opset in (("eager", 18), ("sdpa", 23))
    ],
)
def test_second_order_products_of_the_newer_exporter(name: str, style: Style, opset: int) -> None:
    """Its opset 23 has the standard's operator of attention; which it refuses to write with a trained bias."""
    check(name, "eager" if name in BIASED else style, "dynamo", opset)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "lstm", "video_resnet"])
def test_second_order_products_on_the_reference_engine(name: str) -> None:
    check(name, engine="reference")
