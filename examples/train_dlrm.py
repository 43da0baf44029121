"""Train a recommendation model over embedding tables of which a step updates the rows alone that a batch reads.

The clicks are drawn, with categories that follow Zipf's law; a file in Criteo's format takes their place with ``--clicks``::

    python train_dlrm.py --samples 40000
    python train_dlrm.py --clicks day_0.tsv --rows 100000 --samples 1000000
    python train_dlrm.py --workers 2 --shard-tables

With PyTorch installed, the same model is trained there beside, on the same batches in the same order. With several workers each
has a part of every batch and, with ``--shard-tables``, some rows of every table.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile

import numpy as np
import onnx_ir as ir

import burnish
from burnish.data import Dataset, Loader, synthetic_clicks
from burnish.distributed import join
from burnish.models import dlrm
from criteo_file import CriteoFile

BATCH = 256
LR = 0.05


def auc(scores: np.ndarray, targets: np.ndarray) -> float:
    """How often a click scores higher than none; a tie is half of one."""
    order = np.sort(scores)
    ranks = (np.searchsorted(order, scores, "left") + np.searchsorted(order, scores, "right") + 1) / 2
    clicks = targets > 0.5
    count = clicks.sum()
    return float((ranks[clicks].sum() - count * (count + 1) / 2) / (count * (~clicks).sum()))


def train_with_burnish(model: ir.Model, loader: Loader, epochs: int, held_out: dict[str, np.ndarray], engine: str) -> np.ndarray:
    program = burnish.compile(model, loss="bce_with_logits", optimizer=burnish.optim.adagrad(lr=LR), metrics=[], sparse="auto")
    with burnish.Session(program, engine=engine) as session:
        for epoch in range(epochs):
            for batch in loader.epoch(epoch):
                session.step(batch)
        return session.predict(inputs_of(held_out))["logits"]


def train_with_workers(
    model: ir.Model, loader: Loader, epochs: int, held_out: dict[str, np.ndarray], shard_tables: bool
) -> np.ndarray | None:
    """Train as one of several workers; what the first returns is what one process would."""
    program = burnish.compile(model, loss="bce_with_logits", optimizer=burnish.optim.adagrad(lr=LR), metrics=[], sparse="auto")
    with join() as group:
        parallel = burnish.DataParallel(group=group, shard_tables="auto" if shard_tables else None)
        with burnish.Session(program, engine="torch", threads=1, parallel=parallel) as session:
            for epoch in range(epochs):
                for batch in loader.epoch(epoch):
                    parts = {name: np.array_split(array, group.world_size) for name, array in batch.items()}
                    session.step({name: arrays[group.rank] for name, arrays in parts.items()})
            scores = session.predict(inputs_of(held_out))["logits"]  # looking up rows that others hold, all workers predict
        return scores if group.rank == 0 else None


def start_workers(count: int) -> None:
    """Run this script once for each worker, and wait for all of them."""
    with tempfile.TemporaryDirectory() as meeting:
        places = [{"RANK": str(rank), "WORLD_SIZE": str(count), "BURNISH_MEETING": meeting} for rank in range(count)]
        processes = [subprocess.Popen([sys.executable, *sys.argv], env=os.environ | place) for place in places]
        statuses = [process.wait() for process in processes]
    if any(statuses):
        sys.exit(1)


def inputs_of(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in batch.items() if name != "targets"}


def train_with_pytorch(model: ir.Model, loader: Loader, epochs: int, held_out: dict[str, np.ndarray]) -> np.ndarray:
    import torch
    from torch.nn import functional

    weights = {
        name: torch.tensor(value.const_value.numpy(), requires_grad=True) for name, value in model.graph.initializers.items()
    }
    tables = [name for name in weights if name.startswith("table_")]
    depths = {part: sum(name.startswith(part) and name.endswith(".bias") for name in weights) for part in ("bottom", "top")}
    pairs = torch.tril_indices(len(tables) + 1, len(tables) + 1, offset=-1)

    def layer(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def logits(batch: dict[str, np.ndarray]) -> torch.Tensor:
        x = torch.from_numpy(batch["numbers"])
        for place in range(1, depths["bottom"] + 1):
            x = torch.relu(layer(f"bottom_{place}", x))
        rows = [
            functional.embedding(torch.from_numpy(batch[f"category_{place}"]), weights[table], sparse=True)
            for place, table in enumerate(tables, 1)
        ]
        vectors = torch.stack([x, *rows], 1)
        y = torch.cat([x, (vectors @ vectors.transpose(1, 2))[:, pairs[0], pairs[1]]], 1)
        for place in range(1, depths["top"]):
            y = torch.relu(layer(f"top_{place}", y))
        return layer(f"top_{depths['top']}", y)

    optimizer = torch.optim.Adagrad(weights.values(), lr=LR)
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(logits(batch), torch.from_numpy(batch["targets"])).backward()
            optimizer.step()
    with torch.no_grad():
        return logits(held_out).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--engine", default="onnxruntime")
    parser.add_argument("--workers", type=int, default=1, help="processes that train together, on the PyTorch engine")
    parser.add_argument("--shard-tables", action="store_true", help="let each worker hold some rows of every table")
    parser.add_argument("--clicks", help="a file in Criteo's format, of which the last tenth of the samples is held out")
    parser.add_argument("--rows", type=int, default=100_000, help="of each table, with --clicks")
    arguments = parser.parse_args()
    is_worker = "WORLD_SIZE" in os.environ
    if arguments.workers > 1 and not is_worker:
        start_workers(arguments.workers)
        return
    if arguments.clicks:
        rows = [arguments.rows] * 26
        data: Dataset = CriteoFile(arguments.clicks, rows)
        if os.environ.get("RANK", "0") == "0":
            print(data.note or f"{len(data)} lines")
        count = min(arguments.samples, len(data))
        held_out = data.batch(np.arange(count - count // 10, count))
        training = burnish.data.ArrayDataset(data.batch(np.arange(count - count // 10)))
    else:
        rows = [50, 400, 3000, 20_000] * 2
        training = synthetic_clicks(arguments.samples, rows)
        held_out = synthetic_clicks(10_000, rows, draw=1).arrays
    model, loader = dlrm(rows), Loader(training, BATCH, seed=0)
    scores: np.ndarray | None
    if is_worker:
        scores = train_with_workers(model, loader, arguments.epochs, held_out, arguments.shard_tables)
    else:
        scores = train_with_burnish(model, loader, arguments.epochs, held_out, arguments.engine)
    if scores is None:
        return
    print(f"AUC of burnish: {auc(scores.ravel(), held_out['targets'].ravel()):.4f}")
    if importlib.util.find_spec("torch"):
        scores = train_with_pytorch(model, loader, arguments.epochs, held_out)
        print(f"AUC of PyTorch: {auc(scores.ravel(), held_out['targets'].ravel()):.4f}")


if __name__ == "__main__":
    main()
