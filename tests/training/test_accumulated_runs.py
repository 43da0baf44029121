"""Runs whose steps are no multiple of those that an update accumulates."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from burnish import optim
from burnish.errors import ConfigurationError


def trainer(folder, samples: int, every: int, epochs: int = 1) -> burnish.Trainer:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 3] y)
        <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"""
    )
    rng = np.random.default_rng(0)
    data = rng.normal(size=(samples, 2)).astype(np.float32), rng.integers(0, 3, samples)
    program = burnish.compile(model, optimizer=optim.accumulate(optim.sgd(lr=0.1), every))
    return burnish.Trainer(program, data, epochs=epochs, batch_size=4, run_directory=folder)


def test_a_run_without_an_update_is_refused(tmp_path):
    message = r"^accumulate: an update takes 8 steps, and the run has 6, so that nothing would train: accumulate fewer, or give"
    with pytest.raises(ConfigurationError, match=message):
        trainer(tmp_path / "run", 10, 8, epochs=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "rest"), [(1, 1), (2, 0), (3, 1)])
def test_steps_after_the_last_update_are_said(tmp_path, capsys, epochs, rest):
    trainer(tmp_path, 10, 2, epochs).run()
    said = f"The last {rest} of the {3 * epochs} steps wait for an update that the run does not reach: it takes 2"
    assert (said in capsys.readouterr().out) == bool(rest)
