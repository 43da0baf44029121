"""Contender: a saved program trained by the Python session. Started by ``c_client.py``."""

from __future__ import annotations

import json
import sys

import numpy as np

import burnish
from contenders import Step, serve


def main() -> None:
    job = json.loads(sys.argv[1])
    batch = {name: np.fromfile(path, dtype).reshape(shape) for name, (dtype, shape, path) in job["batch"].items()}

    def build() -> tuple[Step, dict[str, object]]:
        session = burnish.Session(burnish.Program.load(job["program"]), engine="onnxruntime", threads=job["threads"])
        return lambda: session.step(batch)["loss"], {}

    serve(build)


if __name__ == "__main__":
    main()
