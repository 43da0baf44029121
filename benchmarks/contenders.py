"""Contenders of a comparison: each trains the same model in a process of its own, and steps when it is told to.

Rounds are interleaved (A B A B ...), so that a machine whose speed drifts slows all of them alike.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Contender:
    """A process that was started with a job and answers one line of JSON for every line it is sent."""

    name: str
    process: subprocess.Popen[str]
    ready: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, script: str, job: dict[str, Any]) -> Contender:
        """Start ``script`` of this folder with the job on its command line, and wait until it has set itself up."""
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        contender = cls(name, process)
        contender.ready = contender._answer()
        return contender

    def step(self) -> None:
        """Let it run one step; keep the time it took and its loss."""
        answer = self._ask("step")
        self.seconds.append(answer["seconds"])
        self.losses.append(answer["loss"])

    def finish(self) -> dict[str, Any]:
        """Stop it; returns its peak resident memory in bytes."""
        answer = self._ask("finish")
        self.process.wait(timeout=60)
        return answer

    def _ask(self, request: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} stopped with exit code {self.process.wait()}")
        return json.loads(line)


def serve(step: Callable[[], float], ready: dict[str, Any]) -> None:
    """The contender's side: say that it is ready, then run ``step`` (which returns the loss) whenever asked."""
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        if line.strip() == "step":
            started = time.perf_counter()
            loss = step()
            print(json.dumps({"seconds": time.perf_counter() - started, "loss": loss}), flush=True)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"peak_bytes": peak}), flush=True)
            return
