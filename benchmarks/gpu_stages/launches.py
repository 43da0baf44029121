"""What launching operators one by one costs small models: steps with and without the CUDA graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu_stages.models import DIGITS, PERCEPTRON, Model, sized
from gpu_stages.setting import Report, Setting
from gpu_stages.trainers import (
    BURNISH,
    BURNISH_INDUCTOR,
    BURNISH_LAUNCHED,
    COMPILED,
    EAGER,
    GRAPHED,
    Contender,
    check_losses,
    enter,
    let_go,
    take_turn,
    timed,
)

BATCH, TINY_BATCH = 64, 4
TURNS, TURN_SECONDS, TINY_TURN_SECONDS = 3, 0.5, 0.01
CONTENDERS = (EAGER, COMPILED, GRAPHED, BURNISH, BURNISH_LAUNCHED, BURNISH_INDUCTOR)
# Inductor takes minutes on two cores: in tiny sizes the smaller model alone is compiled.
TINY_CONTENDERS = {PERCEPTRON: (EAGER, GRAPHED, BURNISH_LAUNCHED, BURNISH_INDUCTOR), DIGITS: (EAGER, BURNISH)}


def run(setting: Setting, report: Report) -> None:
    """Time each small model with each contender."""
    for model in (PERCEPTRON, DIGITS):
        expected: list[float] = []
        for contender in TINY_CONTENDERS[model] if setting.tiny else CONTENDERS:
            name = f"{model.title}, float32, batch {BATCH}: {contender.title}"
            figures = report.case(name, partial(step_of, sized(model, setting.tiny), contender, setting, expected))
            expected = expected or list((figures or {}).get("losses", ()))
            torch.compiler.reset()
            let_go(setting.device)


def step_of(model: Model, contender: Contender, setting: Setting, expected: list[float]) -> dict[str, Any]:
    """Time of a step, whose loss is waited for once a turn."""
    batch = TINY_BATCH if setting.tiny else BATCH
    measured = enter(contender, model, batch, "float32", setting)
    try:
        check_losses(measured.figures["losses"], expected or measured.figures["losses"], "float32")
        for _ in range(TURNS):
            take_turn(measured, TINY_TURN_SECONDS if setting.tiny else TURN_SECONDS)
        return timed(measured, batch)
    finally:
        measured.trainer.close()
