"""What ``compare_commits.py`` asks of one commit that is installed: a request per line comes in, an answer per line goes out."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.torch import TorchEngine

STEPS = 3
SAMPLES = 4
TURN_SECONDS = 0.4


def engine_of(name: str) -> Any:
    """Engines whose bits depend on nothing that is measured."""
    made = {
        "onnxruntime": lambda: OnnxRuntimeEngine(kernels=True),
        "standard": lambda: OnnxRuntimeEngine(kernels=False),
        "torch": lambda: TorchEngine(kernel_choice="fixed"),
    }
    return made[name]() if name in made else name


def batch_of(program: burnish.Program, seed: int) -> dict[str, np.ndarray]:
    """A batch for any program: floats, and small whole numbers that are classes and rows of every table."""
    random, batch = np.random.default_rng(seed), {}
    for entry in program.signature["step"].inputs:
        if entry.role.name not in ("DATA", "LABEL"):
            continue
        shape = [extent if isinstance(extent, int) else SAMPLES for extent in entry.extents]
        dtype = entry.dtype.numpy()
        batch[entry.name] = random.normal(size=shape).astype(dtype) if dtype.kind == "f" else random.integers(0, 2, shape, dtype)
    return batch


def digests(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, str]:
    return {
        f"{prefix}{name}": f"{array.dtype} {array.shape} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]}"
        for name, array in ((name, np.asarray(array)) for name, array in arrays.items())
    }


class Answers:
    """Answers to requests; the session whose steps are timed stays open between them."""

    def __init__(self) -> None:
        self.compiled: dict[str, burnish.Program] = {}

    def where(self) -> str:
        return str(burnish.__file__)

    def programs(self) -> list[str]:
        from oracles.frozen_models import catalogue

        return list(catalogue())

    def program(self, name: str) -> burnish.Program:
        from oracles.frozen_models import catalogue

        if name not in self.compiled:
            self.compiled = {name: catalogue()[name]()}
        return self.compiled[name]

    def save(self, name: str, folder: str) -> bool:
        self.program(name).save(folder)
        return True

    def train(self, engine: str, name: str = "", folder: str = "") -> dict[str, str]:
        """Digests of what steps, an evaluation and a prediction return, and of the state; or the refusal."""
        program = self.program(name) if name else burnish.Program.load(folder)
        found: dict[str, str] = {}
        try:
            session = burnish.Session(program, engine=engine_of(engine), seed=0, threads=1)
            for step in range(STEPS):
                found |= digests(session.step(batch_of(program, step)), f"step {step}: ")
            batch = batch_of(program, STEPS)
            found |= digests(session.evaluate(batch), "evaluate: ")
            data = {entry.name: batch[entry.name] for entry in program.signature["predict"].inputs if entry.name in batch}
            found |= digests(session.predict(data), "predict: ")
            found |= digests(session.state(), "")
        except burnish.errors.BurnishError as error:
            found["refused"] = f"{type(error).__name__}: {error}"
        return found

    def open(self, job: Mapping[str, Any], engine: str) -> float:
        """Compile a job's model and take the first steps; return the seconds that compiling took, the least of three."""
        options = dict(job["optimizer"])
        optimizer = getattr(burnish.optim, options.pop("name"))(**options)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            program = burnish.compile(job["onnx"], loss=job["loss"], optimizer=optimizer, trainable=job["trainable"])
            seconds.append(time.perf_counter() - begin)
        self.session = burnish.Session(program, engine=engine)
        with np.load(job["data"]) as data:
            arrays = dict(data)
        names = [entry.name for entry in program.signature["step"].inputs if f"{entry.name}0" in arrays]
        self.batches = [{name: arrays[f"{name}{index}"] for name in names} for index in range(3)]
        for batch in self.batches * 2:
            self.session.step(batch)
        return min(seconds)

    def steps(self) -> float:
        """Seconds of a step, over a turn of some tenths of a second."""
        begin, count = time.perf_counter(), 0
        while count < 3 or time.perf_counter() - begin < TURN_SECONDS:
            self.session.step(self.batches[count % 3])
            count += 1
        return (time.perf_counter() - begin) / count


def main() -> None:
    warnings.simplefilter("ignore")
    answers = Answers()
    commands = {
        "where": answers.where,
        "programs": answers.programs,
        "save": answers.save,
        "train": answers.train,
        "open": answers.open,
        "steps": answers.steps,
    }
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(commands[request.pop("command")](**request)), flush=True)


if __name__ == "__main__":
    main()
