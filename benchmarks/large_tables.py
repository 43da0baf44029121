"""Steps over embedding tables in mapped files, up to those larger than half of memory, and checkpoints of what changed.

    python benchmarks/large_tables.py                                    640 MB, 2.6 GB and 12.8 GB, on both engines
    python benchmarks/large_tables.py --rows 10000000 --engines torch --folder /fast/disk --checkpoints

One table of 16 columns, updated by row-wise Adagrad, is looked up 128 times a step, at rows drawn evenly, which hardly come
again: each step has the system bring pages. Each case is a process of its own, on one thread. "anonymous" is how much memory the
process holds that is not of files. ``--checkpoints`` takes 1,000 steps, then writes a checkpoint by the journal and a whole one,
and, after 1,000 more, opens the run again as after a kill.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

WIDTH, LOOKUPS, HIDDEN = 16, 128, 32
WARM_UP, STEPS, CHANGED = 20, 200, 1000


def write_model(path: Path, rows: int) -> None:
    """Write a small network over a table of zeros, in a file without blocks."""
    size = 4 * rows * WIDTH
    with path.with_name("table.data").open("wb") as file:
        file.truncate(size)
    table = onnx.TensorProto(name="table", data_type=onnx.TensorProto.FLOAT, dims=(rows, WIDTH))
    table.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "table.data"), ("offset", "0"), ("length", str(size))):
        table.external_data.add(key=key, value=value)
    rng = np.random.default_rng(0)
    first = rng.standard_normal((WIDTH, HIDDEN)).astype(np.float32) / 4
    second = rng.standard_normal((HIDDEN, 2)).astype(np.float32) / 4
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["rows"]),
        helper.make_node("MatMul", ["rows", "first"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "second"], ["logits"]),
    ]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.INT64, ["batch"])]
    outputs = [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 2])]
    initializers = [table, numpy_helper.from_array(first, "first"), numpy_helper.from_array(second, "second")]
    graph = helper.make_graph(nodes, "lookups", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path.write_bytes(model.SerializeToString())


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")))


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def measure(folder: Path, rows: int, engine: str, checkpoints: bool) -> dict[str, float]:
    import burnish
    from burnish import optim

    adagrad = optim.rowwise_adagrad(lr=0.1)
    program = burnish.compile(folder / "model.onnx", optimizer=adagrad, metrics=[], sparse="auto")
    rng = np.random.default_rng(1)

    def batch() -> dict[str, np.ndarray]:
        return {"x": rng.integers(0, rows, LOOKUPS), "labels": rng.integers(0, 2, LOOKUPS)}

    def timed(figure: str, run) -> None:
        begin = time.perf_counter()
        run()
        figures[figure] = time.perf_counter() - begin

    figures: dict[str, float] = {}
    before = anonymous_bytes()
    session = burnish.Session(program, engine=engine, threads=1, tables=folder / "tables")
    timed("open_s", lambda: session.step(batch()))
    times = []
    for number in range(WARM_UP + STEPS):
        drawn = batch()
        begin = time.perf_counter()
        session.step(drawn)
        if number >= WARM_UP:
            times.append(time.perf_counter() - begin)
    figures |= {"median_ms": 1e3 * float(np.median(times)), "shortest_ms": 1e3 * min(times)}
    figures["anonymous_mb"] = (anonymous_bytes() - before) / 1e6
    if checkpoints:
        latest = folder / "checkpoints" / "latest.safetensors"
        timed("base_s", lambda: session.save_checkpoint(latest, journal=True))
        base_bytes = size_of(latest.parent)
        for _ in range(CHANGED):
            session.step(batch())
        timed("journal_s", lambda: session.save_checkpoint(latest, journal=True))
        figures["journal_mb"] = (size_of(latest.parent) - base_bytes) / 1e6
        timed("whole_s", lambda: session.save_checkpoint(folder / "whole.safetensors"))
        figures["whole_mb"] = (folder / "whole.safetensors").stat().st_size / 1e6
        for _ in range(CHANGED):
            session.step(batch())
        session._tables._mapped._lock.close()  # as the system does when a process is killed
        timed("resume_s", lambda: burnish.Session(program, engine=engine, tables=folder / "tables").restore(latest))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000_000, 40_000_000, 200_000_000])
    parser.add_argument("--engines", nargs="+", choices=("onnxruntime", "torch"), default=["onnxruntime", "torch"])
    parser.add_argument("--folder", help="where files are written; room for the tables, with --checkpoints for three times them")
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.rows[0], given.engines[0], given.checkpoints)))
        return
    for engine in given.engines:
        for rows in given.rows:
            with tempfile.TemporaryDirectory(dir=given.folder, prefix="burnish-tables-") as name:
                write_model(Path(name, "model.onnx"), rows)
                command = [sys.executable, __file__, "--measure", name, "--rows", str(rows), "--engines", engine]
                command += ["--checkpoints"] if given.checkpoints else []
                output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                figures = json.loads(output.splitlines()[-1])
            text = ", ".join(f"{figure} {value:.3f}" for figure, value in figures.items())
            print(f"{engine}, {rows:,} rows, {4 * rows * (WIDTH + 1) / 1e9:.1f} GB: {text}", flush=True)


if __name__ == "__main__":
    main()
