"""The nine models in the onnx package, which it ships at batch 1 with weights by their shapes alone; they train at batch 8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import burnish

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
BATCH = 8


def drawn(key: str, array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Weights that keep the size of what passes through them, in place of those of one value that these files have."""
    if not key.startswith("param/") or array.ndim < 2:
        return array
    inputs = array.shape[-2] if array.shape[:2] == (1, 1) else np.prod(array.shape[1:])
    return (rng.standard_normal(array.shape) * np.sqrt(2 / inputs)).astype(array.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda path: path.stem)
def test_a_model_of_the_onnx_package_trains_at_batch_8(path: Path) -> None:
    program = burnish.compile(path, optimizer=burnish.optim.sgd(lr=0.001), metrics=(), batch="open")
    rng = np.random.default_rng(0)
    batch = {}
    for entry in program.signature["step"].inputs:
        if entry.name == "labels":
            extents = [extent if isinstance(extent, int) else BATCH for extent in entry.shape]
            batch["labels"] = rng.integers(0, 1000, extents)
        elif not entry.is_state and len(entry.shape) == 4:
            batch[entry.name] = rng.standard_normal((BATCH, *entry.shape[1:])).astype(np.float32)
    state = {key: drawn(key, array, rng) for key, array in program.initial_state(seed=0).items()}
    losses = {}
    for engine in ("onnxruntime", "torch"):
        with burnish.Session(program, engine=engine, state=state, seed=0) as session:
            losses[engine] = [session.step(batch)["loss"] for _ in range(2)]
    assert np.isfinite(losses["torch"]).all()
    assert losses["torch"][0] == pytest.approx(losses["onnxruntime"][0], rel=1e-4)
