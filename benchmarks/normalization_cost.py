"""Batch normalization + addition + ReLU, forward and backward, on stock onnxruntime beside PyTorch eager.

    python benchmarks/normalization_cost.py --batch 16 --save
    python benchmarks/normalization_cost.py --profile         what each operator of burnish's graph takes

On ResNet-50's shapes, all contenders in one process, rounds interleaved: burnish's graph, the same with the fastest lowering
known (statistics and application by onnxruntime's operator on x as it is, gradient without centering) to show what accuracy
costs, and PyTorch in both memory formats.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch.nn import functional

import burnish
from burnish.graph import Tensor
from burnish.operators import Operation, registry
from burnish.operators.normalization.batch import BATCH_NORM_TRAINING

# Idle threads of the contender before wait actively for a while, and would take the cores from the next one.
REST = 0.05
RESULTS = Path(__file__).parent / "results"
# So few channels of 28 x 28 that every tensor stays in a core's cache: what operators cost when memory costs nothing.
CACHED_CHANNELS = 16
# Channels, height and width, and how many blocks of ResNet-50 end in a batch normalization, addition and ReLU of that shape.
SHAPES = ((256, 56, 3), (512, 28, 4), (1024, 14, 6), (2048, 7, 3))


def model_of(channels: int, size: int) -> onnx.ModelProto:
    vector = f"float[{channels}]"
    image = f"float[batch, {channels}, {size}, {size}]"
    return onnx.parser.parse_model(f"""
<ir_version: 10, opset_import: ["": 18]>
block ({image} x, {image} shortcut, {vector} scale, {vector} bias, {vector} mean, {vector} variance)
    => ({image} y, {vector} next_mean, {vector} next_variance) {{
    normalized, next_mean, next_variance = BatchNormalization <training_mode = 1> (x, scale, bias, mean, variance)
    total = Add (normalized, shortcut)
    y = Relu (total)
}}""")


def fast_training(op: Operation) -> tuple[Tensor, ...]:
    """x goes in as it is, and comes out as if it were centered around 0: one pass less."""
    x, scale, bias = (op.required(index) for index in range(3))
    builder = op.builder
    zeros = scale - scale
    epsilon = op.attribute("epsilon")
    y, mean, variance = builder.op(
        "BatchNormalization", x, scale, bias, zeros, zeros + 1, outputs=3, like=x, epsilon=epsilon, momentum=0.0, training_mode=1
    )
    for statistic in (mean, variance):
        statistic.value.type, statistic.value.shape = scale.value.type, scale.value.shape
    return y, mean, builder.op("Reciprocal", builder.op("Sqrt", variance + epsilon)), variance, x, mean


@contextlib.contextmanager
def fastest_lowering() -> Iterator[None]:
    """Within, batch normalization is lowered for speed alone."""
    records = registry.records()
    saved = records[BATCH_NORM_TRAINING.key]
    records[BATCH_NORM_TRAINING.key] = [replace(BATCH_NORM_TRAINING, lowering=fast_training)]
    try:
        yield
    finally:
        records[BATCH_NORM_TRAINING.key] = saved


def on_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray], threads: int) -> Callable[[], None]:
    """Return one forward and backward; outputs go into buffers of their own, as a step's do."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return bound(open_session(model, options), feeds)


def open_session(model: onnx.ModelProto, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    gradient = burnish.grad(model, ["x", "shortcut", "scale", "bias"], of="y")
    return onnxruntime.InferenceSession(ir.to_proto(gradient).SerializeToString(), options)


def bound(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> Callable[[], None]:
    binding = session.io_binding()
    inputs = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    outputs = binding.get_outputs()
    for output, value in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_ortvalue_output(output.name, value)
    return lambda: session.run_with_iobinding(binding)


def on_pytorch(feeds: dict[str, np.ndarray], memory_format: torch.memory_format) -> Callable[[], None]:
    def image(name: str) -> torch.Tensor:
        return torch.from_numpy(feeds[name]).contiguous(memory_format=memory_format)

    x, shortcut = (image(name).requires_grad_() for name in ("x", "shortcut"))
    scale, bias = (torch.from_numpy(feeds[name]).clone().requires_grad_() for name in ("scale", "bias"))
    mean, variance = (torch.from_numpy(feeds[name]).clone() for name in ("mean", "variance"))
    cotangent = image("cotangent:y")

    def run() -> None:
        for leaf in (x, shortcut, scale, bias):
            leaf.grad = None
        y = functional.relu(functional.batch_norm(x, mean, variance, scale, bias, training=True) + shortcut)
        y.backward(cotangent)

    return run


def feeds_of(batch: int, channels: int, size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shape = (batch, channels, size, size)
    feeds = {name: random.standard_normal(shape, dtype=np.float32) for name in ("x", "shortcut", "cotangent:y")}
    feeds |= {name: np.ones(channels, np.float32) for name in ("scale", "variance")}
    return feeds | {name: np.zeros(channels, np.float32) for name in ("bias", "mean")}


def profile(batch: int, channels: int, size: int, rounds: int, threads: int) -> None:
    """Print the median time of every operator that reads or writes a whole tensor, and the sum over all operators."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/profile"
        session = open_session(model_of(channels, size), options)
        run = bound(session, feeds_of(batch, channels, size))
        for _ in range(rounds):
            run()
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            node = event["name"], event["args"]["op_name"]
            times.setdefault(node, []).append(event["dur"])
            shapes = [next(iter(item.values())) for item in event["args"]["input_type_shape"]]
            sizes[node] = max((int(np.prod(shape)) for shape in shapes), default=0)
    medians = {node: statistics.median(durations) for node, durations in times.items()}
    print(f"{batch} x {channels} x {size} x {size}: {sum(medians.values()) / 1e3:.2f} ms in {len(medians)} operators, of these")
    for node, microseconds in medians.items():
        if sizes[node] == batch * channels * size * size:
            print(f"  {node[1]:20} {microseconds / 1e3:.3f} ms")


def measure(batch: int, channels: int, size: int, rounds: int, threads: int) -> dict[str, Any]:
    feeds = feeds_of(batch, channels, size)
    model = model_of(channels, size)
    with fastest_lowering():
        fastest = on_onnxruntime(model, feeds, threads)
    contenders = {
        "burnish": on_onnxruntime(model, feeds, threads),
        "burnish, fastest lowering": fastest,
        "PyTorch, NCHW": on_pytorch(feeds, torch.contiguous_format),
        "PyTorch, channels_last": on_pytorch(feeds, torch.channels_last),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds + 2):
        for name, run in contenders.items():
            time.sleep(REST)
            started = time.perf_counter()
            run()
            if index >= 2:
                seconds[name].append(time.perf_counter() - started)
    return {
        "shape": [batch, channels, size, size],
        "milliseconds": {name: round(statistics.median(times) * 1e3, 2) for name, times in seconds.items()},
        "minimum": {name: round(min(times) * 1e3, 2) for name, times in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--profile", action="store_true", help="print the operators' times instead of comparing")
    arguments = parser.parse_args()
    if arguments.profile:
        for channels, size in [*((channels, size) for channels, size, _ in SHAPES), (CACHED_CHANNELS, 28)]:
            profile(arguments.batch, channels, size, arguments.rounds, arguments.threads)
        return
    torch.set_num_threads(arguments.threads)
    rows = []
    total: dict[str, float] = {}
    for channels, size, blocks in SHAPES:
        row = measure(arguments.batch, channels, size, arguments.rounds, arguments.threads)
        times = row["milliseconds"]
        best = min(times["PyTorch, NCHW"], times["PyTorch, channels_last"])
        row["speed_up_over_best_pytorch"] = round(best / times["burnish"], 2)
        row["cost_of_accuracy"] = round(times["burnish"] / times["burnish, fastest lowering"] - 1, 3)
        rows.append(row)
        total = {name: total.get(name, 0.0) + blocks * milliseconds for name, milliseconds in times.items()}
        print(row, flush=True)
    network = {
        "milliseconds": {name: round(milliseconds, 1) for name, milliseconds in total.items()},
        "speed_up_over_best_pytorch": round(min(total["PyTorch, NCHW"], total["PyTorch, channels_last"]) / total["burnish"], 2),
        "cost_of_accuracy": round(total["burnish"] / total["burnish, fastest lowering"] - 1, 3),
    }
    print("all 16 blocks of ResNet-50:", network)
    if arguments.save:
        date = datetime.date.today().isoformat()
        result = {
            "date": date,
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "versions": {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__},
            "rows": rows,
            "all_blocks_of_resnet50": network,
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{date}-normalization-cost.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
