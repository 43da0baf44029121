"""The training step on stock onnxruntime beside PyTorch eager (NCHW): time, memory, compile and load.

    python benchmarks/portable.py --model resnet50 --batch 16

Both train the same weights on the same batch, each in a process of its own, rounds interleaved. The losses of the first
three steps must agree before a time counts.
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
import onnxruntime
import torch

import torch_models
from contenders import Contender

RESULTS = Path(__file__).parent / "results"
LOSS_TOLERANCE = 1e-3


def prepare(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the model, its weights and a batch where both contenders read them."""
    torch.manual_seed(0)
    module = getattr(torch_models, arguments.model)()
    size = arguments.size
    model = torch_models.export_onnx(module, torch.randn(2, 3, size, size))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    torch.save(module.state_dict(), folder / "weights.pt")
    random = np.random.default_rng(0)
    np.savez(
        folder / "data.npz",
        x=random.standard_normal((arguments.batch, 3, size, size), dtype=np.float32),
        labels=random.integers(0, 1000, arguments.batch),
    )
    return {
        "architecture": arguments.model,
        "model": str(folder / "model.onnx"),
        "weights": str(folder / "weights.pt"),
        "data": str(folder / "data.npz"),
        "threads": arguments.threads,
        "lr": 0.001,
        "momentum": 0.9,
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the interleaved rounds and return what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        job = prepare(Path(folder), arguments)
        contenders = [
            Contender.start("burnish on onnxruntime", "portable_burnish.py", job),
            Contender.start("PyTorch eager, NCHW", "portable_pytorch.py", job),
        ]
        for _ in range(arguments.warmup + arguments.rounds):
            for contender in contenders:
                contender.step()
        finished = [contender.finish() for contender in contenders]
    ours, theirs = contenders
    for index, (left, right) in enumerate(zip(ours.losses[:3], theirs.losses[:3], strict=True)):
        if abs(left - right) > LOSS_TOLERANCE * abs(right):
            raise SystemExit(f"the losses of step {index} differ, {left} and {right}: no time counts")
    rows = []
    for contender, finish in zip(contenders, finished, strict=True):
        counted = contender.seconds[arguments.warmup :]
        rows.append(
            {
                "name": contender.name,
                "first_step_seconds": contender.seconds[0],
                "median_seconds": statistics.median(counted),
                "minimum_seconds": min(counted),
                "maximum_seconds": max(counted),
                "samples_per_second": arguments.batch / statistics.median(counted),
                "peak_bytes": finish["peak_bytes"],
                "losses": contender.losses[:3],
                **contender.ready,
            }
        )
    pairs = [a / b for a, b in zip(ours.seconds[arguments.warmup :], theirs.seconds[arguments.warmup :], strict=True)]
    return {
        "date": datetime.date.today().isoformat(),
        "model": arguments.model,
        "batch": arguments.batch,
        "size": arguments.size,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "machine": platform.machine(),
        "versions": {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__},
        "contenders": rows,
        "time_ratio": statistics.median(pairs),
        "memory_ratio": rows[0]["peak_bytes"] / rows[1]["peak_bytes"],
        "compile_and_load_seconds": rows[0]["compile_seconds"] + rows[0]["load_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("resnet50", "mobilenet_v2"), default="resnet50")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    arguments = parser.parse_args()
    result = run(arguments)
    for row in result["contenders"]:
        print(
            f"{row['name']:<24} median {row['median_seconds']:.2f} s ({row['minimum_seconds']:.2f} to "
            f"{row['maximum_seconds']:.2f}), first step {row['first_step_seconds']:.2f} s, "
            f"peak {row['peak_bytes'] / 1e9:.2f} GB, {row['samples_per_second']:.1f} samples/s"
        )
    print(
        f"time ratio {result['time_ratio']:.2f}, memory ratio {result['memory_ratio']:.2f}, "
        f"compile and load {result['compile_and_load_seconds']:.1f} s"
    )
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{result['date']}-portable-{arguments.model}-{arguments.batch}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
