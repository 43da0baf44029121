"""Cached features of a frozen backbone in the C client, beside Python's session: the same bits, and each sample computed once."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import c_library
import numpy as np
import programs
import pytest

import burnish
from burnish.models import residual_network
from burnish.program import Program
from oracles.same_state import assert_same_state
from oracles.standard_operators import STANDARD

reason = c_library.missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

SAMPLES, BATCH, CLASSES = 24, 8, 5


@functools.cache
def program() -> Program:
    model = residual_network(width=4, classes=CLASSES, blocks=(1, 1))
    optimizer = burnish.optim.adamw(lr=0.05)
    return burnish.compile(model, trainable=["classifier*"], cached_features="auto", optimizer=optimizer)


@functools.cache
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, SAMPLES)
    x = rng.standard_normal((SAMPLES, 1, 8, 8)) + 0.5 * (labels[:, None, None, None] - 2)
    return {"x": x.astype(np.float32), "labels": labels}


def part(samples: list[int]) -> dict[str, np.ndarray]:
    return {name: array[samples] for name, array in data().items()}


BATCHES = [list(range(begin, begin + BATCH)) for begin in range(0, SAMPLES, BATCH)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cached") / "program"
    program().save(path)
    return path


@pytest.fixture(scope="module")
def open_session(folder, tmp_path_factory) -> Iterator[Callable[[], c_library.Session]]:
    client = c_library.Client(c_library.build(tmp_path_factory.mktemp("c"), "libburnish.so"))
    opened = []

    def one(path: Path = folder) -> c_library.Session:
        opened.append(client.open(path))
        return opened[-1]

    yield one
    for session in opened:
        session.close()


def test_two_epochs_are_pythons_bit_for_bit_and_run_the_backbone_in_the_first(open_session, tmp_path):
    ours, theirs = open_session(), burnish.Session(program(), engine=STANDARD, threads=1)
    cache = ours.cache()
    for epoch in range(2):
        for samples in BATCHES:
            batch = part(samples)
            expected = theirs.features({"x": batch["x"]})
            assert cache.has(samples) == (epoch == 1)
            features = cache.features(samples, batch if epoch == 0 else None)
            assert_same_state(features, expected)
            assert_same_state(ours.features(batch), expected)
            labelled = {**features, "labels": batch["labels"]}
            assert {name: value.item() for name, value in ours.step(labelled).items()} == theirs.step(labelled)
    assert cache.computed == SAMPLES
    assert_same_state(ours.state(), theirs.state())
    assert_same_state(ours.predict(part(BATCHES[0])), theirs.predict({"x": part(BATCHES[0])["x"]}))
    ours.save(tmp_path / "c.safetensors")
    theirs.save_checkpoint(tmp_path / "python.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "python.safetensors").read_bytes()
    ours.export(tmp_path / "c.onnx")
    theirs.export(tmp_path / "python.onnx", fold_norm=False)
    assert (tmp_path / "c.onnx").stat().st_size == pytest.approx((tmp_path / "python.onnx").stat().st_size, rel=0.1)
    cache.close()


def test_features_are_kept_up_to_a_limit_and_put_together_in_any_order(open_session):
    session = open_session()
    (feature,) = session.features(part([0]))
    expected = session.features(part(list(range(SAMPLES))))[feature]
    cache = session.cache(limit=10 * expected[0].nbytes)
    for samples in BATCHES[:2]:
        cache.features(samples, part(samples))
    assert (cache.computed, cache.has(list(range(10))), cache.has([10])) == (16, True, False)
    mixed = [12, 3, 9, 3, 20, 12]
    np.testing.assert_allclose(cache.features(mixed, part(mixed))[feature], expected[mixed], rtol=1e-5, atol=1e-6)
    assert cache.computed == 18  # 12 and 20, each once
    larger = list(range(SAMPLES))
    np.testing.assert_allclose(cache.features(larger, part(larger))[feature], expected, rtol=1e-5, atol=1e-6)
    cache.close()
    whole = session.cache()
    many = np.random.default_rng(1).permutation(300)  # more samples than the table begins with
    for begin in range(0, 300, 50):
        samples = many[begin : begin + 50].tolist()
        whole.features(samples, part([sample % SAMPLES for sample in samples]))
    assert whole.has(list(range(300)))
    np.testing.assert_allclose(whole.features(many.tolist())[feature], expected[many % SAMPLES], rtol=1e-5, atol=1e-6)
    assert whole.computed == 300
    whole.close()


def test_what_is_wrong_is_named(open_session, tmp_path):
    session = open_session()
    cache = session.cache()
    for samples, batch, message in (
        ([0, -1], part([0, 1]), r"InputError: The number of a sample is -1"),
        ([], {}, r"InputError: There are no samples"),
        ([0, 1], part([0]), r"InputError: '(x|labels)' does not have one entry for each of 2 samples"),
        ([0], {"labels": part([0])["labels"]}, r"InputError: The batch lacks the input 'x'"),
        ([0], {**part([0]), "y": np.zeros(1)}, r"InputError: The batch has an unexpected input 'y'"),
    ):
        with pytest.raises(c_library.ClientError, match=message):
            cache.features(samples, batch)
    assert cache.computed == 0
    cache.close()
    with pytest.raises(c_library.ClientError, match=r"InputError: .* 'x', in whose place .*: give what burnish_features or"):
        session.step(part([0, 1]))
    programs.program("dropout")[0].save(tmp_path / "plain")
    plain = open_session(tmp_path / "plain")
    for wrong in (plain.cache, lambda: plain.features({})):
        with pytest.raises(c_library.ClientError, match=r"ConfigurationError: .* compile it with --cached-features auto"):
            wrong()


@pytest.mark.slow
def test_a_package_trains_from_cached_features(tmp_path):
    program().package(tmp_path / "board", runtime="c")
    assert "--data x=x.npy --data labels=labels.npy" in (tmp_path / "board" / "README.md").read_text()
    assert (tmp_path / "board" / "models" / "features.ort").exists()
    trainer = c_library.build(tmp_path, "train", c_library.SOURCES / "main.c", flags=c_library.SANITIZED)
    command = [trainer, tmp_path / "board" / "program", "--batch", str(BATCH), "--steps", "6", "--threads", "1"]
    for name, array in data().items():
        np.save(tmp_path / f"{name}.npy", array)
        command += ["--data", f"{name}={tmp_path / name}.npy"]
    with burnish.Session(program(), engine=STANDARD, threads=1) as session:
        batches = [part(samples) for samples in BATCHES]
        expected = [
            session.step({**session.features({"x": batch["x"]}), "labels": batch["labels"]})["loss"] for batch in 2 * batches
        ]
    for models in ([], ["--models", tmp_path / "board" / "models"]):
        done = subprocess.run([*command, *models], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
        np.testing.assert_allclose(np.float32(losses), np.float32(expected), rtol=1e-5 if models else 0)
