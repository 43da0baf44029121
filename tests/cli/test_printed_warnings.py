"""Warnings as commands print them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import onnx
import pytest

from burnish.cli.console import warn_with_rank, warnings_in_words
from burnish.errors import ObjectiveWarning

TAGGER = (
    '<ir_version: 8, opset_import: ["": 18]> g (float[N, 3, 4] x) => (float[N, 3, 3] y) '
    "<float[4, 3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1}> { y = MatMul(x, w) }"
)


def printed(category: type[Warning]) -> str:
    return warnings.formatwarning(category("what is said"), category, __file__, 1)


def test_own_warnings_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = printed(ObjectiveWarning)
    with warnings_in_words():
        assert printed(ObjectiveWarning) == "warning: what is said\n"
        assert "DeprecationWarning: what is said" in printed(DeprecationWarning)
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
        warn_with_rank(1)
        assert printed(ObjectiveWarning) == "[rank 1] warning: what is said\n"
    assert printed(ObjectiveWarning) == plain


@pytest.mark.slow
def test_a_command_prints_them_so(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(TAGGER), tmp_path / "tagger.onnx")
    command = [sys.executable, "-m", "burnish", "compile", "tagger.onnx", "-o"]
    said = [
        subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=True).stderr
        for more in (["program"], ["another", "--debug"])
    ]
    assert said[0].startswith("warning: the loss cross_entropy reads classes along axis 1 of 'y'")
    assert len(said[0].splitlines()) == 1
    assert "ObjectiveWarning: the loss cross_entropy reads" in said[1]
