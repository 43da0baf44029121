"""Processes that exchange values come to what one process with the whole batch comes to."""

from __future__ import annotations

import pytest

import burnish
from oracles.combinations import diagonal
from oracles.normalized_networks import image_batches, inverted_residual, residual
from oracles.several_workers import largest_difference, train_alone, train_part

STEPS, SAMPLES = 5, 12
SIZES = {
    1: [[12]] * STEPS,
    2: [[5, 7], [12, 0], [6, 6], [1, 11], [0, 12]],
    3: [[6, 0, 6], [1, 2, 9], [4, 4, 4], [0, 0, 12], [7, 5, 0]],
    4: [[1, 4, 0, 7], [3, 3, 3, 3], [0, 6, 6, 0], [12, 0, 0, 0], [2, 1, 8, 1]],
}


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory):
    """A saved program, its batches, and what one process comes to with it."""
    cases = {
        "residual": burnish.compile(residual(), optimizer="sgd:lr=0.05,momentum=0.9", running_variance="pytorch"),
        # A gradient that is 0 but for rounding would move a weight by the learning rate, were Adam's epsilon as small as it is.
        "inverted": burnish.compile(
            inverted_residual(dropout=True),
            loss="cross_entropy:label_smoothing=0.1",
            optimizer=burnish.optim.chain(burnish.optim.clip_by_global_norm(0.5), burnish.optim.adam(lr=0.01, eps=1e-3)),
        ),
        "class weights": burnish.compile(
            residual(),
            loss=burnish.losses.cross_entropy(weight=[0.2, 3.0, 1.0, 0.0, 2.0]),
            optimizer="sgd:lr=0.05,momentum=0.9",
            metrics=("accuracy",),
        ),
        "class weights, smoothed, one class ignored": burnish.compile(
            inverted_residual(dropout=True),
            loss=burnish.losses.cross_entropy(weight=[0.2, 3.0, 1.0, 0.5, 2.0], label_smoothing=0.2, ignore_index=3),
            optimizer="sgd:lr=0.05,momentum=0.9",
        ),
    }
    batches = image_batches(STEPS, SAMPLES)
    batches[3]["labels"][0] = 3  # the one sample of the first of 2 workers: all that it has weighs nothing
    folder = tmp_path_factory.mktemp("programs")
    saved = {name: str(program.save(folder / name)) for name, program in cases.items()}
    # Attributes have the digits of float32 in a file, which the workers read: so does the one process.
    return {name: (path, batches, train_alone(burnish.Program.load(path), batches)) for name, path in saved.items()}


@pytest.mark.slow
@diagonal(
    ("workers", [1, 2, 3, 4]),
    ("name", ["residual", "inverted", "class weights", "class weights, smoothed, one class ignored"]),
)
def test_workers_with_uneven_and_empty_parts(pool, trained_alone, name, workers):
    saved, batches, alone = trained_alone[name]
    outcomes = pool.run(workers, train_part, saved, batches, SIZES[workers], {})
    for outcome in outcomes:
        assert largest_difference(outcome, alone) < 1e-10
    for name, array in outcomes[0][1][-1].items():
        for other in outcomes[1:]:
            assert array.tobytes() == other[1][-1][name].tobytes(), f"{name} is not the same bits on all workers"
