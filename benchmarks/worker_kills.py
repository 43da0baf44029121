"""Kills workers of a run at random moments, resumes it with another number of them, and compares it with that of one process.

Run: ``python benchmarks/worker_kills.py --kills 50``. It exits with 1 where a run hangs, a killed rank is not named, or the
figures of the whole run are not those of one process, to float32 rounding.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish.models import residual_network

BATCH, SAMPLES, WORKERS = 32, 512, (2, 3, 4)
LIMIT_SECONDS = 300.0
# What float32 sums in another order come to over some epochs of a network that still learns.
TOLERANCE = 0.05


def command(folder: Path, epochs: int, *options: str) -> list[str]:
    course = f"--engine torch --batch-size {BATCH} --lr 0.01 --threads 1 --epochs {epochs} --checkpoint-every 3 --no-fold"
    train = ["train", str(folder / "model.onnx"), "--data", str(folder / "data.npz"), *course.split(), *options]
    return [sys.executable, "-m", "burnish", *train]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def killed_once(arguments: list[str], chance: random.Random) -> str:
    """Start a run, kill one of its workers after a while; returns what it said, or how it failed to end."""
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "samples" in line:  # all workers are there
                break
        time.sleep(chance.uniform(0.0, 4.0))
        workers = children(process.pid)
        if workers:
            os.kill(chance.choice(workers), signal.SIGKILL)
        try:
            said, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return "it hangs"
    if process.returncode == 0:
        return ""  # it was done before the kill
    found = re.search(r"Rank \d+ \(process \d+\) was ended by SIGKILL", said)
    return found[0] if found else f"no rank is named:\n{said}"


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ir.save(residual_network((1, 8, 8), classes=10, width=4, blocks=(1,)), folder / "model.onnx")
        generator = np.random.default_rng(given.seed)
        labels = generator.integers(0, 10, SAMPLES)
        images = generator.normal(size=(SAMPLES, 8, 8)) + 0.2 * labels[:, None, None]
        np.savez(folder / "data.npz", x=images.astype(np.float32), y=labels)
        subprocess.run([*command(folder, given.epochs), "-o", str(folder / "alone")], check=True, capture_output=True)
        run = ["-o", str(folder / "together")]
        for kill in range(given.kills):
            workers = ["--workers", str(chance.choice(WORKERS))]
            resume = ["--resume"] if (folder / "together" / "checkpoints" / "latest.safetensors").exists() else ["--overwrite"]
            # One epoch more than it can reach keeps it running until it is killed.
            said = killed_once(command(folder, 10 * given.epochs, *run, *workers, *resume), chance)
            reached = table(folder / "together")[-1]["step"] if (folder / "together" / "metrics.csv").exists() else "0"
            print(f"kill {kill + 1} of {given.kills}: {workers[1]} workers, step {reached}: {said or 'done before'}", flush=True)
            if not re.match(r"Rank|$", said):
                return 1
        epochs = int(table(folder / "together")[-1]["epoch"]) + 1
        subprocess.run([*command(folder, epochs, *run, "--workers", "2", "--resume")], check=True, capture_output=True)
        subprocess.run([*command(folder, epochs), "-o", str(folder / "alone"), "--overwrite"], check=True, capture_output=True)
        return compared(table(folder / "together"), table(folder / "alone"))


def compared(together: list[dict[str, str]], alone: list[dict[str, str]]) -> int:
    """Print and return whether two runs part."""
    if [row["step"] for row in together] != [row["step"] for row in alone]:
        print("The runs have other steps")
        return 1
    largest = max(abs(float(row["loss"]) - float(other["loss"])) for row, other in zip(together, alone, strict=True))
    print(f"{together[-1]['step']} steps; the losses differ by {largest:.2g} at most")
    return 0 if largest < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
