"""The training step with and without recomputation of activations: time, memory, and whether every bit is the same.

    python benchmarks/recompute.py --model mixer --recompute layers

The same model and batch in processes of their own, rounds interleaved. Memory is what steps add, at its peak, to the resident
memory of a process that has loaded the graph. Gradients, and the state after all steps, must agree in every bit first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

import burnish
from burnish.graph import Builder, Tensor
from burnish.models import residual_network
from contenders import Contender

RESULTS = Path(__file__).parent / "results"


def mixer(depth: int = 24, width: int = 192, expansion: int = 4) -> ir.Model:
    """The feed-forward half of a transformer, deep: layer normalization, two dense layers with GELU between, a shortcut.

    Pre-normalization as in Xiong et al. 2020; the input ``x`` is [batch, width], the output ``logits`` [batch, 10].
    """
    random = np.random.default_rng(0)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", width]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20}, name="mixer")
    builder = Builder(graph)

    def weight(name: str, array: np.ndarray) -> Tensor:
        tensor = ir.tensor(array.astype(np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        graph.register_initializer(value)
        return builder.tensor(value)

    def dense(name: str, y: Tensor, rows: int, columns: int) -> Tensor:
        drawn = random.normal(0, rows**-0.5, (rows, columns))
        return builder.op("MatMul", y, weight(f"{name}.weight", drawn)) + weight(f"{name}.bias", np.zeros(columns))

    y = builder.tensor(x)
    for layer in range(depth):
        name = f"block{layer}"
        scale, bias = weight(f"{name}.norm.scale", np.ones(width)), weight(f"{name}.norm.bias", np.zeros(width))
        z = builder.op("LayerNormalization", y, scale, bias, axis=-1, epsilon=1e-5)
        z = builder.op("Gelu", dense(f"{name}.expand", z, width, expansion * width))
        y = y + dense(f"{name}.project", z, expansion * width, width)
    logits = dense("head", y, width, 10)
    logits.value.name = "logits"
    graph.outputs.append(logits.value)
    return ir.Model(graph, ir_version=9)


MODELS = {
    "mixer": mixer,
    "resnet56": lambda: residual_network(input_shape=(3, 32, 32), width=16, blocks=(9, 9, 9)),
}


def prepare(folder: Path, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compile both programs; returns the jobs of the contenders, and what was planned for each."""
    model = MODELS[arguments.model]()
    random = np.random.default_rng(0)
    shape = [dimension if isinstance(dimension, int) else arguments.batch for dimension in model.graph.inputs[0].shape.dims]
    np.savez(folder / "data.npz", x=random.standard_normal(shape, np.float32), labels=random.integers(0, 10, arguments.batch))
    jobs, planned = [], []
    for index, requested in enumerate((None, arguments.recompute)):
        program = burnish.compile(model, optimizer=burnish.optim.sgd(lr=0.001, momentum=0.9), metrics=(), recompute=requested)
        program.save(folder / f"program{index}")
        peak = program.planned_peak(arguments.batch)
        planned.append({"planned_bytes": peak.bytes - peak.inputs, "nodes": len(program.step.graph)})
        paths = {"program": str(folder / f"program{index}"), "digests": str(folder / f"digests{index}.json")}
        jobs.append({**paths, "data": str(folder / "data.npz"), "threads": arguments.threads})
    return jobs, planned


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the interleaved rounds and return what was measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs, planned = prepare(folder, arguments)
        names = ("kept", f"recompute={arguments.recompute}")
        contenders = [Contender.start(n, "recompute_contender.py", job) for n, job in zip(names, jobs, strict=True)]
        for contender in contenders:
            contender.open()
        for _ in range(arguments.warmup + arguments.rounds):
            for contender in contenders:
                contender.step()
        finished = [contender.finish() for contender in contenders]
        digests = [json.loads(Path(job["digests"]).read_text()) for job in jobs]
    if digests[0] != digests[1] or contenders[0].losses != contenders[1].losses:
        raise SystemExit(f"gradients, state or losses differ: no figure counts\n{digests[0]}\n{digests[1]}")
    rows = []
    for contender, finish, plan in zip(contenders, finished, planned, strict=True):
        seconds = contender.seconds[arguments.warmup :]
        rows.append(
            {
                "name": contender.name,
                "median_seconds": statistics.median(seconds),
                "minimum_seconds": min(seconds),
                "peak_bytes": finish["peak_bytes"],
                "added_by_steps_bytes": finish["peak_bytes"] - contender.opened["before_bytes"],
                **plan,
            }
        )
    kept, again = (contender.seconds[arguments.warmup :] for contender in contenders)
    return {
        "date": datetime.date.today().isoformat(),
        "model": arguments.model,
        "batch": arguments.batch,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "machine": platform.machine(),
        "versions": {"onnxruntime": onnxruntime.__version__},
        "contenders": rows,
        "same_bits": True,
        "time_ratio": statistics.median(b / a for a, b in zip(kept, again, strict=True)),
        "minimum_time_ratio": min(again) / min(kept),
        "memory_ratio": rows[1]["added_by_steps_bytes"] / rows[0]["added_by_steps_bytes"],
        "planned_memory_ratio": rows[1]["planned_bytes"] / rows[0]["planned_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="mixer")
    parser.add_argument("--recompute", default="layers")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    arguments = parser.parse_args()
    result = run(arguments)
    for row in result["contenders"]:
        print(
            f"{row['name']:<20} median {row['median_seconds']:.3f} s, minimum {row['minimum_seconds']:.3f} s, steps add "
            f"{row['added_by_steps_bytes'] / 1e6:.0f} MB, planned {row['planned_bytes'] / 1e6:.0f} MB, {row['nodes']} nodes"
        )
    print(
        f"time ratio {result['time_ratio']:.2f} (of minima {result['minimum_time_ratio']:.2f}), memory ratio "
        f"{result['memory_ratio']:.2f}, planned {result['planned_memory_ratio']:.2f}; every bit the same"
    )
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{result['date']}-recompute-{arguments.model}-{arguments.batch}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
