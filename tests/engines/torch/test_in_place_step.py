"""The step that writes the state in place: as a recording runs it on a GPU, with a recorder that runs it again."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from burnish.engines.torch import TorchEngine
from burnish.engines.torch.runtime.capture import CaptureError
from burnish.engines.torch.runtime.inductor import InPlaceStep
from burnish.errors import NonFiniteLossError
from burnish.program import Entry, GraphSignature, Role
from oracles.open_program import open_program
from oracles.tiny_program import LR, numpy_step, tiny_batch, tiny_program


class RunAgain:
    """Records by running a few times; a replay computes from the fixed inputs into the fixed outputs."""

    def __init__(self):
        self.recorded = 0

    def record(self, function):
        self.recorded += 1
        outputs = [function() for _ in range(3)][-1]
        return Replay(function, outputs)


class Replay:
    def __init__(self, function, outputs):
        self.function, self.outputs = function, tuple(output.clone() for output in outputs)

    def replay(self):
        for fixed, tensor in zip(self.outputs, self.function(), strict=True):
            fixed.copy_(tensor)


class Refuses:
    def record(self, function):
        raise CaptureError("it waits")


class WithoutCompiler:
    """In the place of what is compiled."""

    def __init__(self, module, inputs, graph, around=None):
        self.around = around or module

    def __call__(self, *arguments):
        return self.around(*arguments)


def opened(program, recorder, **options):
    runner = open_program(TorchEngine(**options), program, program.initial_state(0), threads=1)
    runner._recorder = recorder
    return runner


def check_training(runner, program):
    places = {name: tensor.data_ptr() for name, tensor in runner._state.items()}
    state = program.initial_state(0)
    for number, size in enumerate((8, 5, 8)):
        batch = tiny_batch(size, seed=number)
        loss, state = numpy_step(state, batch)
        np.testing.assert_allclose(runner.step({**batch, "lr": np.float32(LR)})["loss"], loss, rtol=2e-6)
        for name, array in state.items():
            np.testing.assert_allclose(runner.state()[name], array, rtol=2e-6, atol=2e-6, err_msg=name)
    assert {name: tensor.data_ptr() for name, tensor in runner._state.items()} == places
    before = runner.state()
    broken = tiny_batch(8, seed=2)
    broken["x"][0, 0] = np.inf
    with pytest.raises(NonFiniteLossError, match=r"The loss at step 3 is nan"):
        runner.step({**broken, "lr": np.float32(LR)})
    for name, array in runner.state().items():
        assert array.tobytes() == before[name].tobytes(), name


def test_a_recorded_step_moves_the_state_only_where_its_loss_is_finite(monkeypatch):
    monkeypatch.setattr("burnish.engines.torch.engine.CompiledGraph", WithoutCompiler)
    program, recorder = tiny_program(), RunAgain()
    runner = opened(program, recorder, compile="none")
    runner._engine.compile = "inductor"
    check_training(runner, program)
    assert recorder.recorded == 2


@pytest.mark.slow
def test_it_is_compiled_in_one_piece(inductor):
    program, recorder = tiny_program(), RunAgain()
    check_training(opened(program, recorder, compile="inductor"), program)
    assert recorder.recorded == 2


def test_what_cannot_be_recorded_gets_a_new_state_once_the_loss_is_known(monkeypatch):
    """Launched one by one, a step could fail half way."""
    program = tiny_program()
    runner = opened(program, Refuses(), compile="none")
    step = runner._recorded
    step._in_place = lambda *arguments: pytest.fail("it writes over the state")
    check_training(runner, program)


class TakesOver(torch.nn.Module):
    """(new, old, x) -> the next of new, the next of old, which is new as it was, and a loss."""

    def forward(self, new, old, x):
        return new + x, new, new.sum()


def test_an_entry_that_takes_over_another_gets_it_from_before_the_step():
    def entry(name, role, updates=None):
        return Entry(name, role, ir.DataType.FLOAT, (2,), updates=updates)

    inputs = entry("param/new", Role.PARAMETER), entry("opt/old", Role.OPTIMIZER), entry("x", Role.DATA)
    outputs = (
        entry("next:param/new", Role.PARAMETER, "param/new"),
        entry("next:opt/old", Role.OPTIMIZER, "opt/old"),
        entry("loss", Role.LOSS),
    )
    step = InPlaceStep(TakesOver(), GraphSignature(inputs, outputs))
    new, old, x = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0]), torch.full((2,), 10.0)
    for moves, expected in ((False, ([1.0, 2.0], [5.0, 6.0])), (True, ([11.0, 12.0], [1.0, 2.0]))):
        (loss,) = step(new, old, x, torch.tensor(moves))
        assert loss == 3.0
        assert (new.tolist(), old.tolist()) == expected
