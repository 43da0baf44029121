"""The time and memory of a step over an embedding table, from 10^4 to 10^7 rows, beside PyTorch with gradients of both kinds.

One table of 16 columns is looked up 128 times a step, with indices of a Zipf law, and a small network reads the rows. Each
contender runs in a process of its own, on one thread::

    python benchmarks/embeddings.py --rows 10000 200000 1000000 --steps 200
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

WIDTH, LOOKUPS, HIDDEN = 16, 128, 32
CONTENDERS = (
    "torch dense",
    "torch sparse",
    "onnxruntime dense",
    "onnxruntime sparse",
    "engine torch dense",
    "engine torch sparse",
)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "sparse_adam")


def batch_of(rows: int, seed: int) -> dict[str, np.ndarray]:
    """One lookup per sample; frequent rows stand anywhere in the table."""
    rng = np.random.default_rng(seed)
    ranks = rng.zipf(1.2, LOOKUPS).astype(np.int64)
    x = (ranks * 2654435761) % rows
    return {"x": x, "labels": rng.integers(0, 2, LOOKUPS)}


def burnish_step(rows: int, optimizer: str, engine: str, sparse: bool) -> Callable[[dict[str, np.ndarray]], object]:
    import onnx
    from onnx import helper, numpy_helper

    import burnish

    rng = np.random.default_rng(0)
    values = {
        "table": np.full((rows, WIDTH), 0.01, np.float32),
        "first": rng.standard_normal((WIDTH, HIDDEN)).astype(np.float32) / 4,
        "second": rng.standard_normal((HIDDEN, 2)).astype(np.float32) / 4,
    }
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["rows"]),
        helper.make_node("MatMul", ["rows", "first"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "second"], ["logits"]),
    ]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.INT64, ["batch"])]
    outputs = [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 2])]
    initializers = [numpy_helper.from_array(array, name) for name, array in values.items()]
    graph = helper.make_graph(nodes, "lookups", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    program = burnish.compile(model, optimizer=optimizer, metrics=[], sparse=["table"] if sparse else None)
    return burnish.Session(program, engine=engine, threads=1).step


def torch_step(rows: int, optimizer: str, sparse: bool) -> Callable[[dict[str, np.ndarray]], object]:
    import torch

    torch.set_num_threads(1)
    table = torch.nn.Embedding(rows, WIDTH, sparse=sparse)
    network = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN, bias=False), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 2, bias=False)
    )
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": torch.optim.Adagrad}
    kinds["sparse_adam"] = torch.optim.SparseAdam if sparse else torch.optim.Adam
    of_table = kinds[optimizer](table.parameters(), lr=1e-3)
    of_network = (torch.optim.Adam if optimizer == "sparse_adam" else kinds[optimizer])(network.parameters(), lr=1e-3)

    def step(batch: dict[str, np.ndarray]) -> float:
        of_table.zero_grad()
        of_network.zero_grad()
        logits = network(table(torch.from_numpy(batch["x"])))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch["labels"]))
        loss.backward()
        of_table.step()
        of_network.step()
        return loss.item()

    return step


def measured(contender: str, rows: int, optimizer: str, steps: int) -> dict[str, float]:
    """The median and the shortest step in milliseconds, and the growth of memory during the steps in MiB."""
    sparse = contender.endswith("sparse")
    if contender.startswith("torch"):
        step = torch_step(rows, optimizer, sparse)
    else:
        step = burnish_step(rows, optimizer, contender.split()[-2], sparse)
    batches = [batch_of(rows, seed) for seed in range(20)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for batch in batches[:10]:
        step(batch)
    times = []
    for number in range(steps):
        start = time.perf_counter()
        step(batches[number % len(batches)])
        times.append(time.perf_counter() - start)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"median_ms": 1e3 * float(np.median(times)), "shortest_ms": 1e3 * min(times), "grown_mib": grown / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 200_000, 1_000_000])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["sgd", "rowwise_adagrad"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure, arguments.rows[0], arguments.optimizers[0], arguments.steps)))
        return
    print(f"{'optimizer':16} {'contender':20} {'rows':>10} {'median ms':>10} {'shortest ms':>12} {'grown MiB':>10}")
    for optimizer in arguments.optimizers:
        for contender in arguments.contenders:
            for rows in arguments.rows:
                options = ["--rows", str(rows), "--optimizers", optimizer, "--steps", str(arguments.steps)]
                command = [sys.executable, __file__, "--measure", contender, *options]
                result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
                print(
                    f"{optimizer:16} {contender:20} {rows:10} {result['median_ms']:10.3f} {result['shortest_ms']:12.3f} "
                    f"{result['grown_mib']:10.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
