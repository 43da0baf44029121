"""The nine models in the onnx package, which it ships at batch 1 with weights by their shapes alone: trained at batch 8.

``make test-shipped`` compares all that is compared here of all nine, on both engines; here the larger ones have their gradients
compared alone, each on one engine, most of them in the campaign.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from oracles.combinations import spread
from oracles.light_models import NAMES, LightModel, errors, loss_errors

SMALL = ("shufflenet", "squeezenet")
FIRST = ("bvlc_alexnet", "inception_v2")
"""Of the larger ones; with the small ones they have every operator that the others have."""
ENGINES = ("onnxruntime", "torch")


@lru_cache(maxsize=1)
def light(name: str) -> LightModel:
    return LightModel(name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in FIRST else pytest.mark.campaign)
        for name in NAMES
        if name not in SMALL
    ],
)
def test_every_gradient_of_a_model_of_the_onnx_package(name: str) -> None:
    """In float32 rounding moves values across the kinks of ReLU and MaxPool: that is all that the tolerance leaves room for."""
    expected = light(name).in_pytorch(torch.float32, 1)
    actual = light(name).gradients_on(ENGINES[NAMES.index(name) % 2])
    wrong = {key: error for key, error in errors(actual, expected.gradients).items() if error > 0.05}
    assert wrong == {}


@pytest.mark.slow
@spread("name", SMALL, test_all=1)
def test_every_gradient_in_float64(name: str) -> None:
    assert max(errors(light(name).gradients_in_float64(), light(name).exact.gradients).values()) < 1e-8


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, engine, marks=pytest.mark.slow if place == number else pytest.mark.campaign)
        for number, name in enumerate(SMALL)
        for place, engine in enumerate(ENGINES)
    ],
)
def test_five_steps_are_pytorchs(name: str, engine: str) -> None:
    """What moves is as near to float64 as PyTorch's own steps in float32."""
    model = light(name)
    losses, state = model.steps_on(engine)
    assert loss_errors(losses, model.exact.losses) < 1, (losses, model.exact.losses)
    expected = model.moved(model.exact.state)
    own = max(errors(model.moved(model.rounded.state), expected).values())
    assert max(errors(model.moved(state), expected).values()) < max(1e-4, 4 * own)
