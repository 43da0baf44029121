"""The rules that every client keeps: the table of vectors.json, in Python and in C. The JavaScript client's tests run it too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import c_library
import numpy as np
import pytest
import vectors

import burnish
from burnish.errors import BurnishError
from oracles.same_state import assert_same_state
from oracles.standard_operators import STANDARD

LANGUAGES = ("python", "c")
Batch = Mapping[str, np.ndarray]


class PythonClient:
    """A session of Python, as the table's calls reach it."""

    def __init__(self, folder: Path):
        self._session = burnish.Session(burnish.Program.load(folder), engine=STANDARD, threads=1)
        self.state, self.predict, self.save = self._session.state, self._session.predict, self._session.save_checkpoint
        self.restore, self.export, self.close = self._session.restore, self._session.export, self._session.close

    def step(self, batch: Batch, hyperparameters: Mapping[str, float]) -> float:
        return self._session.step(batch, **hyperparameters)["loss"]

    def evaluate(self, batch: Batch, average: bool) -> float:
        return self._session.evaluate(batch, "average" if average else None)["loss"]

    def write(self, entries: Batch) -> None:
        self._session.load_state({**self._session.state(), **entries})


class CClient:
    """A session of C, as the table's calls reach it."""

    def __init__(self, library: c_library.Client, folder: Path):
        self._session = library.open(folder)
        self.state, self.predict, self.save = self._session.state, self._session.predict, self._session.save
        self.restore, self.export, self.close = self._session.restore, self._session.export, self._session.close

    def step(self, batch: Batch, hyperparameters: Mapping[str, float]) -> float:
        for name, value in hyperparameters.items():
            self._session.set(name, value)
        return self._session.step(batch)["loss"].item()

    def evaluate(self, batch: Batch, average: bool) -> float:
        return self._session.evaluate(batch, c_library.AVERAGE if average else 0)["loss"].item()

    def write(self, entries: Batch) -> None:
        for name, array in entries.items():
            self._session.write_state(name, array)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with every program of the table."""
    folder = tmp_path_factory.mktemp("vectors")
    vectors.write_programs(folder)
    return folder


@pytest.fixture(scope="module", params=LANGUAGES)
def opened(request, saved, tmp_path_factory) -> Iterator[Any]:
    """Opens a program's session in one language."""
    if request.param == "c":
        if (reason := c_library.missing()) is not None:
            pytest.skip(reason)
        library = c_library.Client(c_library.build(tmp_path_factory.mktemp("c"), "libburnish.so"))
        yield lambda name: CClient(library, saved / name)
    else:
        yield lambda name: PythonClient(saved / name)


def array_map(described: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: vectors.array_of(array) for name, array in described.items()}


def changed_checkpoint(opened, row: Mapping[str, Any], folder: Path) -> Path:
    """Write the checkpoint that a row restores."""
    client = opened(row["change"].get("of", row["program"]))
    client.step(vectors.batch_of({"program": row["change"].get("of", row["program"])}), {})
    client.save(folder / "whole.safetensors")
    client.close()
    path = folder / "changed.safetensors"
    path.write_bytes(vectors.changed((folder / "whole.safetensors").read_bytes(), row["change"], c_library.restamped))
    return path


REFUSALS = [
    pytest.param(language, row, id=f"{language}-{row['name']}")
    for row in vectors.TABLE["refusals"]
    for language in LANGUAGES
    if language in row.get("in", LANGUAGES)
]


@pytest.mark.parametrize(("opened", "row"), REFUSALS, indirect=["opened"], scope="module")
def test_a_refusal_has_the_same_class_and_words_and_keeps_the_state(opened, tmp_path, row: Mapping[str, Any]) -> None:
    client = opened(row["program"])
    client.write(array_map(row.get("state", {})))
    before = client.state()
    match row["call"]:
        case "step":
            call = partial(client.step, vectors.batch_of(row), {k: float(v) for k, v in row.get("hyperparameters", {}).items()})
        case "evaluate":
            call = partial(client.evaluate, vectors.batch_of(row), row.get("average", False))
        case "predict":
            call = partial(client.predict, vectors.batch_of(row))
        case "write":
            call = partial(client.write, array_map(row["write"]))
        case "restore":
            call = partial(client.restore, changed_checkpoint(opened, row, tmp_path))
        case "save":
            place = tmp_path / row["at"]
            os.mkfifo(place) if row["at"] == "pipe" else place.mkdir()
            call = partial(client.save, place)
        case "export":
            call = partial(client.export, tmp_path / "tuned.onnx")
        case other:
            pytest.fail(f"there is no call {other!r}")
    with pytest.raises((BurnishError, c_library.ClientError)) as caught:
        call()
    kind = getattr(caught.value, "kind", type(caught.value).__name__)
    assert kind == row["error"], caught.value
    for text in row["says"]:
        assert text in str(caught.value)
    if row["call"] in ("save", "export"):
        left = {path.name: path.is_file() for path in tmp_path.iterdir()}
        assert left == ({row["at"]: False} if row["call"] == "save" else {})
    assert_same_state(client.state(), before)
    client.close()


@pytest.mark.parametrize("row", vectors.TABLE["runs"], ids=lambda row: row["name"])
def test_a_run_has_the_same_figures(opened, tmp_path, row: Mapping[str, Any]) -> None:
    client, batch = opened(row["program"]), vectors.batch_of(row)
    losses = [client.step(batch, hyperparameters) for hyperparameters in row["steps"]]
    client.save(tmp_path / "run.safetensors")
    resumed = opened(row["program"])
    resumed.restore(tmp_path / "run.safetensors")
    assert_same_state(resumed.state(), client.state())
    sums = {name: array.sum(dtype=np.float64) for name, array in resumed.state().items() if name.startswith("param/")}
    assert losses == pytest.approx(row["losses"], rel=1e-4)
    assert resumed.evaluate(batch, False) == pytest.approx(row["loss"], rel=1e-4)
    assert sums == pytest.approx(row["state"], rel=1e-4, abs=1e-4)
    for session in (client, resumed):
        session.close()
