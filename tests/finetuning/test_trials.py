"""What is compiled to find the learning rate is what a run trains: the program of the file that the run is resumed from."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import burnish
from burnish.errors import ObjectiveWarning
from burnish.files.identity import graph_hashes
from burnish.files.model_file import save_model
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.planning import Stage, Trial, plan
from burnish.finetuning.preparation import Transfer, transfer
from oracles.small_networks import batch_of, mobile, perceptron, transformer

SAMPLES = 12


def prepared_of(name: str, folder, **options):
    """A small network, made ready for three classes."""
    model = {"perceptron": perceptron, "transformer": transformer, "mobile": mobile}[name]()
    batches = [batch_of(model, seed) for seed in range(SAMPLES)]
    key = model.graph.inputs[0].name
    x = np.concatenate([batch[key][:1] for batch in batches])
    np.savez(folder / "data.npz", x=x, y=np.arange(SAMPLES) % 3)
    return transfer(model, folder / "data.npz", FinetuneOptions(**options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("perceptron", {}),
        ("transformer", {"adapters": {"rank": 2, "alpha": 3.3}}),
        ("mobile", {}),
        ("mobile", {"folded_norm": "insert", "freeze_until": "head"}),
    ],
    ids=["perceptron", "adapters", "convolutions", "frozen"],
)
def test_the_run_has_the_program_of_its_file(tmp_path, name, options):
    """Its identity is that of the program that is compiled of the file: a run that resumes has that one."""
    prepared, dataset = prepared_of(name, tmp_path, **options)
    planned = plan(prepared, dataset, FinetuneOptions(epochs=2, batch_size=6, threads=1))
    (stage,) = planned.stages
    trial = planned.trial(stage)
    assert trial is not None
    program = planned.program(stage, SAMPLES)
    assert program.semantic["grad"] is planned.trials[stage].program.semantic["grad"], "it was compiled anew"
    save_model(prepared.model, tmp_path / "start.onnx")
    again = type(prepared)(**{**vars(prepared), "model": burnish.load(tmp_path / "start.onnx")})
    anew = type(planned)(**{**vars(planned), "transfer": again}).program(stage, SAMPLES)
    assert graph_hashes(program) == graph_hashes(anew)
    assert program.options == anew.options
    expected = anew.initial_state(0)
    for state in (program.initial_state(0), trial.read_from(tmp_path / "start.onnx").program.initial_state(0)):
        assert state.keys() == expected.keys()
        assert all(array.tobytes() == expected[name].tobytes() for name, array in state.items()), "trial steps have changed it"


@pytest.mark.slow
def test_a_plan_of_another_model_has_no_trial(tmp_path):
    """As that of the stage in which a quantized model trains, whose layers may be frozen alike."""
    prepared, dataset = prepared_of("perceptron", tmp_path)
    planned = plan(prepared, dataset, FinetuneOptions(epochs=2, batch_size=6, threads=1))
    other = type(prepared)(**vars(prepared))
    assert type(planned)(**{**vars(planned), "transfer": other}).trial(planned.stages[0]) is None
    assert planned.trial(Stage(("hidden.weight",), 2)) is None


def test_what_concerns_who_trains_is_said_when_the_run_begins():
    def warning() -> burnish.Program:
        warnings.warn(ObjectiveWarning("of the loss"), stacklevel=1)
        warnings.warn("of something else", stacklevel=1)
        return burnish.compile(perceptron())

    with pytest.warns(UserWarning, match="else") as at_once:
        trial = Trial.of(Transfer(None, None, False, (), None, (), None), warning)
    assert [str(each.message) for each in at_once] == ["of something else"]
    with pytest.warns(ObjectiveWarning, match="of the loss") as later:
        assert trial.taken() is trial.program
    assert len(later) == 1
