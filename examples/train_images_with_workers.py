"""Train a small network with batch normalization on images of digits, by one process or by several workers.

    python train_images_with_workers.py
    torchrun --nproc-per-node 2 train_images_with_workers.py

A batch has two images, one for each of two workers. Synchronized batch normalization takes its statistics over the whole batch,
so the workers learn what one process does, up to rounding. Local batch normalization takes them over each worker's own part,
which is too small here. Several workers train both ways, to show the difference.

Needs PyTorch (the extra [torch]) and scikit-learn (the extra [demo]).
"""

import argparse

import numpy as np

import burnish
from burnish.data.digits import digits_arrays
from burnish.distributed import ProcessGroup, join
from burnish.models import residual_network


def train(program: burnish.Program, group: ProcessGroup, norm: str, count: int, batch_size: int) -> float:
    """Return the accuracy on the test images after all workers of a group have seen ``count`` images once."""
    images, labels = digits_arrays("train")
    # Every worker draws the same batches, and takes its own part of each. Parts may differ in size, or have no images.
    batches = np.array_split(np.random.default_rng(0).permutation(len(images))[:count], count // batch_size)
    parallel = burnish.DataParallel(group=group, norm=norm)
    with burnish.Session(program, engine="torch", threads=1, parallel=parallel) as session:
        for step, batch in enumerate(batches):
            part = np.array_split(batch, group.world_size)[group.rank]
            lr = 0.01 * (1 + np.cos(np.pi * step / len(batches)))
            metrics = session.step({"x": images[part, None], "labels": labels[part]}, lr=lr)
            if group.rank == 0 and step % 100 == 0:
                print(f"{norm}, step {step}: loss of the whole batch {metrics['loss']:.4f}")
        # Every worker has the same weights and running statistics, so each one can evaluate them.
        images, labels = digits_arrays("test")
        return float(session.evaluate({"x": images[:, None], "labels": labels})["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000, help="images to train on, 1437 at most")
    parser.add_argument("--batch-size", type=int, default=2, help="images in a batch, those of all workers together")
    arguments = parser.parse_args()

    model = residual_network(input_shape=(1, 8, 8), classes=10, width=8, blocks=(1, 1))
    optimizer = burnish.optim.sgd(lr=0.02, momentum=0.9)
    # Few images in a batch: the running statistics are averages over more batches than usual.
    norm = "train:momentum=0.95"
    program = burnish.compile(model, loss="cross_entropy", optimizer=optimizer, norm=norm, metrics=("accuracy",))
    with join() as group:  # the workers that torchrun has started, or this process alone
        workers = f"{group.world_size} workers" if group.world_size > 1 else "one process"
        for norm in ("sync", "local") if group.world_size > 1 else ("sync",):
            accuracy = train(program, group, norm, arguments.images, arguments.batch_size)
            if group.rank == 0:
                print(f"{norm}, {workers}: test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
