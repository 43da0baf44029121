"""The resident peak of each stage of training, of burnish and of PyTorch eager: importing, compiling, opening, the first steps.

    python benchmarks/memory.py --models resnet50 bert-base --batches 1 16

Each contender runs in a process of its own, one after the other. A figure is the most that was resident during the stage, in MB
of 10^6 bytes; what earlier stages left is part of it. "State" is what the program's state takes once, "planned" the planned
peak of a step, without the libraries and the loaded graph. Needs Linux (``/proc/self/clear_refs``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from contender_kinds import KINDS

STEPS = 4
CONTENDERS = ("eager", "burnish-kernels", "burnish-standard")
PEAK, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
T = TypeVar("T")


class Stages:
    """The resident peak of each stage so far, in bytes."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    def run(self, stage: str, body: Callable[[], T]) -> T:
        """Run a stage, and note its peak."""
        CLEAR.write_text("5", encoding="ascii")  # count the peak from what is resident now (proc(5))
        result = body()
        line = next(line for line in PEAK.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        self.peaks[stage] = 1024 * int(line.split()[1])
        return result


def run_burnish(job: dict[str, Any], stages: Stages) -> dict[str, Any]:
    """Train by burnish, on the engine of the job; returns what else there is to tell."""

    def import_all() -> None:
        import onnxruntime  # noqa: F401  (the stage is the import)

        import burnish  # noqa: F401

    stages.run("import", import_all)
    import burnish
    from burnish_step import engine_of, program_of
    from job import endless, read_feeds

    batches = endless(read_feeds(job))
    program = stages.run("compile", lambda: program_of(job))
    session = stages.run("open", lambda: burnish.Session(program, engine=engine_of(job), threads=job["threads"]))
    for step in range(STEPS):
        stages.run(f"step {step + 1}", lambda: session.step(next(batches)))
    state = sum(array.nbytes for array in session.state().values())
    return {"state": state, "planned": program.planned_peak(job["batch"]).bytes}


def run_eager(job: dict[str, Any], stages: Stages) -> dict[str, Any]:
    """Train by PyTorch eager."""
    stages.run("import", lambda: __import__("pytorch_step"))
    import torch

    from job import endless, read_feeds
    from pytorch_step import module_of, step_of, tensors_of

    torch.set_num_threads(job["threads"])
    batches = endless(tensors_of(job, read_feeds(job)))
    module = stages.run("compile", lambda: module_of(job))
    run = stages.run("open", lambda: step_of(job, module, module, batches))
    for step in range(STEPS):
        stages.run(f"step {step + 1}", run)
    return {}


def measure(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run one contender in a process of its own; returns the peaks of its stages in bytes, and what it tells beside."""
    told = json.dumps({**job, **KINDS[name].settings, "contender": name})
    folders = [str(Path(__file__).parent), str(Path(__file__).parent / "peers"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    run = subprocess.run(
        [sys.executable, __file__, told, "--contender"], capture_output=True, text=True, check=False, env=environment
    )
    if run.returncode:
        raise SystemExit(f"{name}: {run.stderr.strip().splitlines()[-1]}")
    return json.loads(run.stdout.splitlines()[-1])


def row(name: str, figures: dict[str, Any], eager: int) -> str:
    """The line of a table."""
    stages = figures["stages"]
    peak = max(stages.values())
    cells = [f"{value / 1e6:.0f}" for value in stages.values()] + [f"{peak / 1e6:.0f}", f"{peak / eager:.2f}"]
    cells += [f"{figures[key] / 1e6:.0f}" if key in figures else "" for key in ("state", "planned")]
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    if sys.argv[-1] == "--contender":
        job, stages = json.loads(sys.argv[1]), Stages()
        told = (run_burnish if job["contender"].startswith("burnish") else run_eager)(job, stages)
        print(json.dumps({"stages": stages.peaks, **told}))
        return
    from workloads import WORKLOADS, prepare

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet50", "bert-base"], choices=[*WORKLOADS])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--contenders", nargs="+", default=[*CONTENDERS], choices=[*KINDS])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    for model in arguments.models:
        for batch in arguments.batches:
            with tempfile.TemporaryDirectory() as folder:
                job = {**prepare(Path(folder), model, batch), "threads": arguments.threads}
                figures = {name: measure(name, job) for name in arguments.contenders}
            eager = max(figures.get("eager", next(iter(figures.values())))["stages"].values())
            stages = next(iter(figures.values()))["stages"]
            print(f"\n{model}, batch {batch}:\n")
            print("| MB | " + " | ".join((*stages, "peak", "beside the first", "state", "planned")) + " |")
            print("| --- " * (len(stages) + 5) + "|")
            for name, told in figures.items():
                print(row(name, told, eager), flush=True)


if __name__ == "__main__":
    main()
