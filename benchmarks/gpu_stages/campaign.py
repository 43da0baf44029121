"""Runs stages one after another, each in a process of its own with a time budget, and writes down what each tells at once.

A process that ends, hangs or breaks its GPU context costs its own stage alone.
"""

from __future__ import annotations

import datetime
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu_stages.setting import FAILED, NO_TIME, OK, SKIPPED, Report, Row, Setting, described

FORMAT = 1
# Seconds after its budget that a stage has to end by itself: a case that has begun may end.
GRACE = 20.0
# How often the clock is looked at while a stage says nothing.
LOOK_UP_SECONDS = 0.2
PRELOADED = ["torch", "burnish.compiler.link", "burnish.training.session", "burnish.engines.torch.engine"]

Document = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A part of the campaign.

    Attributes:
        name: as ``--stages`` takes it.
        module: has ``run(setting, report)``.
        title: in the table.
        seconds: its share of the budget; what stages before it left over comes on top.
    """

    name: str
    module: str
    title: str
    seconds: float


STAGES = (
    Stage("correctness", "gpu_stages.correctness", "Beside the CPU engine", 80),
    Stage("speed", "gpu_stages.speed", "Speed", 260),
    Stage("profile", "gpu_stages.time_spent", "Where the time goes", 50),
    Stage("normalization", "gpu_stages.normalization", "Accuracy of normalization", 10),
    Stage("synchronized", "gpu_stages.synchronized", "Synchronized batch normalization", 20),
    Stage("launches", "gpu_stages.launches", "Launch overhead", 25),
    Stage("memory", "gpu_stages.memory_use", "Memory", 25),
    Stage("onnxruntime", "gpu_stages.onnxruntime_cuda", "ONNX Runtime", 10),
)
"""In the order in which they run, the most valuable first."""
FINDINGS = Stage("found", "gpu_stages.findings", "What was found", 60)


class Campaign:
    """One run of stages.

    Args:
        setting: of all stages.
        budget: seconds for all of them.
        output: the file that is written after every row.
        resume: keep what the file has from a run with the same setting, and measure only what it lacks.
        clock: in seconds; it goes to the processes of the stages, and is the same there.
    """

    def __init__(
        self, setting: Setting, budget: float, output: Path, resume: bool = False, clock: Callable[[], float] = time.time
    ):
        self._setting, self._budget, self._output, self._clock = setting, budget, output, clock
        self.document: Document = {
            "format": FORMAT,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": setting.device,
            "tiny": setting.tiny,
            "found": {},
            "stages": {},
        }
        if resume and output.exists():
            earlier = read(output)
            if (earlier["device"], earlier["tiny"]) != (setting.device, setting.tiny):
                raise ValueError(f"{output} was written with other --device or --tiny: give another --output, or no --resume")
            self.document["stages"] = earlier["stages"]

    def run(self, stages: Sequence[Stage]) -> Document:
        """Run the stages; returns what was measured, as the file has it."""
        ends = self._clock() + self._budget
        for stage in stages:
            entry = self.document["stages"].setdefault(stage.name, {"status": "not run", "rows": []})
            entry["title"] = stage.title
        self._write()
        # What an earlier run has done leaves its share to the others.
        open_seconds = sum(stage.seconds for stage in stages if self.document["stages"][stage.name]["status"] != "done")
        scale = self._budget / max(open_seconds, 1.0)
        # Time that it takes is the first stage's: the shares below are of what is left then.
        self._follow(FINDINGS, {}, min(FINDINGS.seconds, self._budget), lambda found: None)
        if refusal := self.document["found"].get("cannot_run"):
            for stage in stages:
                self.document["stages"][stage.name]["error"] = refusal
            self._write()
            return self.document
        due = self._clock()
        for stage in stages:
            entry = self.document["stages"][stage.name]
            if entry["status"] == "done":
                continue
            due += stage.seconds * scale
            self._run_stage(stage, entry, max(0.0, min(due, ends) - self._clock()))
        return self.document

    def _run_stage(self, stage: Stage, entry: dict[str, Any], seconds: float) -> None:
        rows = {row["name"]: row for row in entry["rows"] if row["verdict"] == OK}
        known = dict(rows)
        entry |= {"status": "running", "rows": list(rows.values()), "budget_seconds": round(seconds, 1)}
        entry.pop("error", None)
        self._write()
        print(f"{stage.name}: {seconds:.0f} s", file=sys.stderr, flush=True)

        def take(row: Row) -> None:
            rows[row["name"]] = row
            entry["rows"] = list(rows.values())
            remark = row.get("reason") or row.get("error") or ""
            print(f"  {row['name']}: {row['verdict']} {remark}".rstrip(), file=sys.stderr, flush=True)
            self._write()

        began = self._clock()
        error = self._follow(stage, known, seconds, take)
        entry["seconds"] = round(self._clock() - began, 1)
        if error is not None:
            entry["error"] = error
        entry["status"] = _status(entry)
        self._write()

    def _follow(self, stage: Stage, known: Mapping[str, Row], seconds: float, take: Callable[[Row], None]) -> str | None:
        """Run a stage in a process and take its rows; returns what went wrong beside its cases, None if nothing did."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        pipe, remote = context.Pipe(duplex=False)
        deadline = self._clock() + seconds
        work = (remote, stage.module, self._setting, known, deadline, self._clock)
        process = context.Process(target=_work, args=work)
        process.start()
        remote.close()
        error: str | None = "ended before its time"
        try:
            while True:
                is_over = self._clock() > deadline + GRACE  # before the look: what was told until then counts
                if not pipe.poll(LOOK_UP_SECONDS):
                    if is_over:
                        break
                    continue
                message = pipe.recv()
                if "row" in message:
                    take(message["row"])
                elif "found" in message:
                    self.document["found"] = message["found"]
                    self._write()
                else:
                    error = message["end"]
                    return error
            error = f"was stopped {GRACE:.0f} s after its {seconds:.0f} s were over"
        except EOFError:
            process.join(GRACE)
            error = f"its process ended with exit code {process.exitcode}"
        finally:
            _end(process)
            if stage is FINDINGS and not self.document["found"]:
                self.document["found"] = {"error": error}
        return error

    def _write(self) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        part = self._output.with_name(self._output.name + ".part")
        part.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._output)


def read(path: Path) -> Document:
    """Read what a campaign wrote.

    Raises:
        ValueError: it is not a file of a campaign.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of this campaign: run benchmarks/gpu.py to write one")
    return document


def failures(document: Document) -> list[str]:
    """The stages and cases that failed or were cut off, by name."""
    names = []
    for name, stage in document["stages"].items():
        if "error" in stage:
            names.append(f"{name}: {stage['error']}")
        names += [f"{name}: {row['name']}: {row['error']}" for row in stage["rows"] if row["verdict"] == FAILED]
    return names


def _status(entry: Mapping[str, Any]) -> str:
    verdicts = {row["verdict"] for row in entry["rows"]}
    if "error" in entry or FAILED in verdicts:
        return "failed"
    if NO_TIME in verdicts:
        return "out of time"
    return "done" if verdicts <= {OK, SKIPPED} and verdicts else "failed"


def _work(
    pipe: Connection, module: str, setting: Setting, known: Mapping[str, Row], deadline: float, clock: Callable[[], float]
) -> None:
    """The process of a stage."""
    with suppress(PermissionError):
        os.setsid()  # it and what it starts end together
    os.dup2(2, 1)  # what libraries print has no place in the table
    try:
        importlib.import_module(module).run(setting, Report(pipe.send, known, deadline, clock))
        end = None
    except BrokenPipeError:
        return
    except BaseException as error:
        print(described(error)["traceback"], file=sys.stderr, flush=True)
        end = described(error)["error"]
    pipe.send({"end": end})


def _end(process: Any) -> None:
    """End a stage's process, and those that it started."""
    process.join(1.0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()
