"""Two commits of burnish on one machine, each installed: the same bits, and the time that steps, compiling and importing take.

    python benchmarks/compare_commits.py bits OLD [NEW]
    python benchmarks/compare_commits.py speed OLD [NEW] [--models mlp lstm ...] [--engines torch onnxruntime] [--rounds 30]

``bits`` trains the programs of ``tests/oracles/frozen_models.py`` for three steps on each engine, and compares losses,
outputs and states bit for bit. NEW also loads the programs that OLD saved, and must go on with the same bits. ``speed`` lets
both take steps in turns, and prints ratios of times: old over new, so that more than 1 is faster than before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[1]
WORKER = Path(__file__).parent / "peers" / "of_commit.py"
ENGINES = ("onnxruntime", "standard", "torch", "reference")
"""``onnxruntime`` is with burnish's kernels, ``standard`` without."""
MODELS = ("mlp", "lstm", "mobilenet_v2:4", "mobilenet_v2:16", "resnet50:4", "resnet50:16", "bert-base:2")


class Installed:
    """A process in which one commit is installed; it answers a request per line."""

    def __init__(self, commit: str, folder: Path):
        self.commit = _git("rev-parse", "--short=10", commit)
        home = folder / self.commit
        self.clone, site = home / "clone", home / "site"
        if not (home / "done").exists():
            print(f"installing {self.commit}, which takes minutes", file=sys.stderr, flush=True)
            home.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "clone", "--quiet", str(CHECKOUT), str(self.clone)], check=True)
            subprocess.run(["git", "-C", str(self.clone), "checkout", "--quiet", "--detach", self.commit], check=True)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", str(site), str(self.clone)], check=True)
            (home / "done").touch()
        paths = os.pathsep.join([str(site), str(self.clone / "tests")])
        self.variables = {**os.environ, "PYTHONPATH": paths, "BURNISH_CACHE": str(home / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.variables
        )
        where = self.ask("where")
        if not Path(where).is_relative_to(site):
            raise SystemExit(f"burnish is imported from {where}, not from {site}")

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a request and return the answer.

        Raises:
            SystemExit: the process failed; its message is on stderr.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"command": command, **arguments}), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.commit} failed at {command} {arguments}")
        return json.loads(answer)

    def import_seconds(self) -> float:
        """The least time of five that a new process takes to import burnish."""
        return min(_timed([sys.executable, "-c", "import burnish"], self.variables) for _ in range(5))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(CHECKOUT), *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _timed(command: Sequence[str], variables: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, env=variables)
    return time.perf_counter() - begin


def compare_bits(old: Installed, new: Installed, engines: Sequence[str], programs: Sequence[str]) -> int:
    """Print each program and engine whose bits differ; return how many there are."""
    names, differing = programs or old.ask("programs"), 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            old.ask("save", name=name, folder=f"{folder}/{name}")
            for engine in engines:
                before, after = (one.ask("train", name=name, engine=engine) for one in (old, new))
                loaded = new.ask("train", folder=f"{folder}/{name}", engine=engine)
                found = [key for key in before if before[key] != after.get(key)]
                found += [f"{key} of the saved program" for key in before if before[key] != loaded.get(key)]
                if found or before.keys() != after.keys():
                    differing += 1
                    print(f"{name} on {engine}: {', '.join(found[:6]) or 'other entries'}", flush=True)
    print(f"{len(names)} programs on {len(engines)} engines, {differing} differ")
    return differing


def compare_speed(old: Installed, new: Installed, models: Sequence[str], engines: Sequence[str], rounds: int) -> None:
    """Print the ratio of the medians of both, for each model and engine, and their geometric mean."""
    from workloads import WORKLOADS, prepare

    ratios = []
    for label in models:
        model, _, batch = label.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            job = prepare(Path(folder), model, int(batch or WORKLOADS[model].batch))
            for engine in engines:
                compiling = [one.ask("open", job=job, engine=engine) for one in (old, new)]
                seconds: tuple[list[float], list[float]] = ([], [])
                for number in range(rounds):
                    for place in (0, 1) if number % 2 else (1, 0):
                        seconds[place].append((old, new)[place].ask("steps"))
                before, after = (statistics.median(one) for one in seconds)
                ratios.append(before / after)
                print(
                    f"{label:18} {engine:12} {before * 1e3:9.2f} ms {after * 1e3:9.2f} ms  {before / after:5.3f}"
                    f"   compile {compiling[0]:.2f} s {compiling[1]:.2f} s",
                    flush=True,
                )
    print(f"geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f}")
    print(f"import {old.import_seconds():.2f} s {new.import_seconds():.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two commits of burnish, each installed")
    parser.add_argument("what", choices=("bits", "speed"))
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "burnish-commits", help="of installations")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=None)
    parser.add_argument("--models", nargs="+", default=MODELS, help="with a batch size after a colon")
    parser.add_argument("--programs", nargs="+", default=(), help="of the frozen ones; all if it is left out")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    old, new = (Installed(commit, options.folder) for commit in (options.old, options.new))
    if options.what == "bits":
        raise SystemExit(1 if compare_bits(old, new, options.engines or ENGINES, options.programs) else 0)
    compare_speed(old, new, options.models, options.engines or ("onnxruntime", "torch"), options.rounds)


if __name__ == "__main__":
    main()
