"""Kills workers of a run at random moments, lets it go on, and compares it with that of one process.

A launch goes on by itself after each kill but its last (``--max-restarts``); then the next resumes the run with another number of
workers. Run: ``python benchmarks/worker_kills.py --kills 50``. It exits with 1 where a run hangs or does not go on, a killed rank
is not named at the end of a launch, or the figures of the whole run are not those of one process, to float64 rounding.
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
import threading
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish.models import residual_network
from burnish.rewriting.change_dtypes import compute_in_float64

BATCH, SAMPLES, WORKERS = 32, 512, (2, 3, 4)
MANY_EPOCHS = 100_000  # more than a run comes to before it is killed
LIMIT_SECONDS = 120.0
KILLS_OF_A_LAUNCH = 5
# Of float64 sums in another order, after thousands of steps; a batch left out or taken twice comes to far more.
# In float32 a moved last bit does, too, as soon as it takes the input of one ReLU across zero.
TOLERANCE = 1e-9


def command(folder: Path, epochs: int, *options: str) -> list[str]:
    course = f"--engine torch --batch-size {BATCH} --lr 0.01 --threads 1 --epochs {epochs} --checkpoint-every 3 --no-fold"
    train = ["train", str(folder / "model.onnx"), "--data", str(folder / "data.npz"), *course.split(), *options]
    return [sys.executable, "-m", "burnish", *train]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def killed_often(arguments: list[str], kills: int, within: float, chance: random.Random) -> tuple[int, str]:
    """Start a run that goes on by itself until it was killed so often: one worker each time, ``within`` seconds of each start.

    Returns:
        How many kills there were, and what was said of the last, or how the run failed to go on or to end.
    """
    given = [*arguments, "--max-restarts", str(kills - 1)]
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        done = 0
        hangs = threading.Event()

        def give_up() -> None:
            hangs.set()
            process.kill()

        while done < kills:
            limit = threading.Timer(LIMIT_SECONDS, give_up)
            limit.start()
            # Of the workers that are there again, the first says what data there are.
            started = any(line.rstrip().endswith("samples") for line in process.stdout)
            limit.cancel()
            if not started:
                break
            time.sleep(chance.uniform(0.0, within))
            if workers := children(process.pid):
                os.kill(chance.choice(workers), signal.SIGKILL)
                done += 1
        try:
            said, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            hangs.set()
            process.kill()
    if hangs.is_set():
        return done, "it hangs"
    found = re.search(r"Rank \d+ \(process \d+\) was ended by SIGKILL", said)
    return done, found[0] if found else f"no rank is named:\n{said}"


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of a run; none where it has not come to an epoch's end."""
    if not (folder / "metrics.csv").exists():
        return []
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def going_on(folder: Path) -> list[str]:
    """The option that goes on with the run, or begins it where no worker has come to a checkpoint yet."""
    return ["--resume" if (folder / "together" / "checkpoints" / "latest.safetensors").exists() else "--overwrite"]


def finished(arguments: list[str]) -> None:
    """Run a command to its end; exits with what it said where it fails."""
    ended = subprocess.run(arguments, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        sys.exit(ended.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--within", type=float, default=20.0, help="seconds from when workers have read their data to a kill, at most"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = compute_in_float64(residual_network((1, 8, 8), classes=10, width=4, blocks=(1,)))
        ir.save(network, folder / "model.onnx")
        generator = np.random.default_rng(given.seed)
        labels = generator.integers(0, 10, SAMPLES)
        images = generator.normal(size=(SAMPLES, 8, 8)) + 0.2 * labels[:, None, None]
        np.savez(folder / "data.npz", x=images, y=labels)
        run = ["-o", str(folder / "together")]
        done = 0
        while done < given.kills:
            began = time.monotonic()
            workers = ["--workers", str(chance.choice(WORKERS))]
            several = min(KILLS_OF_A_LAUNCH, given.kills - done)
            kills, said = killed_often(
                command(folder, MANY_EPOCHS, *run, *workers, *going_on(folder)), several, given.within, chance
            )
            done += kills
            reached = (table(folder / "together") or [{"step": "0"}])[-1]["step"]
            seconds = time.monotonic() - began
            print(f"{done} of {given.kills} kills: {workers[1]} workers, step {reached}, {seconds:.0f} s: {said}", flush=True)
            if kills < several or not said.startswith("Rank"):
                return 1
        epochs = int((table(folder / "together") or [{"epoch": "0"}])[-1]["epoch"]) + 1
        finished(command(folder, epochs, *run, "--workers", "2", *going_on(folder)))
        finished(command(folder, epochs, "-o", str(folder / "alone")))
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
