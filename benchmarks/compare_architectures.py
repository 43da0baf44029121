"""The architectures that people train, a step of each in PyTorch eager and on burnish's engines, on one thread and on two.

    python benchmarks/compare_architectures.py --save         all, in about twelve minutes; writes the result and the table
    python benchmarks/compare_architectures.py bert unet      these
    python benchmarks/compare_architectures.py --table        write the table from the latest result

Contenders are those of ``compare.py``: a process each, rounds interleaved, and a time counts only where the losses of the first
three steps agree with those of PyTorch eager. A ratio is the median of those of the rounds. burnish is
installed as for ``compare.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import architecture_table
import compare
import installation
from architectures.sizes import SIZED
from workloads import ARCHITECTURE, prepare

CONTENDERS = (compare.REFERENCE, "burnish-torch", "burnish-onnxruntime")
PRECISION = "float32"
TURN_SECONDS = 0.15


def measured(
    name: str, threads: list[int], rounds: int, warmup: int = 1, turn_seconds: float = TURN_SECONDS
) -> list[dict[str, Any]]:
    """Run an architecture's comparisons, one for each number of threads; returns what was measured, JSON-compatible."""
    model, batch = ARCHITECTURE + name, SIZED[name][1]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        job = prepare(folder, model, batch)
        cases = []
        for count in threads:
            # They import what they need at the same time, and do the rest one after the other.
            entrants = [compare.start(contender, {**job, "threads": count}, folder, PRECISION) for contender in CONTENDERS]
            try:
                for entrant in entrants:
                    compare.take_first_steps(entrant)
                    compare.check_losses(entrant, entrants[0], compare.TOLERANCES[PRECISION])
                compare.take_turns(entrants, rounds, warmup, turn_seconds)
            finally:
                for entrant in entrants:
                    if entrant.contender is not None:
                        entrant.contender.kill()
            cases.append(compare.described(entrants, model, batch, None, PRECISION, count, rounds))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SIZED)}; default: all")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clock", choices=tuple(architecture_table.CLOCKS), default="wall", help="what is printed; cpu: processor time"
    )
    parser.add_argument("--save", action="store_true", help="write the result and its table to benchmarks/results/")
    parser.add_argument(
        "--table",
        action="store_true",
        help="write the table of benchmarks/results/performance.md from the latest result, and stop",
    )
    installation.add_options(parser)
    arguments = parser.parse_args()
    if arguments.table:
        architecture_table.write()
        return
    if unknown := [name for name in arguments.names if name not in SIZED]:
        parser.error(f"there is no architecture '{unknown[0]}': choose of {', '.join(SIZED)}")
    installation.enter(parser, arguments)
    cases: list[dict[str, Any]] = []
    for name in arguments.names or SIZED:
        cases += measured(name, arguments.threads, arguments.rounds)
        for case in cases[-len(arguments.threads) :]:
            print(architecture_table.line(case, arguments.clock), flush=True)
    if arguments.save:
        print(f"saved: {architecture_table.save(cases)}", file=sys.stderr)
        architecture_table.write()
    refused = [line for case in cases for line in architecture_table.refusals(case)]
    if refused:
        raise SystemExit("\n".join(refused))


if __name__ == "__main__":
    main()
