"""Files as a release wrote them, which every later version has to read.

``python tests/files/released_files.py`` writes the files of this version into ``released``: a program as a folder and as one
file, a checkpoint after two steps, and the results of a prediction and of the next step. They are committed with the release.
After it nobody changes them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

import burnish
from burnish.models import residual_network

FOLDER = Path(__file__).parent / "released"
PROGRAM, ONE_FILE, CHECKPOINT, ANSWERS = "program", "program.onnx", "checkpoint.safetensors", "answers.json"


def batch(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(4, 1, 4, 4)).astype(np.float32), "labels": generator.integers(0, 3, 4)}


def answers(session: burnish.Session) -> dict[str, object]:
    """The results of a session that has just been restored, or has just written the checkpoint."""
    predicted = session.predict({"x": batch(0)["x"]})
    return {
        "names": sorted(session.state()),
        "logits": next(iter(predicted.values())).tolist(),
        "loss": float(session.step(batch(2))["loss"]),
        "step": int(session.state()["step"]),
    }


def write(folder: Path) -> None:
    """Write the files of this version into a folder that does not exist yet."""
    folder.mkdir(parents=True)
    optimizer = burnish.optim.sgd(lr=0.1, momentum=0.9)
    program = burnish.compile(residual_network((1, 4, 4), classes=3, width=2, blocks=(1,)), optimizer=optimizer)
    program.save(folder / PROGRAM)
    program.save(folder / ONE_FILE)
    session = burnish.Session(program, engine="reference", seed=0)
    for seed in (0, 1):
        session.step(batch(seed))
    session.save_checkpoint(folder / CHECKPOINT)
    (folder / ANSWERS).write_text(json.dumps(answers(session), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    shutil.rmtree(FOLDER / burnish.__version__, ignore_errors=True)
    write(FOLDER / burnish.__version__)
