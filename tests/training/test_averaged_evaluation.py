"""A trainer that evaluates the average of the parameters, which the optimizer keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish import optim
from burnish.errors import ConfigurationError
from burnish.models import residual_network


def arrays(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(24, 1, 4, 4)).astype(np.float32), "labels": generator.integers(0, 3, 24)}


def program(optimizer: optim.Optimizer) -> burnish.Program:
    return burnish.compile(residual_network((1, 4, 4), classes=3, width=2, blocks=(1,)), optimizer=optimizer)


@pytest.mark.slow
def test_the_figures_of_an_epoch_are_those_of_the_average(tmp_path: Path) -> None:
    averaged = program(optim.ema(optim.sgd(lr=0.5), decay=0.5))
    options = {"epochs": 2, "batch_size": 8, "progress": False, "run_directory": tmp_path}
    trainer = burnish.Trainer(averaged, arrays(0), arrays(1), parameters="average", **options)
    found = trainer.run().metrics
    assert found["loss"] == pytest.approx(trainer.session.evaluate(arrays(1), parameters="average")["loss"], rel=1e-6)
    assert abs(found["loss"] - trainer.session.evaluate(arrays(1))["loss"]) > 1e-4


def test_a_program_without_an_average_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="parameters='average': the program's optimizer keeps no average of them"):
        burnish.Trainer(program(optim.sgd()), arrays(0), parameters="average", run_directory=tmp_path)
