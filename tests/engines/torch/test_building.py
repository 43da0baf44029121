"""How the kernels are built: once per source, whole or not at all, by processes that may want them at the same time."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from burnish.engines.torch.kernels import building

needs_compiler = pytest.mark.skipif(building.find_compiler() is None, reason="needs a C++ compiler")
ONE = 'extern "C" int one() { return 1; }\n'
TWO = '#include "shared.h"\nextern "C" int two() { return 1 + SHARED; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text(ONE)
    (sources / "two.cpp").write_text(TWO)
    (sources / "shared.h").write_text("#define SHARED 1\n")
    return sources


def names(folder, pattern):
    return {path.name for path in (folder.parent / "cache" / "burnish").glob(pattern)}


@needs_compiler
def test_only_what_changed_is_compiled_again(folder):
    one, two = folder / "one.cpp", folder / "two.cpp"
    first, second = building.build_library(one), building.build_library(two)
    assert ctypes.CDLL(str(first)).one() == 1
    assert ctypes.CDLL(str(second)).two() == 2
    assert not names(folder, "building_*")
    one.write_text(ONE.replace("return 1", "return 10"))
    changed = building.build_library(one)
    assert changed != first
    assert ctypes.CDLL(str(changed)).one() == 10
    assert building.build_library(two) == second
    (folder / "shared.h").write_text("#define SHARED 5\n")
    assert ctypes.CDLL(str(building.build_library(two))).two() == 6
    assert len(names(folder, "*.so")) == 4


@needs_compiler
def test_a_refused_file_is_named_and_leaves_nothing(folder):
    (folder / "two.cpp").write_text("int two() { return three(); }\n")
    with pytest.raises(RuntimeError, match=r"two\.cpp:1:20: error: .three. was not declared"):
        building.build_library(folder / "two.cpp")
    assert not names(folder, "*.so")
    assert not names(folder, "building_*")


@needs_compiler
def test_processes_that_build_at_once_find_the_same_library(folder):
    program = (
        "import sys; from pathlib import Path; from burnish.engines.torch.kernels.building import build_library;"
        "print(build_library(Path(sys.argv[1])))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(folder / "two.cpp")], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    libraries = {process.communicate(timeout=300)[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(libraries) == 1
    assert ctypes.CDLL(libraries.pop()).two() == 2
    assert len(names(folder, "*.so")) == 1


def test_another_compiler_builds_another_library(folder, monkeypatch):
    here = building._circumstances.__wrapped__(sys.executable)
    monkeypatch.setattr(building.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "another version", ""))
    assert building._circumstances.__wrapped__(sys.executable) != here


def test_without_a_compiler_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(building, "find_compiler", lambda: None)
    with pytest.raises(RuntimeError, match=r"there is no C\+\+ compiler: install g\+\+ or clang\+\+, or name one in CXX"):
        building.build_library(folder / "two.cpp")


def test_an_older_pytorch_is_named(folder, monkeypatch):
    monkeypatch.setattr(building.torch, "__version__", "2.9.1+cpu")
    with pytest.raises(RuntimeError, match=r"they need PyTorch 2\.10 or later, and this is 2\.9\.1"):
        building.build_library(folder / "two.cpp")
