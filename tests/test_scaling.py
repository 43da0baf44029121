"""Work grows with the nodes, inputs and outputs of a model, and not with their square: calls are counted at n and at 2 n."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import burnish
from burnish.files.export import export_inference
from burnish.kernels.elementwise import fusion as elementwise
from burnish.optim import sgd
from burnish.training import Session
from scaling_models import SHAPES, batch_of

SIZE = 20
GROWTH = 2.3
FEW = 150
"""Calls below which a function may grow as it likes: what is looked up once, for each operator."""


def compiled(model: bytes) -> burnish.Program:
    return burnish.compile(model, loss="mse", outputs="y", optimizer=sgd(lr=0.01, momentum=0.9), metrics=())


def differentiate(model: bytes, shape: str) -> None:
    burnish.grad(model, wrt=["scale" if shape == "branches" else "x"], of="y")


def train(model: bytes, shape: str) -> None:
    """Everything that is made of a model to train it and to hand it on."""
    program = compiled(model)
    program.to_onnx()
    export_inference(program, program.initial_state())


def calls_in(run: Callable[[], Any]) -> Counter[str]:
    """How often each function is called, those in C too, by name and place."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            counted[f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"] += 1
        elif event == "c_call":
            counted[getattr(argument, "__qualname__", "")] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.parametrize("work", [differentiate, train])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow
def test_calls_grow_with_the_model(shape: str, work: Callable[[bytes, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BURNISH_VERIFY_PASSES")  # it is for tests, and takes the inputs of each node off one by one
    small, large = (SHAPES[shape](count).SerializeToString() for count in (SIZE, 2 * SIZE))
    work(small, shape)  # fills what is remembered for each operator
    before, after = (calls_in(lambda model=model: work(model, shape)) for model in (small, large))
    grown = {
        name: (before[name], count) for name, count in after.items() if count > FEW and count > GROWTH * max(before[name], 1)
    }
    assert not grown


def test_a_first_step_on_pytorch_grows_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "SEGMENT", 64)

    def first_step(size: int) -> None:
        proto = SHAPES["elementwise-chain"](size)
        Session(compiled(proto.SerializeToString()), engine="torch").step(batch_of(proto))

    first_step(20)
    before, after = (calls_in(lambda size=size: first_step(size)) for size in (150, 300))
    assert {
        name: (before[name], count) for name, count in after.items() if count > 20 * FEW and count > GROWTH * before[name]
    } == {}
