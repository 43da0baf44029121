"""Models that take batches of one size, as a file that was exported with a batch of four does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import burnish
from burnish.errors import ConfigurationError
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.planning import plan
from burnish.finetuning.preparation import transfer
from burnish.training.run_data import batches_per_epoch, fixed_batch


def program(batch: int | str, more: str = "") -> burnish.Program:
    return burnish.compile(
        onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 21]> g (float[{batch}, 2] x{more}) => (float[{batch}, 3] y)
                <float[2, 3] w = {{1, 2, 3, 4, 5, 6}}> {{ y = MatMul(x, w) }}"""
        ),
        optimizer="sgd:lr=0.1",
    )


def data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 2)).astype(np.float32), rng.integers(0, 3, samples)


def trainer(folder: Path, batch: int, samples: int, evaluated: int = 8, batch_size: int = 4, **options) -> burnish.Trainer:
    sets = data(samples), data(evaluated)
    return burnish.Trainer(program(batch), *sets, epochs=1, batch_size=batch_size, run_directory=folder, **options)


@pytest.mark.slow
def test_the_rest_of_an_epoch_is_left_out_and_said(tmp_path, capsys):
    trainer(tmp_path, 4, 10, 9).run()
    said = capsys.readouterr().out
    assert "Each epoch leaves 2 of its samples out: the program takes no batch of 2" in said
    assert "Evaluation leaves out the last 1 samples: the program takes no batch of 1" in said
    with burnish.Session(program(4)) as session:
        session.restore(tmp_path / "checkpoints" / "latest.safetensors")
        assert session.state()["step"] == 2


@pytest.mark.parametrize(
    ("batch", "samples", "evaluated", "batch_size", "message"),
    [
        (4, 10, 8, 8, r"^batch_size=8: the model takes 4 samples at once: give 4 \(--batch-size 4\), or export it with an open"),
        (1, 10, 8, 8, r"takes 1 sample at once: give 1 .*, or compile it with batch='open' \(--batch open\), which lets it take"),
        (4, 3, 8, 4, r"^samples: the data have 3, and the model takes 4 samples at once: give more, or export it"),
        (4, 10, 3, 4, r"^eval_data: samples: the data have 3, and the model takes 4 samples at once"),
    ],
)
def test_a_size_that_the_model_does_not_take_is_refused_before_training(tmp_path, batch, samples, evaluated, batch_size, message):
    with pytest.raises(ConfigurationError, match=message):
        trainer(tmp_path / "run", batch, samples, evaluated, batch_size)
    assert not (tmp_path / "run").exists()


def test_what_a_model_fixes():
    assert fixed_batch(program(4)) == 4
    assert fixed_batch(program("N")) is None
    assert fixed_batch(program("N", ", float[5] positions")) is None
    assert batches_per_epoch(program(4), 10, 4) == 2
    assert batches_per_epoch(program(4), 20, 8, workers=2) == 2
    assert batches_per_epoch(program("N"), 10, 4) == 3


def prepared(samples: int):
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[4, 2] x) => (float[4, 3] y)
            <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"""
    )
    return transfer(model, data(samples))


def test_a_tuning_run_plans_the_steps_that_it_takes():
    planned = plan(*prepared(10), FinetuneOptions(epochs=2, batch_size=4, lr=0.1))
    assert planned.steps(planned.stages[0], 10) == 4
    assert planned.notes == ("schedule: cosine over 4 steps",)


@pytest.mark.parametrize(
    ("samples", "batch_size", "message"),
    [
        (3, None, "^samples: the data have 3, and the model takes 4 samples at once: give more, or export it with an open batch"),
        (10, 3, r"^batch_size=3: the model takes 4 samples at once: give 4 \(--batch-size 4\), or export it with an open"),
        (10, 0, "^batch_size=0: give a whole number of samples, 1 or more, or leave it out"),
    ],
)
def test_what_the_model_does_not_take_is_refused_before_trial_steps(samples, batch_size, message):
    with pytest.raises(ConfigurationError, match=message):
        plan(*prepared(samples), FinetuneOptions(epochs=2, batch_size=batch_size))
