"""The nine models in the onnx package, which it ships at batch 1 with weights by their shapes alone; they train at batch 8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import burnish

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
BATCH = 8
RATE = 1e4
"""So large that the weights after a step are its gradients, to all the digits that float32 has."""


def drawn(key: str, array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Weights that keep the size of what passes through them, in place of those of one value that these files have."""
    if not key.startswith("param/") or array.ndim < 2:
        return array
    inputs = array.shape[-2] if array.shape[:2] == (1, 1) else np.prod(array.shape[1:])
    return (rng.standard_normal(array.shape) * np.sqrt(2 / inputs)).astype(array.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda path: path.stem)
def test_a_model_of_the_onnx_package_trains_at_batch_8(path: Path) -> None:
    program = burnish.compile(path, optimizer=burnish.optim.sgd(lr=RATE), metrics=(), batch="open")
    rng = np.random.default_rng(0)
    batch = {}
    for entry in program.signature["step"].inputs:
        if entry.name == "labels":
            extents = [extent if isinstance(extent, int) else BATCH for extent in entry.shape]
            batch["labels"] = rng.integers(0, 1000, extents)
        elif not entry.is_state and len(entry.shape) == 4:
            batch[entry.name] = rng.standard_normal((BATCH, *entry.shape[1:])).astype(np.float32)
    trained = [f"param/{name}" for name in program.options["trainable"]]
    state = {key: drawn(key, array, rng) for key, array in program.initial_state(seed=0).items()}
    losses, gradients = {}, {}
    for engine in ("onnxruntime", "torch"):
        with burnish.Session(program, engine=engine, state=state, seed=0) as session:
            losses[engine] = [session.step(batch, lr=0.001)["loss"] for _ in range(2)]
            session.load_state(state)
            session.step(batch)
            gradients[engine] = {name: array - state[name] for name, array in session.state().items() if name in trained}
    assert np.isfinite(losses["torch"]).all()
    assert losses["torch"] == pytest.approx(losses["onnxruntime"], rel=1e-4)
    assert len(trained) == len(gradients["torch"])
    for name, expected in gradients["onnxruntime"].items():
        error = np.linalg.norm(gradients["torch"][name] - expected)
        assert error <= 1e-3 * np.linalg.norm(expected), f"{name}: {error / np.linalg.norm(expected):.1e}"
