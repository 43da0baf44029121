"""Tries the samples of PyTorch's databases in several processes, and writes what became of each to a file, a line of JSON each.

    PYTHONPATH=tests python -m oracles.operator_campaign outcomes.jsonl --samples 5 --processes 2

What the file holds is not tried again. A sample that ends its process, or takes minutes, is ``crashed``.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import re
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.onnx._internal.exporter._registration

from oracles.exporter_registry import keep_registry
from oracles.operator_database import NETWORKS, OPERATORS, WAYS, module_samples, operator_samples, outcome

LONGEST = 300
"""After so many seconds a sample ends its process."""

TOGETHER = 20
"""So many names are tried by a process, before another one is started."""


class Sample(NamedTuple):
    """A sample of an operator or module, by its number, and the way that it takes through burnish."""

    kind: str
    name: str
    number: int
    way: str


def outcomes(path: Path) -> dict[Sample, dict[str, Any]]:
    """The last record of each sample in a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {Sample(*record["sample"]): record for record in records}


def totals(records: Iterable[dict[str, Any]], reasons: int = 40) -> Iterator[str]:
    """How many samples were right, refused, wrong or skipped, by way, and why most of them were refused."""
    records = list(records)
    for kind, way in sorted({(record["sample"][0], record["sample"][3]) for record in records}):
        those = [record for record in records if record["sample"][0] == kind and record["sample"][3] == way]
        counts = Counter(record["outcome"] for record in those)
        seconds = sum(record["seconds"] for record in those)
        yield f"{kind}s by {way}: {dict(counts)} of {len(those)}, in {seconds:.0f} s"
        why = Counter(_plain(record["why"]) for record in those if record["outcome"] != "right")
        yield from (f"  {count:5}  {reason}" for reason, count in why.most_common(reasons))
        yield from (f"  {record['sample']}: {record['why']}" for record in those if record["outcome"] in ("wrong", "crashed"))


def _plain(reason: str) -> str:
    """A reason without what differs from sample to sample."""
    reason = re.sub(r" at /\S+( \(.*?\))?(?=[:,])", "", reason)
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"'[^']*'", "'…'", reason))[:150]


def _tried(path: Path, kind: str, names: Sequence[str], ways: Sequence[str], count: int | None, only: Collection[Sample]) -> None:
    """Try samples of operators or modules of some names, one after the other."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # what PyTorch says of traces that fail
    done, samples_of = outcomes(path), {"operator": operator_samples, "module": module_samples}
    with path.open("a") as file:

        def note(sample: Sample, outcome: str, why: str = "", seconds: float = 0.0) -> None:
            record = {"sample": sample, "outcome": outcome, "why": why, "seconds": round(seconds, 3)}
            file.write(json.dumps(record) + "\n")
            file.flush()

        for name in names:
            for number, given in enumerate(samples_of[kind](name, count)):
                samples = [sample for way in ways if (sample := Sample(kind, name, number, way)) not in done]
                for sample in samples if not only else [sample for sample in samples if sample in only]:
                    note(sample, "crashed", "it ended its process, or took too long")
                    signal.alarm(LONGEST)
                    start = time.perf_counter()
                    found = outcome(*given, sample.way)
                    signal.alarm(0)
                    note(sample, found.kind, found.why, time.perf_counter() - start)


def _run(arguments: argparse.Namespace) -> None:
    names = list(OPERATORS if arguments.kind == "operator" else NETWORKS)
    names = [name for name in names if re.search(arguments.names, name)]
    only: set[Sample] = set()
    if arguments.not_right_in is not None:
        only = {sample for sample, record in outcomes(arguments.not_right_in).items() if record["outcome"] != "right"}
        names = [name for name in names if name in {sample.name for sample in only}]
    keep_registry()
    waiting = [names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)]
    running: list[tuple[list[str], ForkProcess]] = []
    processes = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < arguments.processes:
            part = waiting.pop(0)
            given = (arguments.to, arguments.kind, part, arguments.ways, arguments.samples or None, only)
            process = processes.Process(target=_tried, args=given)
            process.start()
            running.append((part, process))
        part, process = running.pop(0)
        process.join()
        if process.exitcode:
            waiting.insert(0, part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("to", type=Path, help="the file of outcomes; what it holds is not tried again")
    parser.add_argument("--kind", choices=("operator", "module"), default="operator", help="the database")
    parser.add_argument("--samples", type=int, default=5, help="how many of each name; 0 for all")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--names", default="", help="a regular expression that names match")
    parser.add_argument("--not-right-in", type=Path, help="try what another file of outcomes does not call right")
    parser.add_argument("--totals", action="store_true", help="print the totals of the file alone")
    arguments = parser.parse_args()
    if not arguments.totals:
        _run(arguments)
    print(*totals(outcomes(arguments.to).values()), sep="\n")


if __name__ == "__main__":
    main()
