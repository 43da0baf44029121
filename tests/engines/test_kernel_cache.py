"""A library of kernels in the cache is loaded only if nobody else could have written it, and only if it is whole."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import warnings

import numpy as np
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine, kernels
from burnish.errors import ConfigurationError, KernelWarning
from burnish.kernels import building, compiling

needs_compiler = pytest.mark.skipif(compiling.find_compiler() is None, reason="needs a C++ compiler")
needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs files with owners")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs files of another user")
pytestmark = needs_compiler

MODEL = """<ir_version: 10, opset_import: ["": 18]>
g (float[b,2] x) => (float[b,2] y) <float[2,2] w = {1,2,3,4}> { y = MatMul(x, w) }"""
SOURCE = 'extern "C" [[gnu::visibility("default")]] int one() { return 1; }\n'
# A library that would say so if it were loaded.
PLANTED = 'extern "C" __attribute__((constructor)) void planted() { fclose(fopen("MARK", "w")); }\n'


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "BUILT", tmp_path / "nothing-installed")
    (tmp_path / "sources").mkdir()
    file = tmp_path / "sources" / "one.cpp"
    file.write_text(SOURCE)
    return file


def loosened(place, how):
    if how == "all may write":
        place.chmod(0o777)
    elif how == "the group may write":
        place.chmod(place.stat().st_mode | 0o020)
    elif how == "another user's":
        os.chown(place, 65534, 65534)
    else:
        moved = place.with_name("moved")
        place.rename(moved)
        place.symlink_to(moved)


PLACES = {"file": 0, "folder": 1, "root": 2}


@needs_owners
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("all may write", "can be written by other users, so nothing is loaded from there: empty it, and take that right away"),
        ("the group may write", "can be written by other users"),
        pytest.param(
            "another user's", "belongs to another user, .* name a folder of your own in BURNISH_CACHE", marks=needs_root
        ),
    ],
)
def test_a_library_that_others_could_have_written_is_not_loaded(source, place, how, message):
    library = building.build_library(source)
    assert building.find_built(source) == library
    loosened([library, *library.parents][PLACES[place]], how)
    for find in (building.find_built, building.build_library):
        with pytest.raises(PermissionError, match=message):
            find(source)


@needs_owners
@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_link_in_the_cache_is_not_followed(source, place):
    library = building.build_library(source)
    loosened([library, library.parent][PLACES[place]], "a link")
    with pytest.raises(PermissionError, match=r"is a symbolic link.* remove it \(rm '"):
        building.find_built(source)


@needs_owners
def test_nothing_is_built_in_a_cache_that_others_can_write_until_the_remedy_is_taken(source):
    folder = building.cache_folder()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=r"chmod go-w '") as caught:
        building.build_library(source)
    command = str(caught.value).partition("(")[2].rstrip(")")
    assert os.system(command) == 0
    assert ctypes.CDLL(str(building.build_library(source))).one() == 1


@needs_owners
def test_a_cache_is_for_its_user_alone_whatever_the_umask(source):
    before = os.umask(0)
    try:
        library = building.build_library(source)
    finally:
        os.umask(before)
    assert building.find_built(source) == library
    assert building.cache_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "half", "other bytes", "without its digest", "another digest"])
def test_a_damaged_library_is_built_again(source, damage):
    library = building.build_library(source)
    good = library.read_bytes()
    digest = library.with_suffix(".sha256")
    if damage == "without its digest":
        digest.unlink()
    elif damage == "another digest":
        digest.write_bytes(b"\xff" * 64)
    else:
        # Not in place: the test's own process may have the file mapped.
        library.unlink()
        library.write_bytes({"empty": b"", "half": good[: len(good) // 2], "other bytes": b"other" * 1000}[damage])
    assert building.find_built(source) == library
    assert library.with_suffix(".sha256").read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    assert len(library.read_bytes()) == len(good)


def test_a_user_without_a_home_still_finds_what_is_installed(monkeypatch, tmp_path):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("BURNISH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    expected = building.find_installed(kernels.SOURCE)
    monkeypatch.setattr(building.Path, "home", nowhere)
    monkeypatch.setattr(building.tempfile, "gettempdir", lambda: str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.find_library().path == expected
    assert building.cache_folder().is_relative_to(tmp_path)


def session():
    program = burnish.compile(burnish_model(), loss="mse", optimizer="sgd")
    return burnish.Session(program)


def burnish_model():
    import onnx

    return onnx.parser.parse_model(MODEL)


BATCH = {"x": np.ones((2, 2), np.float32), "targets": np.ones((2, 2), np.float32)}


@needs_owners
def test_a_session_runs_standard_operators_in_place_of_a_planted_library(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "BUILT", tmp_path / "nothing-installed")
    mark = tmp_path / "ran"
    planted = tmp_path / "planted.cpp"
    planted.write_text("#include <cstdio>\n" + PLANTED.replace("MARK", str(mark)))
    built = building.build_library(planted)
    compiler, contents = compiling.find_compiler(), compiling.contents_of(kernels.SOURCE)
    target = building._in_cache(kernels.SOURCE, (), (), compiler, contents)
    built.rename(target)
    built.with_suffix(".sha256").rename(target.with_suffix(".sha256"))
    target.parent.chmod(0o777)
    with pytest.warns(KernelWarning, match="can be written by other users.*Standard operators run instead"):
        opened = session()
    assert opened.describe()["kernels"] is None
    assert "can be written by other users" in opened.describe()["kernels_reason"]
    assert np.isfinite(opened.step(BATCH)["loss"])
    assert not mark.exists()
    target.parent.chmod(0o700)  # what has nothing of ONNX Runtime's in it is loaded now, and refused by name
    with pytest.warns(KernelWarning, match=r"cannot load the kernels in '.*install burnish again"):
        assert np.isfinite(session().step(BATCH)["loss"])
    assert mark.exists()


def test_missing_kernels_are_told_once_with_a_remedy_that_works(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "BUILT", tmp_path / "nothing-installed")
    monkeypatch.delenv("BURNISH_KERNELS", raising=False)
    kernels.tell_of_missing.cache_clear()
    for _ in range(2):
        opened = session()
        assert opened.describe()["kernels"] is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("burnish: kernels are missing (no library for this processor (")
    assert "came with the installation), so steps take up to three times as long. " in line
    assert line.endswith(
        "Build them once with OnnxRuntimeEngine(kernels=True) or --kernels. BURNISH_KERNELS=off hides this line."
    )
    kernels.tell_of_missing.cache_clear()
    monkeypatch.setattr(compiling, "find_compiler", lambda: None)
    session()
    (line,) = capfd.readouterr().err.splitlines()
    assert "and there is no C++ compiler), so" in line
    assert "Install g++ or clang++, and build them once with" in line
    kernels.tell_of_missing.cache_clear()
    monkeypatch.setenv("BURNISH_KERNELS", "off")
    assert session().describe()["kernels_reason"] == "BURNISH_KERNELS=off switches them off"
    OnnxRuntimeEngine(kernels=False)
    assert not capfd.readouterr().err
    monkeypatch.setenv("BURNISH_KERNELS", "OFF")
    with pytest.raises(ConfigurationError, match="BURNISH_KERNELS is 'OFF' in the environment: write off, or leave it out"):
        session()


@pytest.mark.slow
def test_the_remedy_for_missing_kernels_brings_them(tmp_path, monkeypatch, capfd):
    installed = session()  # its library stays loaded, and the new one must not share anything with it
    assert np.isfinite(installed.step(BATCH)["loss"])
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "BUILT", tmp_path / "nothing-installed")
    kernels.tell_of_missing.cache_clear()
    OnnxRuntimeEngine(kernels=True)
    opened = session()
    assert opened.describe()["kernels"].startswith(str(tmp_path))
    assert not capfd.readouterr().err
    assert np.isfinite(opened.step(BATCH)["loss"])
    assert np.isfinite(installed.step(BATCH)["loss"])


@pytest.mark.campaign
def test_kernels_that_were_cut_off_are_built_again(tmp_path, monkeypatch):
    """As ``test_a_damaged_library_is_built_again`` with the kernels themselves, which take half a minute."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "BUILT", tmp_path / "nothing-installed")
    OnnxRuntimeEngine(kernels=True)
    library = building.find_built(kernels.SOURCE)
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[: len(content) // 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(session().step(BATCH)["loss"])
    assert len(library.read_bytes()) == len(content)


@pytest.mark.skipif(sys.platform == "win32", reason="needs kernels")
def test_a_session_says_what_it_runs_on():
    engine = OnnxRuntimeEngine(kernels=True)
    program = burnish.compile(burnish_model(), loss="mse", optimizer="sgd")
    with burnish.Session(program, engine, threads=1) as opened:
        opened.step(BATCH)
        level = compiling.cpu_level()
        assert opened.describe() == {
            "engine": "onnxruntime",
            "kernels": str(engine.kernels),
            "kernels_reason": None,
            "level": level,
            "threads": 1,
            "precision": "float32",
            "route": "one graph, with two buffers for the state",
        }
        assert repr(opened) == f"Session(onnxruntime, kernels={level}, threads=1, step=1)"
    assert opened.describe()["route"] is None
    assert repr(opened) == f"Session(onnxruntime, kernels={level}, threads=1, step=1)"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kernels": False}, "kernels=False goes without them"),
        ({"optimization": "none"}, "optimization='none' runs the nodes of a graph as they are"),
        ({"providers": ["AzureExecutionProvider"]}, "they are for the CPU, and AzureExecutionProvider comes first"),
    ],
)
def test_a_session_says_why_it_runs_no_kernels(options, reason):
    opened = burnish.Session(burnish.compile(burnish_model(), loss="mse", optimizer="sgd"), OnnxRuntimeEngine(**options))
    assert opened.describe()["kernels"] is None
    assert opened.describe()["kernels_reason"] == reason
    assert repr(opened).startswith("Session(onnxruntime, kernels=none, ")


def test_an_engine_of_another_package_says_nothing_and_is_described():
    from burnish.engines.reference import ReferenceEngine

    opened = burnish.Session(burnish.compile(burnish_model(), loss="mse", optimizer="sgd"), ReferenceEngine(), threads=3)
    described = opened.describe()
    assert (described["engine"], described["kernels"], described["threads"]) == ("reference", None, 3)
    assert described["kernels_reason"] == "this engine has none"
