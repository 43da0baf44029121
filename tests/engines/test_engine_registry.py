"""Finding engines by name."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from burnish import engines
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.reference import ReferenceEngine
from burnish.errors import EngineError


class ThirdPartyEngine(ReferenceEngine):
    name = "third"


class NotAnEngine:
    pass


@pytest.fixture
def entry_points(monkeypatch):
    """Install entry points of the group, given as {name: 'module:attribute'}."""

    def install(values):
        real = importlib.metadata.entry_points

        def entry_points(**selection):
            if selection.get("group") != "burnish.engines":
                return real(**selection)
            points = [importlib.metadata.EntryPoint(name, value, "burnish.engines") for name, value in values.items()]
            return importlib.metadata.EntryPoints(points).select(**selection)

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    return install


def test_auto_is_onnxruntime():
    assert isinstance(engines.get(), OnnxRuntimeEngine)
    assert isinstance(engines.get("auto"), OnnxRuntimeEngine)


def test_engines_are_found_by_name():
    assert isinstance(engines.get("onnxruntime"), OnnxRuntimeEngine)
    assert isinstance(engines.get("reference"), ReferenceEngine)
    assert engines.available()[:2] == ("onnxruntime", "reference")


def test_an_engine_object_is_used_as_it_is():
    engine = OnnxRuntimeEngine("basic")
    assert engines.get(engine) is engine


def test_an_unknown_engine_lists_what_is_there():
    with pytest.raises(
        EngineError, match=r"no engine 'onxruntime' \(did you mean 'onnxruntime'\?\)\. Choose among onnxruntime, reference"
    ):
        engines.get("onxruntime")


@pytest.mark.parametrize("thing", [42, None, NotAnEngine(), OnnxRuntimeEngine])
def test_something_that_is_no_engine_is_refused(thing):
    with pytest.raises(EngineError, match=r"is not an engine: give one of onnxruntime, reference"):
        engines.get(thing)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "burnish.engines.onnxruntime")
    with pytest.raises(EngineError, match=r"'onnxruntime' cannot be loaded: .*pip install onnxruntime"):
        engines.get("auto")


def test_a_third_party_registers_an_engine(entry_points):
    entry_points({"third": f"{__name__}:ThirdPartyEngine"})
    assert engines.get("third").name == "third"
    assert engines.available() == ("onnxruntime", "reference", "torch", "third")


def test_a_third_party_that_is_no_engine_is_refused(entry_points):
    entry_points({"broken": f"{__name__}:NotAnEngine"})
    with pytest.raises(EngineError, match=r"'broken' is registered as .*lacks name, target, open or load.*update the package"):
        engines.get("broken")


def test_a_third_party_that_cannot_be_imported_is_named(entry_points):
    entry_points({"gone": "package_that_is_not_there:Engine"})
    with pytest.raises(
        EngineError,
        match=r"'gone' cannot be loaded.*pip install package_that_is_not_there.*choose another: onnxruntime, reference, torch$",
    ):
        engines.get("gone")


def test_an_unknown_option_of_the_engine_is_refused():
    with pytest.raises(EngineError, match=r"optimization='most' is not one of none, basic, extended, all"):
        OnnxRuntimeEngine("most")
    with pytest.raises(EngineError, match=r"arena='big' is not one of"):
        OnnxRuntimeEngine(arena="big")
