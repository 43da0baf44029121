"""``burnish demo``: from an untrained network to a tuned ONNX file, checked with plain ONNX Runtime."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from burnish.cli.console import output, what_trains

if TYPE_CHECKING:
    import numpy as np

    from burnish.data import Loader
    from burnish.training import Session

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4


def demo(
    folder: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run; an earlier one is replaced.")] = Path(
        "runs/demo"
    ),
    epochs: Annotated[int, typer.Option("--epochs", "-e", min=1, help="Passes over the data.")] = 24,
    width: Annotated[int, typer.Option("--width", min=1, help="Channels of the network's first stage.")] = 16,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all random numbers.")] = 0,
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="Processor threads; one is fastest for so small a network.")
    ] = 1,
) -> None:
    """Train a small network on images of digits.

    It is a residual network; the result is checked with nothing but ONNX Runtime.
    """
    from burnish import optim
    from burnish.compiler.compile import compile
    from burnish.data import DataSpec, Loader, open_dataset, shift_images
    from burnish.errors import EngineError
    from burnish.models import residual_network
    from burnish.training import Trainer
    from burnish.training.environment import session_line

    console = output()
    begin = time.monotonic()
    program = compile(
        residual_network(width=width, seed=seed),
        optimizer=optim.sgd(lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
    )
    spec = DataSpec.by(program)
    train_set, test_set = open_dataset("digits", spec), open_dataset("digits:test", spec)
    console.print(
        f"A residual network with batch normalization: {what_trains(program)}. "
        f"{len(train_set):,} images of handwritten digits to train on, {len(test_set)} to test with."
    )
    trainer = Trainer(
        program,
        train_set,
        test_set,
        epochs=epochs,
        seed=seed,
        run_directory=folder,
        overwrite=True,
        threads=threads,
        schedule="cosine",
        augment=shift_images("x"),
    )
    console.print(session_line(trainer.session.describe()))
    program.save(folder / "program")
    trainer.run()
    tuned = folder / "tuned.onnx"
    trainer.session.export(tuned)
    expected = right_by_session(trainer.session, Loader(test_set, 60, shuffle=False))
    arrays = Loader(test_set, len(test_set), shuffle=False)
    (images,) = [batch["x"] for batch in arrays.epoch(0)]
    (labels,) = [batch["labels"] for batch in arrays.epoch(0)]
    counted = right_by_onnxruntime(tuned, images, labels)
    total = len(labels)
    console.print(f"Test accuracy, burnish session:    {expected}/{total} = {expected / total:.2%}")
    console.print(f"Test accuracy, plain ONNX Runtime: {counted}/{total} = {counted / total:.2%}, from {tuned}")
    if counted != expected:
        raise EngineError(
            f"The exported model '{tuned}' is right {counted} times and the session {expected} times, of {total}: "
            "they have to agree. This is a defect of burnish; please report it with the version of onnxruntime"
        )
    console.print(f"They agree. Done in {time.monotonic() - begin:.0f} s; curves, metrics and checkpoints are in {folder}.")


def right_by_session(session: Session, loader: Loader) -> int:
    """Return the number of samples that the session's evaluation counts as right."""
    return round(sum(session.evaluate_totals(batch)["sum:accuracy"].item() for batch in loader.epoch(0)))


def right_by_onnxruntime(path: Path, images: np.ndarray, labels: np.ndarray) -> int:
    """Return the number of samples that a model gets right, with only ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images})
    return int((logits.argmax(axis=1) == labels).sum())
