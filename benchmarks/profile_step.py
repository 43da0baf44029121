"""What a training step on the PyTorch engine spends its time in, operator by operator.

python benchmarks/profile_step.py architecture-lstm --rows 20
python benchmarks/profile_step.py resnet50 --threads 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

import burnish
from workloads import WORKLOADS, prepare

sys.path.append(str(Path(__file__).parent / "peers"))
from job import read_feeds

WARMUP = 3
STEPS = 3


def profiled(model: str, threads: int, rows: int) -> str:
    """A table of the operators that take the longest, over three steps."""
    with tempfile.TemporaryDirectory() as folder:
        job = prepare(Path(folder), model, WORKLOADS[model].batch)
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in job["optimizer"].items()}
        program = burnish.compile(
            job["onnx"],
            **({"output": "loss"} if job["loss"] is None else {"loss": job["loss"]}),
            optimizer=getattr(burnish.optim, settings.pop("name"))(**settings),
            trainable=job["trainable"],
            metrics=(),
        )
        batches = read_feeds(job)
    with burnish.Session(program, engine="torch", threads=threads) as session:
        for index in range(WARMUP):
            session.step(batches[index % len(batches)])
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            for index in range(STEPS):
                session.step(batches[index % len(batches)])
    averages = recorded.key_averages(group_by_input_shape=True)
    return averages.table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=tuple(WORKLOADS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=30)
    arguments = parser.parse_args()
    print(profiled(arguments.model, arguments.threads, arguments.rows))


if __name__ == "__main__":
    main()
