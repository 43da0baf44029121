"""The time and memory of a step over embedding tables, from 10^4 to 10^7 rows, beside PyTorch with gradients of both kinds.

One table of 16 columns is looked up 128 times a step, with indices of a Zipf law, and a small network reads the rows; or, with
``--model dlrm``, the 26 tables of a DLRM are, which has dense layers below and above the dot products. Each contender runs in a
process of its own, on one thread::

    python benchmarks/embeddings.py --rows 10000 200000 1000000 --steps 200
    python benchmarks/embeddings.py --model dlrm --rows 10000 100000 1000000 --save
    python benchmarks/embeddings.py --rates --save        lookups and updates of a kernel, beside the machine's random accesses

``--rows`` are those of each table: 26 of a million rows take 1.7 GB, and as much for each slot of the optimizer. ``--clock cpu``
is for a machine that others use too: it counts the processor's time.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parent.parent / "docs" / "embeddings.md"
BEGIN, END = "<!-- {}: written by benchmarks/embeddings.py --save -->", "<!-- end of {} -->"
TABLES, NUMBERS = 26, 13
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


def dlrm_batch(rows: int, samples: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    batch = {"numbers": rng.standard_normal((samples, NUMBERS)).astype(np.float32)}
    for place in range(1, TABLES + 1):
        batch[f"category_{place}"] = (rng.zipf(1.2, samples).astype(np.int64) * 2654435761) % rows
    return batch | {"targets": rng.integers(0, 2, (samples, 1)).astype(np.float32)}


def burnish_dlrm_step(rows: int, optimizer: str, engine: str, sparse: bool) -> Callable[[dict[str, np.ndarray]], object]:
    import onnx_ir

    import burnish
    from burnish.models import dlrm

    tables = [f"table_{place}" for place in range(1, TABLES + 1)] if sparse else None
    with tempfile.TemporaryDirectory() as folder:
        # As a user has it: a session takes the weights over, and the program reads them in the file where it needs them again.
        path = Path(folder) / "dlrm.onnx"
        onnx_ir.save(dlrm([rows] * TABLES, NUMBERS, WIDTH), path, external_data="dlrm.data")
        program = burnish.compile(path, loss="bce_with_logits", optimizer=optimizer, metrics=[], sparse=tables)
        return burnish.Session(program, engine=engine, threads=1).step


def torch_dlrm_step(rows: int, optimizer: str, sparse: bool, samples: int) -> Callable[[dict[str, np.ndarray]], object]:
    import torch

    torch.set_num_threads(1)
    tables = torch.nn.ModuleList([torch.nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=sparse) for _ in range(TABLES)])
    below, above = (torch_layers(sizes) for sizes in ((NUMBERS, 64, 32, WIDTH), (WIDTH + TABLES * (TABLES + 1) // 2, 64, 32, 1)))
    below.append(torch.nn.ReLU())
    first, second = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
    of_tables, of_network = torch_optimizers(optimizer, sparse, tables, torch.nn.ModuleList([below, above]))
    starts = torch.arange(samples)

    def step(batch: dict[str, np.ndarray]) -> float:
        of_tables.zero_grad()
        of_network.zero_grad()
        x = below(torch.from_numpy(batch["numbers"]))
        read = [table(torch.from_numpy(batch[f"category_{place}"]), starts) for place, table in enumerate(tables, 1)]
        vectors = torch.stack([x, *read], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        logits = above(torch.cat([x, products[:, first, second]], 1))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch["targets"]))
        loss.backward()
        of_tables.step()
        of_network.step()
        return loss.item()

    return step


def torch_layers(sizes: tuple[int, ...]) -> Any:
    import torch

    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [torch.nn.ReLU()] if layers else []
        layers.append(torch.nn.Linear(inputs, outputs))
    return torch.nn.Sequential(*layers)


def torch_optimizers(optimizer: str, sparse: bool, tables: Any, network: Any) -> tuple[Any, Any]:
    """That of the tables, and that of the other layers. PyTorch has no row-wise Adagrad: it runs Adagrad."""
    import torch

    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": torch.optim.Adagrad}
    kinds["sparse_adam"] = torch.optim.SparseAdam if sparse else torch.optim.Adam
    of_network = torch.optim.Adam if optimizer == "sparse_adam" else kinds[optimizer]
    return kinds[optimizer](list(tables.parameters()), lr=1e-3), of_network(network.parameters(), lr=1e-3)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def step_of(contender: str, arguments: argparse.Namespace) -> Callable[[dict[str, np.ndarray]], object]:
    rows, optimizer = arguments.rows[0], arguments.optimizers[0]
    sparse, of_dlrm = contender.endswith("sparse"), arguments.model == "dlrm"
    if contender.startswith("torch"):
        return torch_dlrm_step(rows, optimizer, sparse, arguments.batch) if of_dlrm else torch_step(rows, optimizer, sparse)
    return (burnish_dlrm_step if of_dlrm else burnish_step)(rows, optimizer, contender.split()[-2], sparse)


def measured(contender: str, arguments: argparse.Namespace) -> dict[str, float]:
    """The median and the shortest step in milliseconds, what steps add to memory, and what is held after them, in MiB."""
    clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    rows = arguments.rows[0]
    step = step_of(contender, arguments)
    of_dlrm = arguments.model == "dlrm"
    batches = [dlrm_batch(rows, arguments.batch, seed) if of_dlrm else batch_of(rows, seed) for seed in range(20)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for batch in batches[:10]:
        step(batch)
    times = []
    for number in range(arguments.steps):
        start = clock()
        step(batches[number % len(batches)])
        times.append(clock() - start)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    held = resident_mib()
    return {
        "median_ms": 1e3 * float(np.median(times)),
        "shortest_ms": 1e3 * min(times),
        "grown_mib": grown / 1024,
        "held_mib": held,
    }


def random_rows() -> ctypes.CDLL:
    """The yardstick, compiled: ``random_rows.cpp``."""
    source = Path(__file__).parent / "random_rows.cpp"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "random_rows.so"
        subprocess.run(["c++", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    address, number = ctypes.c_void_p, ctypes.c_int64
    loaded.gather_rows.argtypes = [address, address, number, number, address]
    loaded.add_to_rows.argtypes = [address, address, address, number, number, address]
    return loaded


def rates(rows: int, count: int, repetitions: int, clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Nanoseconds for a row, of the kernels and of the yardstick, over rows drawn evenly, each once in a call."""
    import torch

    from burnish.engines.torch import native as kernels
    from burnish.engines.torch.bindings.embedding import GRADIENT, SCALAR, STATE
    from burnish.kernels.elementwise.programs import OPERATIONS

    assert kernels.available("rows"), "there is no C++ compiler for the engine's kernels"
    torch.set_num_threads(1)
    library, rng = random_rows(), np.random.default_rng(0)
    one, two = torch.ones(rows, WIDTH), torch.ones(rows, WIDTH)
    gradient, rate = torch.rand(count, WIDTH), torch.tensor(0.01)
    out = torch.empty(count, WIDTH)
    sets = [torch.from_numpy(rng.permutation(np.unique(rng.integers(0, rows, count)))) for _ in range(8)]
    number = {name: OPERATIONS[name] for name in ("Mul", "Add", "Sqrt", "Div", "SubMul")}
    sgd = [number["SubMul"], 3, 1, 2, 0]
    adagrad = [number["Mul"], 6, 2, 2, -1, number["Add"], 5, 1, 6, -1, number["Sqrt"], 7, 5, -1, -1]
    adagrad += [number["Div"], 6, 2, 7, -1, number["SubMul"], 4, 6, 3, 0]
    plans = {
        "SGD": torch.tensor([1, 3, 1, 0, len(sgd), STATE, GRADIENT, SCALAR, 0, *sgd]),
        "Adagrad": torch.tensor([1, 4, 2, 0, len(adagrad), STATE, STATE, GRADIENT, SCALAR, 0, 1, *adagrad]),
    }
    none = torch.zeros(0, dtype=torch.float64)

    def gather(chosen: torch.Tensor) -> None:
        library.gather_rows(one.data_ptr(), chosen.data_ptr(), len(chosen), WIDTH, out.data_ptr())

    def add(second: torch.Tensor | None, chosen: torch.Tensor) -> None:
        other = None if second is None else second.data_ptr()
        library.add_to_rows(one.data_ptr(), other, chosen.data_ptr(), len(chosen), WIDTH, gradient.data_ptr())

    update = torch.ops.burnish.update_rows_.default
    contenders: dict[str, Callable[[torch.Tensor], object]] = {
        "yardstick of lookups": gather,
        "lookups": lambda chosen: torch.ops.burnish.lookup_rows.default([one], [chosen]),
        "yardstick of SGD": lambda chosen: add(None, chosen),
        "SGD": lambda chosen: update([chosen, one, gradient[: len(chosen)], rate], plans["SGD"], none),
        "yardstick of Adagrad": lambda chosen: add(two, chosen),
        "Adagrad": lambda chosen: update([chosen, one, two, gradient[: len(chosen)], rate], plans["Adagrad"], none),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions):
        chosen = sets[repetition % len(sets)]
        for name, run in contenders.items():
            start = clock()
            run(chosen)
            times[name].append(1e9 * (clock() - start) / len(chosen))
    shortest = {name: min(values) for name, values in times.items()}
    return {
        name: {"ns": shortest[name], "yardstick_ns": shortest[f"yardstick of {name}"]} for name in ("lookups", "SGD", "Adagrad")
    }


def saved(kind: str, result: dict[str, Any], lines: list[str]) -> None:
    """Write a result beside the others, and its table into the document."""
    path = RESULTS / f"{datetime.date.today()}-embeddings-{kind}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    begin, end = BEGIN.format(kind), END.format(kind)
    text = DOCUMENT.read_text()
    before, found, rest = text.partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise SystemExit(f"{DOCUMENT.name} lacks the lines '{begin}' and '{end}', between which the table goes")
    DOCUMENT.write_text("\n".join([before + begin, "", *lines, "", end + after]))


def table_of_steps(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| Optimizer | Contender | Rows of a table | Step, ms | Steps add, MiB | Held, MiB | Held of each MiB more |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['optimizer']} | {row['contender']} | {row['rows']:,} | {row['median_ms']:.2f} | {row['grown_mib']:.0f} | "
        f"{row['held_mib']:,.0f} | {share_held(row, results)} |"
        for row in results
    ]


def share_held(row: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """What more rows take, of their size in tables and slots; what a process takes without them is left out."""
    alike = [other for other in results if (other["optimizer"], other["contender"]) == (row["optimizer"], row["contender"])]
    smallest = min(alike, key=lambda other: other["rows"])
    if smallest["rows"] == row["rows"]:
        return ""
    elements = {"sgd": WIDTH, "adagrad": 2 * WIDTH, "rowwise_adagrad": WIDTH + 1, "sparse_adam": 3 * WIDTH}[row["optimizer"]]
    size = TABLES * (row["rows"] - smallest["rows"]) * elements * 4 / 2**20
    return f"{(row['held_mib'] - smallest['held_mib']) / size:.2f}"


def compare_steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each contender in a process of its own."""
    print(
        f"{'optimizer':16} {'contender':20} {'rows':>10} {'median ms':>10} {'shortest ms':>12} {'grown MiB':>10} {'held MiB':>10}"
    )
    results = []
    for optimizer in arguments.optimizers:
        for rows in arguments.rows:
            for contender in arguments.contenders:
                options = ["--rows", str(rows), "--optimizers", optimizer, "--steps", str(arguments.steps)]
                options += ["--model", arguments.model, "--batch", str(arguments.batch), "--clock", arguments.clock]
                command = [sys.executable, __file__, "--measure", contender, *options]
                result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
                results.append({"optimizer": optimizer, "contender": contender, "rows": rows, **result})
                print(
                    f"{optimizer:16} {contender:20} {rows:10} {result['median_ms']:10.3f} {result['shortest_ms']:12.3f} "
                    f"{result['grown_mib']:10.1f} {result['held_mib']:10.1f}",
                    flush=True,
                )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("lookups", "dlrm"), default="lookups")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 200_000, 1_000_000])
    parser.add_argument("--batch", type=int, default=LOOKUPS, help="samples of a batch of the DLRM")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["sgd", "rowwise_adagrad"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--rates", action="store_true", help="measure the kernels beside the machine's random accesses, and stop")
    parser.add_argument(
        "--save", action="store_true", help="write the result to benchmarks/results/, and docs/embeddings.md anew"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure, arguments)))
        return
    settings = {name: value for name, value in vars(arguments).items() if name not in ("measure", "save", "rates")}
    if arguments.rates:
        clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
        of_kernels = rates(max(arguments.rows), 50_000, arguments.steps, clock)
        lines = ["| | Row, ns | Machine's random access, ns | Share of its rate |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {row['ns']:.0f} | {row['yardstick_ns']:.0f} | {row['yardstick_ns'] / row['ns']:.0%} |"
            for name, row in of_kernels.items()
        ]
        print("\n".join(lines))
        if arguments.save:
            saved("rates", {"settings": settings, "rates": of_kernels}, lines)
        return
    results = compare_steps(arguments)
    if arguments.save:
        saved(arguments.model, {"settings": settings, "steps": results}, table_of_steps(results))


if __name__ == "__main__":
    main()
