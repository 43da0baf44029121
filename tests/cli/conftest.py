"""What the tests of the command line share: a small model, its data, and a runner that works in a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner, Result

from burnish.cli.application import app
from burnish.models import residual_network

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def model() -> ir.Model:
    return residual_network((1, 4, 4), classes=3, width=2, blocks=(1,))


@pytest.fixture
def curves() -> None:
    """Let a run draw its curves."""


@pytest.fixture(scope="session")
def without_matplotlib(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A path for Python's modules on which processes find no matplotlib."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")\n")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(autouse=True)
def no_curves_unasked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, without_matplotlib: str) -> None:
    """Drawing takes longer than the rest of so small a run, in this process and in those that it starts."""
    if "curves" not in request.fixturenames:
        monkeypatch.setattr("burnish.training.run_folder.draw_curves", lambda rows, path, names: None)
        monkeypatch.setenv("PYTHONPATH", without_matplotlib)


@pytest.fixture
def folder(model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``model.onnx`` (3 classes of 4x4 images) and ``data.npz``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    ir.save(model, tmp_path / "model.onnx")
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 20)
    images = generator.normal(size=(20, 4, 4)) + labels[:, None, None]
    np.savez(tmp_path / "data.npz", x=images.astype(np.float32), y=labels)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    """Run ``burnish`` with arguments, in this process."""

    def call(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
        assert result.exit_code == code, result.output + repr(result.exception)
        return result

    return call
