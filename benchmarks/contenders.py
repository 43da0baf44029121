"""Contenders of a comparison: each trains the same model in a process of its own, and steps when it is told to.

Rounds are interleaved (A B A B ...), so that a machine whose speed drifts slows all of them alike. This module needs nothing
but the standard library: contenders that live in environments of their own import it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE = 1200.0
LOG_LINES = 12
# A turn shorter than this is many steps.
TURN_SECONDS = 1.0
# Steps of a turn before its clock starts: who has waited finds its threads asleep, caches that others filled, and memory that the
# system took back meanwhile. Who trains does not wait.
WAKING_SECONDS = 0.5

Step = Callable[[], float]


class ContenderError(RuntimeError):
    """A contender reports an error, stops, or does not answer; the message is what it said."""


@dataclass
class Contender:
    """A process that was started with a job and answers one line of JSON for every line it is sent."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None = None
    opened: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        name: str,
        script: str,
        job: Mapping[str, Any],
        python: Path | str = sys.executable,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        wait: bool = True,
    ) -> Contender:
        """Start ``script`` of this folder with the job on its command line, and wait until it has imported what it needs.

        Args:
            name: what it is called in errors and results.
            script: a file name, relative to this folder.
            job: JSON-compatible; what the script reads from its command line.
            python: the interpreter, which decides what is installed.
            environment: environment variables beside this process's own.
            log: a file for its standard error; None shares this process's.
            wait: False returns at once; ``answer`` then waits. For processes that wait for each other.

        Raises:
            ContenderError: it stops before it is ready.
        """
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH") if python == sys.executable else None])]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
        command = [str(python), str(HERE / script), json.dumps(dict(job))]
        errors = log.open("wb") if log is not None else None
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=variables)
        if errors is not None:
            errors.close()
        contender = cls(name, process, log)
        if wait:
            contender.answer()
        return contender

    def open(self) -> None:
        """Let it build its training step; ``opened`` then holds the ``seconds`` it took and what else it tells."""
        self.opened = self._ask("open")

    def step(self) -> None:
        """Let it run one step; keep the time it took and its loss."""
        answer = self._ask("step")
        self.seconds.append(answer["seconds"])
        self.losses.append(answer["loss"])

    def turn(self, seconds: float) -> tuple[list[float], float]:
        """Let it run steps until so much time has passed, one at the least.

        Returns:
            The time of each step, and the mean of the processor time, of all threads.
        """
        answer = self._ask(f"turn {seconds}")
        return answer["seconds"], answer["processor_seconds"]

    def send(self, request: str) -> None:
        """Begin a request (``open``, ``step``, ``steps 3``, ``memory``, ``finish``); ``answer`` waits for it."""
        assert self.process.stdin is not None
        # One that has stopped is found out when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(request.encode() + b"\n")
            self.process.stdin.flush()

    def memory(self) -> int:
        """Its peak resident memory so far, in bytes."""
        return self._ask("memory")["peak_bytes"]

    def finish(self) -> dict[str, Any]:
        """Stop it; returns its peak resident memory in bytes."""
        answer = self._ask("finish")
        self.process.wait(timeout=60)
        return answer

    def kill(self) -> None:
        """Stop it without asking, where it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _ask(self, request: str) -> dict[str, Any]:
        self.send(request)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for what it says to the request that was sent last.

        Raises:
            ContenderError: an error, its end, or silence.
        """
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            self.kill()
            raise ContenderError(f"{self.name} did not answer within {PATIENCE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise ContenderError(f"{self.name} stopped with exit code {self.process.wait()}{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            self.kill()
            raise ContenderError(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log is not None else []
        return ": " + " | ".join(line.strip() for line in lines[-LOG_LINES:]) if lines else ""


def peak_bytes() -> int:
    """The peak resident memory of this process.

    From ``/proc`` where there is one: ``ru_maxrss`` begins with the peak of the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve(
    build: Callable[[], tuple[Step, dict[str, Any]]], others: Mapping[str, Callable[..., dict[str, Any]]] | None = None
) -> None:
    """The contender's side: answer requests until told to finish.

    Args:
        build: makes the training step (a call trains on the next batch and returns the loss) and what there is to tell about it.
        others: further requests by their first word; each gets the words that follow.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    step: Step | None = None

    def timed() -> tuple[float, float]:
        assert step is not None
        started = time.perf_counter()
        loss = step()
        return time.perf_counter() - started, loss

    def answer(request: list[str]) -> dict[str, Any]:
        nonlocal step
        if others is not None and request[0] in others:
            return others[request[0]](*request[1:])
        if request[0] == "open":
            started = time.perf_counter()
            step, told = build()
            return {"seconds": time.perf_counter() - started, **told}
        if request[0] == "step":
            seconds, loss = timed()
            return {"seconds": seconds, "loss": loss}
        if request[0] == "turn":
            busy, end = time.process_time(), time.perf_counter() + float(request[1])
            taken = [timed()[0]]
            while time.perf_counter() < end:
                taken.append(timed()[0])
            return {"seconds": taken, "processor_seconds": (time.process_time() - busy) / len(taken)}
        if request[0] == "steps":
            return {"seconds": [timed()[0] for _ in range(int(request[1]))]}
        return {"peak_bytes": peak_bytes()}

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answered = answer(line.split())
        except Exception as error:
            answered = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps(answered), file=answers, flush=True)
        if "error" in answered or line.strip() == "finish":
            return
