"""Contender: a training step with or without recomputation. Started by ``recompute.py``."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from contenders import Step, peak_bytes, serve


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """One hash of all arrays, by name: equal only where every bit is."""
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        hashed.update(name.encode() + arrays[name].tobytes())
    return hashed.hexdigest()


def main() -> None:
    job = json.loads(sys.argv[1])
    program = burnish.Program.load(job["program"])
    session = burnish.Session(program, threads=job["threads"])
    with np.load(job["data"]) as data:
        batch = {"x": data["x"], "labels": data["labels"]}

    def build() -> tuple[Step, dict[str, Any]]:
        session.step({name: array[:2] for name, array in batch.items()})  # loads the graph: what is measured is what steps add
        return lambda: session.step(batch)["loss"], {"before_bytes": peak_bytes()}

    serve(build)
    state = session.state()
    model = program.grad
    values = {**program.initial_state(0), **batch}
    gradients = OnnxRuntimeEngine().run(model, {value.name: values[value.name] for value in model.graph.inputs})
    Path(job["digests"]).write_text(json.dumps({"state": digest(state), "gradients": digest(gradients)}))


if __name__ == "__main__":
    main()
