"""Programs and checkpoints of earlier releases are read, and give the same results: docs/stability.md promises it."""

from __future__ import annotations

import json

import pytest

import burnish
from files.released_files import ANSWERS, CHECKPOINT, FOLDER, ONE_FILE, PROGRAM, answers, write

RELEASES = sorted(FOLDER.iterdir())


@pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)
@pytest.mark.parametrize("form", [PROGRAM, ONE_FILE])
def test_a_run_of_an_earlier_release_goes_on(release, form):
    session = burnish.Session(burnish.Program.load(release / form), engine="reference", seed=1)
    session.restore(release / CHECKPOINT)
    expected = json.loads((release / ANSWERS).read_text(encoding="utf-8"))
    found = answers(session)
    assert (found.pop("names"), found.pop("step")) == (expected.pop("names"), expected.pop("step"))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["logits"] == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in expected["logits"]]


def test_this_version_writes_the_format_that_it_reads(tmp_path):
    write(tmp_path / "own")
    manifest = json.loads((tmp_path / "own" / PROGRAM / "program.json").read_text(encoding="utf-8"))
    assert manifest["version"] == 3
    header = (tmp_path / "own" / CHECKPOINT).read_bytes()[8:]
    assert json.JSONDecoder().raw_decode(header.decode("utf-8", "ignore"))[0]["__metadata__"]["version"] == "3"
