"""A script for launchers: prints how far several workers are from one process, in float64, at most, over all that is trained.

    torchrun --nproc-per-node 4 tests/distributed/launched.py
    mpiexec -n 4 python tests/distributed/launched.py

Its model has an embedding that is updated by rows, batch normalization and dropout. Gradients are clipped, and batches are
uneven, with nothing for one worker in each step. Every worker prints a line.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx.parser

import burnish
from burnish import optim
from burnish.distributed import join

Outcome = tuple[list[float], dict[str, np.ndarray]]

STEPS, SAMPLES, FEATURES, ROWS = 6, 13, 6, 7
MODEL = f"""<ir_version: 10, opset_import: ["": 18]>
g (int64[batch, 3] ids, double[batch, {FEATURES}] x) => (double[batch, 3] logits)
<double[{ROWS}, 4] table, double[18, 8] first, double[8] scale, double[8] bias, double[8] mean, double[8] variance,
 double[8, 3] head> {{
    rows = Gather (table, ids)
    flat = Flatten (rows)
    joined = Concat <axis = 1> (flat, x)
    h = MatMul (joined, first)
    n = BatchNormalization <epsilon = 0.00001> (h, scale, bias, mean, variance)
    a = Relu (n)
    half = Constant <value = float {{0.5}}> ()
    d = Dropout (a, half)
    logits = MatMul (d, head)
}}"""


def compiled() -> burnish.Program:
    model = onnx.parser.parse_model(MODEL)
    rng = np.random.default_rng(0)
    shapes = {"table": (ROWS, 4), "first": (12 + FEATURES, 8), "head": (8, 3)}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    weights |= {"scale": rng.uniform(0.5, 1.5, 8), "bias": rng.normal(size=8), "mean": np.zeros(8), "variance": np.ones(8)}
    del model.graph.initializer[:]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(lr=0.1, momentum=0.9))
    return burnish.compile(model, optimizer=optimizer, sparse=["table"])


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        {
            "ids": rng.integers(0, ROWS, (SAMPLES, 3)),
            "x": rng.normal(size=(SAMPLES, FEATURES)),
            "labels": rng.integers(0, 3, SAMPLES),
        }
        for _ in range(STEPS)
    ]


def part_of(batch: Mapping[str, np.ndarray], step: int, rank: int, workers: int) -> dict[str, np.ndarray]:
    """The samples of one worker: in each step one of several has none, and the others have different numbers."""
    shares = np.array([0 if (other + step) % workers == 0 and workers > 1 else 1 + other % 3 for other in range(workers)])
    ends = np.round(np.cumsum(shares) / shares.sum() * SAMPLES).astype(int)
    return {name: array[(ends[rank - 1] if rank else 0) : ends[rank]] for name, array in batch.items()}


def trained(
    program: burnish.Program,
    engine: str,
    parallel: burnish.DataParallel | None,
    rank: int = 0,
    workers: int = 1,
    checkpoint: Path | None = None,
    interruption: str | None = None,
) -> Outcome:
    """The losses, and the state after the last step.

    Args:
        program, engine, parallel, rank, workers: what is trained, and how.
        checkpoint: written after each step, and gone on from.
        interruption: of ``interrupt``.
    """
    with burnish.Session(program, engine=engine, threads=1, parallel=parallel) as session:
        if checkpoint is not None and checkpoint.exists():
            session.restore(checkpoint)
        losses = []
        for step in range(session.step_count, STEPS):
            interrupt(interruption, step, rank, workers)
            losses.append(session.step(part_of(batches()[step], step, rank, workers))["loss"])
            if checkpoint is not None and rank == 0:
                session.save_checkpoint(checkpoint)
        return losses, session.state()


def interrupt(kind: str | None, step: int, rank: int, workers: int) -> None:
    """End or delay this worker of torchrun before a step in the middle.

    Args:
        kind: ``worker`` kills the last worker at its first start, ``agent`` this worker and what has started it; ``alone`` waits
            for another agent to come, which starts the workers again.
    """
    if kind == "alone" and step == STEPS // 3 and os.environ["GROUP_WORLD_SIZE"] == "1":
        signal.pause()
    if step == STEPS // 2 and kind == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
    is_last = rank == workers - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if step == STEPS // 2 and (kind == "agent" or (kind == "worker" and is_last)):
        os.kill(os.getpid(), signal.SIGKILL)


def largest_difference(one: Outcome, other: Outcome) -> float:
    """The largest of any loss and any entry of the state; NaN if one is."""
    (losses, state), (expected_losses, expected_state) = one, other
    assert state.keys() == expected_state.keys()
    differences = [np.abs(np.subtract(losses, expected_losses[-len(losses) :])).max()]
    for name, array in expected_state.items():
        differences.append(np.abs(state[name].astype(np.float64) - array.astype(np.float64)).max())
    return float(np.max(differences))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="torch", choices=["torch", "onnxruntime"])
    parser.add_argument("--group", action="store_true", help="let this script initialize torch.distributed, and give the group")
    parser.add_argument("--mpi", action="store_true", help="exchange by MPI, without PyTorch")
    parser.add_argument("--checkpoint", type=Path, help="write one after each step, and go on from it")
    parser.add_argument("--interrupt", choices=["worker", "agent", "alone"], help="what happens in the middle")
    options = parser.parse_args(arguments)
    assert not [name for name in os.environ if name.startswith("BURNISH")], "a variable of burnish's is set"
    program = compiled()
    if options.mpi:
        communicator = burnish.distributed.mpi()
        rank, workers = communicator.rank, communicator.size
        found = trained(program, options.engine, burnish.DataParallel(communicator=communicator), rank, workers)
        assert "torch" not in sys.modules
    else:
        parallel = burnish.DataParallel()
        if options.group:
            import torch.distributed

            torch.distributed.init_process_group("gloo")
            parallel = burnish.DataParallel(group=torch.distributed.group.WORLD)
        with join() as group:
            rank, workers = group.rank, group.world_size
            found = trained(program, options.engine, parallel, rank, workers, options.checkpoint, options.interrupt)
    expected = trained(program, options.engine, None)
    print(f"rank {rank} of {workers}: {largest_difference(found, expected):.1e}", flush=True)


if __name__ == "__main__":
    main()
