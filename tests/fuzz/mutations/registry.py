"""What mutations there are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from onnx import ModelProto

Mutation = Callable[[Random, ModelProto], str | None]

MUTATIONS: list[Mutation] = []


def mutation(weight: int) -> Callable[[Mutation], Mutation]:
    """Register a mutation, to be drawn ``weight`` times as often as one of weight 1."""

    def register(rule: Mutation) -> Mutation:
        MUTATIONS.extend([rule] * weight)
        return rule

    return register


def mutate(random: Random, model: ModelProto) -> str:
    """Change a model in one place, in place; returns what was done."""
    while True:
        done = random.choice(MUTATIONS)(random, model)
        if done is not None:
            return done
