"""A client in a process of its own: what ``burnish.federated.ProcessClient`` calls, as ``node_client.mjs`` is in JavaScript.

python process_client.py PARTITION train round.safetensors update.safetensors
python process_client.py PARTITION evaluate round.safetensors

The folder PARTITION is what ``write_partition.py`` writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import burnish
from federated_digits.task import batches


def read(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """The images and labels of each split."""
    splits = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    return {
        split: {
            "x": np.asarray(data["x"], np.float32).reshape(-1, *data["shape"]),
            "labels": np.asarray(data["labels"], np.int64),
        }
        for split, data in splits.items()
    }


def train(session: burnish.Session, data: dict[str, np.ndarray], round: dict[str, Any]) -> dict[str, Any]:
    """Take the steps of a round, and say what they were taken on; prints a line after each epoch."""
    samples, weighted = 0, 0.0
    first = (round["round"] - 1) * round["epochs"]
    steps = 0
    for epoch in range(first, first + round["epochs"]):
        for batch in batches(data, epoch):
            if steps == round["steps"]:
                break
            size = len(batch["labels"])
            weighted += session.step(batch, **round["hyperparameters"])["loss"] * size
            samples, steps = samples + size, steps + 1
        print(f"epoch {epoch}: {steps} steps", flush=True)
    return {"samples": samples, "metrics": {"loss": weighted / max(1, samples)}}


def main(folder: Path, what: str, given: Path, *taken: Path) -> None:
    data = read(folder)
    with burnish.Session(burnish.Program.load(folder / "program"), engine="onnxruntime", threads=1) as session:
        round = session.restore(given)
        if what == "train":
            report = train(session, data["train"], round)
            session.save_checkpoint(taken[0])
        else:
            totals = session.evaluate_totals(data["test"])
            report = {"samples": len(data["test"]["labels"]), "totals": {name: total.tolist() for name, total in totals.items()}}
    print(json.dumps(report))


if __name__ == "__main__":
    folder, what, *paths = sys.argv[1:]
    main(Path(folder), what, *map(Path, paths))
