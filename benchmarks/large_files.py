"""Seconds and memory of what is done with a model whose weights fill gigabytes: open, step, checkpoint, restore, export.

    python benchmarks/large_files.py                                 1.2 and 2.4 GB, on both engines
    python benchmarks/large_files.py --gigabytes 0.3 --engines torch --folder /fast/disk

The model is a stack of matrix products with external data, trained by SGD without momentum on a batch of 4. Each engine and size
is a process of its own. Memory is the resident peak during a stage; what earlier stages left is part of it. "file" is how long
the disk takes to write as many bytes and flush them. ``--clock cpu`` counts processor seconds, on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
WIDTH = 4096
BATCH = 4
LAYER_BYTES = 4 * WIDTH**2
T = TypeVar("T")


def write_model(path: Path, gigabytes: float) -> None:
    """Write a stack of ``MatMul`` and ``Relu`` with its weights beside it, one layer in memory at a time."""
    rng = np.random.default_rng(0)
    layers = max(1, round(gigabytes * 1e9 / LAYER_BYTES))
    nodes, initializers = [], []
    value = "x"
    with path.with_name("weights.data").open("wb") as data:
        for index in range(layers):
            weight = onnx.TensorProto(name=f"weight.{index}", data_type=onnx.TensorProto.FLOAT, dims=(WIDTH, WIDTH))
            weight.data_location = onnx.TensorProto.EXTERNAL
            for key, entry in (("location", "weights.data"), ("offset", str(data.tell())), ("length", str(LAYER_BYTES))):
                weight.external_data.add(key=key, value=entry)
            layer = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32)
            layer *= (2 / WIDTH) ** 0.5
            data.write(layer.data)
            initializers.append(weight)
            is_last = index == layers - 1
            nodes.append(onnx.helper.make_node("MatMul", [value, weight.name], ["y" if is_last else f"product.{index}"]))
            if not is_last:
                nodes.append(onnx.helper.make_node("Relu", [f"product.{index}"], [f"active.{index}"]))
            value = f"active.{index}"
        data.flush()
        os.fsync(data.fileno())
    floats = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "stack",
        [onnx.helper.make_tensor_value_info("x", floats, ("batch", WIDTH))],
        [onnx.helper.make_tensor_value_info("y", floats, ("batch", WIDTH))],
        initializers,
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())


def peak_bytes() -> int:
    """The resident peak of this process since ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def forget_peak() -> None:
    """Let the system count the resident peak from what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(model: Path, engine: str, clock: Callable[[], float]) -> dict[str, tuple[float, float]]:
    """Return seconds and the peak in GB of each stage."""
    import burnish
    import burnish.losses
    import burnish.optim

    folder = model.parent
    figures: dict[str, tuple[float, float]] = {}

    def timed(stage: str, run: Callable[[], T]) -> T:
        forget_peak()
        begin = clock()
        result = run()
        figures[stage] = (clock() - begin, peak_bytes() / 1e9)
        return result

    def write_and_flush() -> None:
        block = memoryview(np.ones(LAYER_BYTES, np.uint8))
        with (folder / "file").open("wb") as file:
            for _ in range((folder / "weights.data").stat().st_size // LAYER_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        (folder / "file").unlink()

    rng = np.random.default_rng(1)
    batch = {name: rng.standard_normal((BATCH, WIDTH), dtype=np.float32) for name in ("x", "targets")}
    sgd = burnish.optim.sgd(lr=0.01)
    program = timed("compile", lambda: burnish.compile(model, loss="mse", optimizer=sgd, metrics=()))
    session = timed("open", lambda: burnish.Session(program, engine=engine))
    timed("first step", lambda: session.step(batch))
    timed("second step", lambda: session.step(batch))
    timed("checkpoint", lambda: session.save_checkpoint(folder / "last.safetensors"))
    timed("restore", lambda: session.restore(folder / "last.safetensors"))
    timed("export", lambda: session.export(folder / "tuned.onnx"))
    timed("file", write_and_flush)
    return figures


def in_a_process(gigabytes: float, engine: str, clock: str, folder: str | None) -> dict[str, tuple[float, float]]:
    with tempfile.TemporaryDirectory(dir=folder, prefix="burnish-large-") as place:
        model = Path(place, "model.onnx")
        write_model(model, gigabytes)
        command = [sys.executable, __file__, "--measure", str(model), "--engines", engine, "--clock", clock]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1.2, 2.4])
    parser.add_argument("--engines", nargs="+", choices=("onnxruntime", "torch"), default=["onnxruntime", "torch"])
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--folder", help="where the files are written; at least four times the model's size")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.engines[0], CLOCKS[arguments.clock])))
        return
    cases = [(gigabytes, engine) for gigabytes in arguments.gigabytes for engine in arguments.engines]
    columns = {
        (gigabytes, engine): in_a_process(gigabytes, engine, arguments.clock, arguments.folder) for gigabytes, engine in cases
    }
    print("| | " + " | ".join(f"{gigabytes:g} GB, {engine}" for gigabytes, engine in columns) + " |")
    print(f"|---|{'---|' * len(columns)}")
    for stage in next(iter(columns.values())):
        cells = (f"{figures[stage][0]:.1f} s, {figures[stage][1]:.1f} GB" for figures in columns.values())
        print(f"| {stage} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
