"""How long a training run waits for its images: a folder of JPEG files, MobileNetV2, and the share of time that goes by unused.

    python benchmarks/feeding.py                                         # 10,000 files, an epoch, on two threads
    python benchmarks/feeding.py --pictures 600 --seconds 60 --data-workers 0 1 2

The pictures are drawn from a seed: 500 x 375 pixels, five classes. Training cuts random boxes out of them and flips them, so that
each is decoded anew in every epoch. The share is that which the trainer reports: time spent waiting for a batch, of the time of
all steps but the first.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import burnish
import torch_models
from burnish.training.callbacks import Callback, Run, StepReport

CLASSES, SIZE = ("ash", "beech", "elm", "larch", "oak"), (375, 500)


class StopAfter(Callback):
    """Stops a run after so many seconds of training."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.seconds > self._seconds:
            run.stop(f"{self._seconds:g} s of training are measured")


def write_pictures(folder: Path, count: int, seed: int = 0) -> int:
    """Write so many JPEG files, spread over the classes; return how many bytes they take."""
    rng = np.random.default_rng(seed)
    grain = rng.normal(0, 8, (2, *SIZE, 3)).astype(np.float32)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    total = 0
    for number in range(count):
        label = number % len(CLASSES)
        rough = rng.integers(0, 256, (9, 12, 3), np.uint8) // 2 + np.uint8(25 * label)
        smooth = np.asarray(Image.fromarray(rough).resize(SIZE[::-1], Image.Resampling.BICUBIC), np.float32)
        pixels = np.clip(smooth + np.roll(grain[number % 2], number, axis=0), 0, 255).astype(np.uint8)
        file = folder / CLASSES[label] / f"{number:05}.jpg"
        Image.fromarray(pixels).save(file, quality=88)
        total += file.stat().st_size
    return total


def measured(folder: Path, runs: Path, model: object, options: argparse.Namespace, data_workers: int | None) -> str:
    """Train an epoch, and return a row: share of waiting, images per second."""
    program = burnish.compile(model, loss="cross_entropy", optimizer=burnish.optim.sgd(lr=0.01, momentum=0.9))
    trainer = burnish.Trainer(
        program,
        folder,
        batch_size=options.batch_size,
        run_directory=runs,
        overwrite=True,
        engine=options.engine,
        threads=options.threads,
        pixels="imagenet",
        augment="crop,flip",
        data_workers=data_workers,
        progress=False,
        callbacks=[StopAfter(options.seconds)],
    )
    begin = time.monotonic()
    result = trainer.run()
    rate = result.steps * options.batch_size / (time.monotonic() - begin)
    workers = "by default" if data_workers is None else data_workers
    return f"| {workers} | {100 * result.waiting:.1f} % | {result.steps} | {rate:.1f} | {result.metrics['loss']:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop each run after so many seconds of training")
    parser.add_argument("--data-workers", type=int, nargs="*", default=[None], help="each in a run of its own")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", default="auto")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch_models.export_onnx(torch_models.mobilenet_v2(len(CLASSES)), torch.zeros(2, 3, 224, 224))
    with tempfile.TemporaryDirectory(prefix="feeding-") as scratch:
        folder = Path(scratch) / "pictures"
        begin = time.monotonic()
        size = write_pictures(folder, options.pictures)
        print(
            f"{options.pictures:,} JPEG files of {size / options.pictures / 1000:.0f} kB, written in "
            f"{time.monotonic() - begin:.0f} s"
        )
        print(f"{os.cpu_count()} processors, {options.threads} threads, batch {options.batch_size}, MobileNetV2 at 224 x 224")
        print("| processes that read | waiting for data | steps | images a second | loss |\n|---|---|---|---|---|")
        for data_workers in options.data_workers:
            print(measured(folder, Path(scratch) / "run", model, options, data_workers), flush=True)


if __name__ == "__main__":
    main()
