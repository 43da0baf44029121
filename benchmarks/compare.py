"""The training step beside its peers: time, first step, memory, on the same weights and the same data.

    python benchmarks/compare.py --install                               environments of the peers, once
    python benchmarks/compare.py --model resnet50 --batch 16 8 4 2 1 --save
    python benchmarks/compare.py --model mlp --peers eager,compile+pages
    python benchmarks/compare.py --model resnet50 --batch 16 --engines torch --peers burnish-wrapped
    python benchmarks/compare.py --model resnet50 --batch 4 1 --engines onnxruntime --peers burnish-kernels
    python benchmarks/compare.py --table                                 write benchmarks/results/comparison.md from the results

Every contender is a process of its own; rounds are interleaved. A time counts only where the losses of the first three steps
agree with those of PyTorch eager, which always takes part. burnish is installed from a clone of the commit into a
temporary environment; ``--environment FOLDER`` keeps it for the next run, and ``--working-tree`` takes a quick look without it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comparison_table
import environments
import installation
from burnish.engines.torch import native as kernels
from contender_kinds import ALL, ENGINES, KINDS, PAGES
from contenders import TURN_SECONDS, WAKING_SECONDS, Contender, ContenderError
from workloads import WORKLOADS, prepare

REFERENCE = "eager"
CHECKED_STEPS = 3
# Of the loss, relative. bfloat16 keeps 8 bits: 1.6e-2 is what PyTorch's own comparisons allow it.
TOLERANCES = {"float32": 1e-3, "bfloat16": 1.6e-2}
DISAGREES = "no time counts"
# Idle threads of the contender before wait actively for a while, and would take the cores from the next one.
REST = 0.05
# Times the largest peak so far that must be free before another contender starts.
HEADROOM = 1.3


@dataclass
class Entrant:
    """A contender in a comparison: its process while it takes part, and why it does not where it does not.

    Attributes:
        name: as it was asked for.
        row: what is known of it, as it is written down.
        contender: its process; None where it takes no part.
        turns: the mean seconds of a step in each turn that counts.
        processor_turns: the same in processor time.
        steps: the seconds of every step of these turns.
    """

    name: str
    row: dict[str, Any]
    contender: Contender | None = None
    turns: list[float] = field(default_factory=list)
    processor_turns: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def give_up(self, reason: str) -> None:
        """Take no further part, for this reason; no time of it counts."""
        self.row["refused"] = installation.without_folders(reason)
        for name in ("first_step_seconds", "losses"):
            self.row.pop(name, None)
        if self.contender is not None:
            self.contender.kill()
            self.contender = None


def disagreement(losses: list[float], reference: list[float], tolerance: float) -> str | None:
    """Say which of the first losses differs from the reference's by more than the tolerance, relative; None if none does."""
    for index, (loss, expected) in enumerate(zip(losses, reference, strict=True)):
        if not abs(loss - expected) <= tolerance * abs(expected):
            return f"the loss of step {index + 1} is {loss:.6g}, PyTorch's {expected:.6g}"
    return None


def start(name: str, job: Mapping[str, Any], folder: Path, precision: str) -> Entrant:
    """Start a contender's process, with empty caches, and go on while it imports what it needs."""
    base = name.removesuffix(PAGES)
    kind = KINDS[base]
    entrant = Entrant(name, {"name": name, "title": kind.title})
    python: Path | str | None = sys.executable
    if kind.environment is not None:
        python = environments.python_of(kind.environment)
    caches = folder / f"caches-{name}-{job['threads']}"
    variables = {
        "OMP_NUM_THREADS": str(job["threads"]),
        **{key: str(caches / key.lower()) for key in installation.CACHES},
    }
    if name.endswith(PAGES):
        allocator = environments.keeping_pages()
        if allocator is None:
            entrant.give_up("no allocator that keeps pages was found")
            return entrant
        entrant.row["title"] += f", {allocator[0]}"
        variables |= allocator[1]
    if precision not in kind.precisions:
        entrant.give_up(f"its script trains in {', '.join(kind.precisions)} only")
    elif python is None:
        entrant.give_up("not installed: python benchmarks/compare.py --install")
    if "refused" in entrant.row:
        return entrant
    assert python is not None
    job = {**job, **kind.settings, "precision": precision}
    log = folder / f"{name}-{job['threads']}.log"
    entrant.contender = Contender.start(name, f"peers/{kind.script}", job, python, variables, log, wait=False)
    return entrant


def take_first_steps(entrant: Entrant) -> None:
    """Let a contender that was started build its step and take the first ones."""
    if entrant.contender is None:
        return
    try:
        entrant.contender.answer()
        entrant.contender.open()
        for _ in range(CHECKED_STEPS):
            entrant.contender.step()
    except ContenderError as error:
        entrant.give_up(str(error))
        return
    opened = dict(entrant.contender.opened)
    build_seconds = opened.pop("seconds")
    entrant.row |= {
        "build_seconds": build_seconds,
        "first_step_seconds": build_seconds + entrant.contender.seconds[0],
        "losses": entrant.contender.losses,
        **installation.without_folders(opened),
    }


def enter(name: str, job: Mapping[str, Any], folder: Path, precision: str) -> Entrant:
    """Start a contender, let it build its step and take the first ones."""
    entrant = start(name, job, folder, precision)
    take_first_steps(entrant)
    return entrant


def compare(
    model: str,
    batch: int,
    names: list[str],
    threads: int = 2,
    precision: str = "float32",
    rounds: int = 7,
    warmup: int = 2,
    size: int | None = None,
    warm_caches: bool = False,
    turn_seconds: float = TURN_SECONDS,
) -> dict[str, Any]:
    """Run one comparison; returns what was measured, JSON-compatible.

    Args:
        model: a name out of ``WORKLOADS``.
        batch: samples in a step.
        names: contenders, out of ``KINDS``, with ``+pages`` for an allocator that keeps pages.
        threads: of each contender.
        precision: ``float32`` or ``bfloat16``.
        rounds: turns of each contender that count.
        warmup: turns before them, beside the first three steps.
        size: of an image or of a sequence; None is the workload's own.
        warm_caches: let each contender compile once beforehand, so that the first step finds its caches.
        turn_seconds: how long a turn is at the least.
    """
    names = [REFERENCE, *(name for name in names if name != REFERENCE)]
    names = [name for name in names if KINDS[name.removesuffix(PAGES)].images in (None, WORKLOADS[model].images)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {**prepare(folder, model, batch, size), "threads": threads}
        entrants: list[Entrant] = []
        try:
            for name in names:
                if warm_caches:
                    enter(name, job, folder, precision).give_up("")
                entrants.append(_admitted(name, job, folder, precision, entrants))
                print(f"  {name}: {entrants[-1].row.get('refused', 'ready')}", file=sys.stderr, flush=True)
            take_turns(entrants, rounds, warmup, turn_seconds)
        finally:
            for entrant in entrants:
                if entrant.contender is not None:
                    entrant.contender.kill()
    return described(entrants, model, batch, size, precision, threads, rounds) | {"warm_caches": warm_caches}


def described(
    entrants: list[Entrant], model: str, batch: int, size: int | None, precision: str, threads: int, rounds: int
) -> dict[str, Any]:
    """What was measured, where and when, JSON-compatible."""
    return {
        "date": datetime.date.today().isoformat(),
        "model": model,
        "batch": batch,
        "size": size or WORKLOADS[model].size,
        "precision": precision,
        "threads": threads,
        "rounds": rounds,
        "installed_kernels": _kernels_are_installed(),
        "optimizer": dict(WORKLOADS[model].optimizer),
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count(), "processor": _processor()},
        **installation.described(),
        "contenders": [_finished_row(entrant, batch) for entrant in entrants],
    }


def _kernels_are_installed() -> bool:
    """Whether the installation has built burnish's kernels for the PyTorch engine: else its first step waits for them."""
    return kernels.find_installed(kernels.sources()["elementwise"]) is not None


def _admitted(name: str, job: Mapping[str, Any], folder: Path, precision: str, entrants: list[Entrant]) -> Entrant:
    """Enter a contender and compare its first losses; refuse it where memory for all would not do."""
    if refusal := no_memory_beside(entrants):
        entrant = Entrant(name, {"name": name, "title": KINDS[name.removesuffix(PAGES)].title})
        entrant.give_up(refusal)
        return entrant
    entrant = enter(name, job, folder, precision)
    check_losses(entrant, entrants[0] if entrants else entrant, TOLERANCES[precision])
    return entrant


def no_memory_beside(entrants: list[Entrant]) -> str | None:
    """Say so where another contender as large as the largest so far would not fit into memory; None where it would."""
    peak = 0
    for other in entrants:
        if other.contender is not None:
            try:
                peak = max(peak, other.contender.memory())
            except ContenderError as error:
                other.give_up(str(error))
    return no_memory_for(peak)


def no_memory_for(peak: int) -> str | None:
    """Say so where memory is not free for a contender with this peak, in bytes, and some more; None where it is."""
    available = _available_memory()
    if available is None or available >= HEADROOM * peak:
        return None
    return f"{available / 1e9:.1f} GB are free, too little beside the others: ask for fewer at a time (--peers)"


def check_losses(entrant: Entrant, reference: Entrant, tolerance: float) -> None:
    """Let a contender whose first losses are not the reference's take no further part."""
    if entrant.contender is None:
        return
    if reference.contender is None:
        entrant.give_up(f"there are no losses to compare with: {REFERENCE} failed")
    elif wrong := disagreement(entrant.row["losses"], reference.row["losses"], tolerance):
        entrant.give_up(f"{wrong}: {DISAGREES}")


def take_turns(entrants: list[Entrant], rounds: int, warmup: int, turn_seconds: float) -> None:
    """Run the interleaved rounds, then stop the contenders and note their peak memory; steps before each turn wake them."""
    for number in range(warmup + rounds):
        take_round(entrants, turn_seconds, min(WAKING_SECONDS, turn_seconds), counts=number >= warmup)
    finish(entrants)


def take_round(entrants: list[Entrant], turn_seconds: float, waking_seconds: float | None, counts: bool = True) -> None:
    """Give each contender a turn.

    Args:
        entrants: those that take part and those that do not.
        turn_seconds: how long a turn is at the least.
        waking_seconds: how long steps go on beforehand that are not timed, one at the least; None for none, where the first
            steps of a turn need not count like the others.
        counts: whether it is written down.
    """
    for entrant in entrants:
        if entrant.contender is None:
            continue
        time.sleep(REST)
        try:
            if waking_seconds is not None:
                entrant.contender.turn(waking_seconds)
            seconds, processor_seconds = entrant.contender.turn(turn_seconds)
        except ContenderError as error:
            entrant.give_up(str(error))
            continue
        if counts:
            entrant.turns.append(sum(seconds) / len(seconds))
            entrant.processor_turns.append(processor_seconds)
            entrant.steps += seconds


def finish(entrants: list[Entrant]) -> None:
    """Stop the contenders, and note their peak memory."""
    for entrant in entrants:
        if entrant.contender is not None:
            try:
                entrant.row["peak_bytes"] = entrant.contender.finish()["peak_bytes"]
            except ContenderError as error:
                entrant.give_up(str(error))


def _finished_row(entrant: Entrant, batch: int) -> dict[str, Any]:
    """The row of a contender, with its statistics where its times count."""
    row = entrant.row
    if "refused" in row:
        return {name: row[name] for name in ("name", "title", "refused")}
    median = statistics.median(entrant.turns)
    return row | {
        "median_seconds": median,
        "second_least_seconds": second_least(entrant.steps),
        "minimum_seconds": min(entrant.turns),
        "maximum_seconds": max(entrant.turns),
        "seconds": entrant.turns,
        "processor_turns": entrant.processor_turns,
        "samples_per_second": batch / median,
    }


def second_least(seconds: list[float]) -> float:
    """The least but one, which a step that was timed wrongly does not touch; of a single one, itself."""
    return sorted(seconds)[min(1, len(seconds) - 1)]


def _available_memory() -> int | None:
    """Free memory in bytes; None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _processor() -> str:
    """The processor's name, and its widest vector instructions where the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    told = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return f"{name} ({', '.join(told)})" if told else name


def wanted_names(peers: str, engines: str) -> list[str]:
    """The contenders that the options ask for.

    Raises:
        ValueError: there is none of this name.
    """
    chosen = [f"burnish-{engine}" for engine in engines.split(",") if engine]
    if peers == "all":
        chosen += [name for name in ALL if name not in ENGINES]
    elif peers != "none":
        chosen += [name for name in peers.split(",") if name]
    unknown = [name for name in chosen if name.removesuffix(PAGES) not in KINDS]
    if unknown:
        raise ValueError(f"there is no contender '{unknown[0]}': choose of {', '.join(KINDS)}, with {PAGES} behind them")
    return list(dict.fromkeys(chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(WORKLOADS), default="mlp")
    parser.add_argument("--batch", type=int, nargs="+", help="one comparison for each; default: the model's own")
    parser.add_argument("--size", type=int, help="height and width of images, tokens of a sequence, or samples of audio")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=tuple(TOLERANCES), nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--peers", default="all", help=f"all, none, or names with commas between: {', '.join(ALL)}")
    parser.add_argument("--engines", default="onnxruntime,torch", help="burnish's engines, with commas between")
    parser.add_argument("--warm-caches", action="store_true", help="compile once beforehand: the first step finds its caches")
    parser.add_argument(
        "--save", action="store_true", help="write the result and the page of all comparisons to benchmarks/results/"
    )
    parser.add_argument("--install", action="store_true", help="install the peers into environments of their own, and stop")
    parser.add_argument("--table", action="store_true", help="write benchmarks/results/comparison.md from the results, and stop")
    installation.add_options(parser)
    arguments = parser.parse_args()
    if arguments.install:
        for name, outcome in environments.install().items():
            print(f"{name}: {outcome}")
        return
    if arguments.table:
        comparison_table.write()
        return
    try:
        names = wanted_names(arguments.peers, arguments.engines)
    except ValueError as error:
        parser.error(str(error))
    installation.enter(parser, arguments)
    failed = False
    for precision in arguments.precision:
        for batch in arguments.batch or [WORKLOADS[arguments.model].batch]:
            case = compare(
                arguments.model,
                batch,
                names,
                arguments.threads,
                precision,
                arguments.rounds,
                arguments.warmup,
                arguments.size,
                arguments.warm_caches,
            )
            print(comparison_table.case_text(case), flush=True)
            if arguments.save:
                comparison_table.save(case)
            ours = [row for row in case["contenders"] if row["name"] in ENGINES]
            failed |= any(DISAGREES in row.get("refused", "") for row in ours)
            failed |= bool(ours) and all("refused" in row for row in ours)
    if arguments.save:
        comparison_table.write()
    if failed:
        raise SystemExit("no time of burnish's counts, or its losses are not PyTorch's: see above")


if __name__ == "__main__":
    main()
