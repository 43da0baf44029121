"""Seconds that each stage takes as models grow: the cost is to grow with the nodes, inputs and outputs, and no faster.

    python benchmarks/scaling.py                                             every shape, at a few hundred and twice that
    python benchmarks/scaling.py --shape dense-layers --size 500 1000 2000 --engines onnxruntime torch

Every size of every shape is a process of its own. The last column is how often each stage took as long as at the size before,
over how often the model is as large: 1 is linear.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from scaling_models import SHAPES, batch_of

ENGINES = ("onnxruntime", "torch", "reference")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LIMIT_SECONDS = 600
T = TypeVar("T")


def measure(shape: str, size: int, engines: list[str], clock: Callable[[], float]) -> dict[str, float]:
    """Return the seconds of every stage, in order."""
    import burnish
    import burnish.losses
    import burnish.optim

    proto = SHAPES[shape](size)
    batch = batch_of(proto)
    content = proto.SerializeToString()
    seconds: dict[str, float] = {}

    def timed(stage: str, run: Callable[[], T]) -> T:
        begin = clock()
        result = run()
        seconds[stage] = clock() - begin
        return result

    timed("load", lambda: burnish.load(content))
    timed("grad", lambda: burnish.grad(content, wrt=["scale" if shape == "branches" else "x"], of="y"))
    program = timed(
        "compile",
        lambda: burnish.compile(content, loss="mse", outputs="y", optimizer=burnish.optim.sgd(lr=0.01, momentum=0.9), metrics=()),
    )
    with tempfile.TemporaryDirectory() as folder:
        timed("save", lambda: program.save(Path(folder) / "program"))
        timed("read", lambda: burnish.Program.load(Path(folder) / "program"))
        timed("to_onnx", program.to_onnx)
        for engine in engines:
            session = timed(f"open {engine}", lambda engine=engine: burnish.Session(program, engine=engine))
            timed(f"first step {engine}", lambda session=session: session.step(batch))
            timed(f"second step {engine}", lambda session=session: session.step(batch))
            timed(f"predict {engine}", lambda session=session: session.predict(batch))
        if engines:
            timed("export", lambda: session.export(Path(folder) / "tuned.onnx"))
    seconds["peak GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return seconds


def _in_a_process(shape: str, size: int, arguments: argparse.Namespace) -> dict[str, float] | str:
    command = [sys.executable, __file__, "--measure", "--shape", shape, "--size", str(size)]
    command += ["--clock", arguments.clock, "--engines", *arguments.engines]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT_SECONDS} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]
    return json.loads(done.stdout.splitlines()[-1])


def table(shape: str, results: dict[int, dict[str, float] | str]) -> str:
    """Return a Markdown table: stages by sizes, and the growth over the last two."""
    text = io.StringIO()
    measured: dict[int, dict[str, Any]] = {size: {} if isinstance(one, str) else one for size, one in results.items()}
    print(f"| {shape} | {' | '.join(f'{size:,}' for size in results)} | growth |", file=text)
    print(f"|---|{'---|' * (len(results) + 1)}", file=text)
    stages = dict.fromkeys(stage for one in measured.values() for stage in one)
    for stage in stages:
        cells = [f"{one[stage]:.2f}" if stage in one else "" for one in measured.values()]
        growth = ""
        if len(measured) > 1:
            (before, earlier), (size, latest) = list(measured.items())[-2:]
            if stage in earlier and stage in latest and earlier[stage] > 0:
                growth = f"{latest[stage] / earlier[stage] / (size / before):.2f}"
        print(f"| {stage} | {' | '.join(cells)} | {growth} |", file=text)
    for size, failure in results.items():
        if isinstance(failure, str):
            print(f"\n{size:,}: {failure}", file=text)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--size", nargs="+", type=int, default=[250, 500])
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=["onnxruntime"])
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: seconds of the processor, on a busy machine")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.shape[0], arguments.size[0], arguments.engines, CLOCKS[arguments.clock])))
        return
    for shape in arguments.shape:
        results = {size: _in_a_process(shape, size, arguments) for size in arguments.size}
        print(table(shape, results), flush=True)


if __name__ == "__main__":
    main()
