"""Distributions: the files of the source distribution, tags of wheels, kernels that load on older systems, refused builds.

``make release-candidate`` builds the files, ``make test-wheels`` installs and tries each of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from burnish.kernels import compiling

PROJECT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernels are installed on Linux alone"),
    pytest.mark.skipif(not (PROJECT / "setup.py").exists(), reason="needs the project's sources"),
]
needs_compiler = pytest.mark.skipif(compiling.find_compiler() is None, reason="needs a C++ compiler")
CALLS = """
#include <cmath>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

extern "C" [[gnu::visibility("default")]] double powers(double x) {
  return std::exp(x) * std::exp2(x) * std::log(x) * std::log2(x) * std::pow(x, x);
}

// Copies and drops references to one exception, as loops on several threads do.
extern "C" [[gnu::visibility("default")]] int caught(const char* text) {
  std::exception_ptr first;
  try {
    throw std::runtime_error(text);
  } catch (...) {
    first = std::current_exception();
  }
  for (int i = 0; i < 3; ++i) std::exception_ptr copy = first;
  std::shared_ptr<int> shared = std::make_shared<int>(2), other = shared;
  try {
    std::rethrow_exception(first);
  } catch (const std::exception& error) {
    return *other + static_cast<int>(std::string(error.what()).size());
  }
}

extern "C" [[gnu::visibility("default")]] bool refused(long count) {
  try {
    return !std::allocator<double>().allocate(static_cast<size_t>(count));
  } catch (const std::bad_alloc&) {
    return true;
  }
}
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the files that distributions are made of, to build in."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ("src", "clients", "wheels", "tests/wheels"):
        ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", "built", "node_modules", ".*")
        if (PROJECT / path).exists():
            shutil.copytree(PROJECT / path, folder / path, ignore=ignored)
    (folder / "tests").mkdir(exist_ok=True)
    shutil.copy(__file__, folder / "tests")
    for file in (path for path in PROJECT.iterdir() if path.is_file()):
        shutil.copy(file, folder)
    return folder


def run(folder: Path, *arguments: str, path: str | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with no compiler that its environment names."""
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | settings
    environment |= {} if path is None else {"PATH": path}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def build(folder: Path, what: str, **settings: str) -> Path:
    """Build with the setuptools of this environment: pip and build would fetch one."""
    pytest.importorskip("setuptools", minversion="77")
    done = run(folder, "-c", f"from setuptools import build_meta; print(build_meta.build_{what}('built'))", **settings)
    assert done.returncode == 0, done.stderr
    return folder / "built" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    """The source distribution, unpacked."""
    with tarfile.open(build(checkout, "sdist", BURNISH_INSTALLED_KERNELS="none")) as archive:
        folder = tmp_path_factory.mktemp("unpacked")
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def files_in(folder: Path) -> set[str]:
    """The files in a folder, but for the bytecode that Python keeps next to what it imports."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.slow
def test_the_source_distribution_has_all_that_is_built_and_no_tests(checkout, sdist):
    files = files_in(sdist)
    package = {f"src/burnish/{name}" for name in files_in(checkout / "src" / "burnish")}
    assert {f"src/burnish/{name}" for name in ("py.typed", "kernels/tensor.h", "training/html_report/style.css")} <= package
    assert package - files == set()
    clients = {f"clients/c/{name}" for name in files_in(checkout / "clients" / "c")}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py", "wheels/older_systems.cpp", *clients} <= files
    assert [name for name in files if name.startswith("tests")] == []


@pytest.mark.slow
def test_a_wheel_without_kernels_is_for_every_system(checkout, sdist):
    wheel = build(sdist, "wheel", BURNISH_INSTALLED_KERNELS="none")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"burnish/{name}" for name in files_in(checkout / "src" / "burnish")} <= names
    assert "burnish/engines/onnxruntime/c_client/burnish.c" in names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.slow
def test_kernels_for_another_kind_of_machine_are_of_its_levels():
    pytest.importorskip("setuptools", minversion="77")
    script = (
        "import setuptools; from distutils.core import run_setup; distribution = run_setup('setup.py', stop_after='init');"
        "wheel = distribution.get_command_obj('bdist_wheel'); wheel.ensure_finalized();"
        "print(*wheel.get_tag(), *{extension.instructions.name for extension in distribution.ext_modules})"
    )
    done = run(PROJECT, "-c", script, BURNISH_INSTALLED_KERNELS="portable", _PYTHON_HOST_PLATFORM="linux-aarch64")
    assert done.stdout.split() == ["py3", "none", "linux_aarch64", "armv8-a"], done.stderr


@pytest.mark.slow
def test_this_machines_instructions_are_refused_for_another_kind_of_machine():
    other = "x86_64" if compiling.platform.machine() == "aarch64" else "aarch64"
    pytest.importorskip("setuptools", minversion="77")
    settings = {"BURNISH_INSTALLED_KERNELS": "native", "_PYTHON_HOST_PLATFORM": f"linux-{other}"}
    done = run(PROJECT, "setup.py", "--version", **settings)
    assert done.returncode == 1
    assert "BURNISH_INSTALLED_KERNELS names native: give none, or some of " in done.stderr


@pytest.fixture
def small(tmp_path, checkout):
    """A project with one kernel without headers."""
    for name in ("setup.py", "README.md", "src/burnish/version.py", "wheels/older_systems.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, tmp_path / name)
    kernels = tmp_path / "src" / "burnish" / "kernels"
    kernels.mkdir(parents=True)
    shutil.copy(compiling.KERNELS / "compiling.py", kernels)
    kernel = tmp_path / "src" / "burnish" / "engines" / "onnxruntime" / "native" / "kernel.cpp"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(CALLS)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "one"\ndynamic = ["version", "readme"]\n')
    return kernel


def install(folder: Path, kernels: str | None, **settings: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    pytest.importorskip("setuptools", minversion="77")
    named = {} if kernels is None else {"BURNISH_INSTALLED_KERNELS": kernels}
    done = run(folder, "setup.py", "build_ext", "--build-lib", "out", **named, **settings)
    return done, sorted((folder / "out").rglob("*.so"))


@pytest.mark.slow
def test_kernels_that_are_named_need_a_compiler_and_others_do_not(small, tmp_path):
    done, _ = install(tmp_path, "native", path="")
    assert done.returncode == 1
    expected = "there is no C++ compiler for BURNISH_INSTALLED_KERNELS=native: install g++, or name one in CXX"
    assert expected in done.stderr
    done, built = install(tmp_path, None, path="")
    assert done.returncode == 0, done.stderr
    assert "there is no C++ compiler: kernels are not built" in done.stdout + done.stderr
    assert built == []


@pytest.mark.slow
@needs_compiler
def test_a_kernel_that_is_named_and_refused_is_an_error_and_another_a_warning(small, tmp_path):
    small.write_text("int one() { return three(); }\n")
    done, _ = install(tmp_path, "native")
    assert done.returncode == 1
    assert re.search(r"kernel\.cpp could not be built: .*error: .three. was not declared", done.stderr)
    done, built = install(tmp_path, None)
    assert done.returncode == 0, done.stderr
    assert "kernel.cpp could not be built" in done.stdout + done.stderr
    assert built == []


LEVELS = [level.name for level in compiling.LEVELS if level.machine == compiling.platform.machine()]


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(len(LEVELS) < 2, reason="needs a kind of processor with several levels")
def test_levels_share_a_library_where_instructions_make_no_difference(small, tmp_path):
    small.write_text('extern "C" [[gnu::visibility("default")]] int one() { return 1; }\n')
    better, lesser = LEVELS[:2]
    _, (expected,) = install(tmp_path, lesser)
    shutil.rmtree(tmp_path / "out")
    done, built = install(tmp_path, f"{lesser},{better}")
    assert done.returncode == 0, done.stderr
    assert built == [expected]
    small.write_text(
        'extern "C" [[gnu::visibility("default")]] int one() {\n#ifdef __AVX512BF16__\n  return 2;\n#endif\n  return 1;\n}\n'
    )
    shutil.rmtree(tmp_path / "out")
    _, built = install(tmp_path, f"{lesser},{better}")
    assert len(built) == 2


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump, which comes with compilers")
def test_a_kernel_of_a_wheel_calls_no_function_that_older_systems_lack(small, tmp_path):
    done, (*_, library) = install(tmp_path, LEVELS[-1])
    assert done.returncode == 0, done.stderr
    symbols = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
    versions = re.findall(r"\((GLIBC|GLIBCXX|CXXABI)_([\d.]+)\)", symbols)
    assert {kind for kind, _ in versions} == set(newest)
    assert [found for kind, found in versions if tuple(map(int, found.split("."))) > newest[kind]] == []
    loaded = ctypes.CDLL(str(library))
    loaded.powers.restype, loaded.powers.argtypes = ctypes.c_double, [ctypes.c_double]
    assert loaded.powers(3.0) == pytest.approx(math.exp(3) * 2**3 * math.log(3) * math.log2(3) * 3**3, rel=1e-14)
    assert loaded.caught(b"four") == 6
    loaded.refused.restype, loaded.refused.argtypes = ctypes.c_bool, [ctypes.c_long]
    assert loaded.refused(2**62)


def module(name: str):
    specification = importlib.util.spec_from_file_location(f"wheels_{name}", PROJECT / "wheels" / f"{name}.py")
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = loaded
    specification.loader.exec_module(loaded)
    return loaded


def test_a_kind_of_wheel_that_there_is_not_is_named():
    with pytest.raises(SystemExit, match=r"^riscv: give some of sdist, x86_64, aarch64, any, or nothing for all$"):
        module("build").main("riscv")


def test_a_missing_compiler_for_another_kind_of_machine_is_named(monkeypatch, tmp_path):
    building = module("build")
    monkeypatch.setattr(building, "CROSS_COMPILERS", {"aarch64": tmp_path / "arm-c++"})
    monkeypatch.setattr(building.platform, "machine", lambda: "x86_64")
    with pytest.raises(
        SystemExit, match=r"there is no compiler here for aarch64: build on such a machine, or .* run make test-arm"
    ):
        building.build_wheel(tmp_path / "burnish.tar.gz", "aarch64")


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ({"sym_tag": "manylinux_2_34_x86_64"}, r"a\.whl needs a newer system than glibc 2\.28: manylinux_2_34_x86_64, \{'libc"),
        ({"sym_tag": "linux_x86_64"}, "needs a newer system"),
        ({"external_libs": {"libtorch_cpu.so": None, "libz3.so": None}}, "needs libraries that no package brings: libz3.so$"),
        ({}, None),
    ],
)
def test_a_wheel_for_newer_systems_or_with_missing_libraries_is_refused(shown, message, monkeypatch):
    building = module("build")
    fine = {"sym_tag": "manylinux_2_27_x86_64", "external_libs": {"libc10.so": None}, "versioned_symbols": {"libc.so.6": []}}
    output = subprocess.CompletedProcess([], 0, json.dumps(fine | shown))
    monkeypatch.setattr(building.subprocess, "run", lambda *_, **__: output)
    if message is None:
        building.hold_to_older_systems("a.whl")
    else:
        with pytest.raises(SystemExit, match=message):
            building.hold_to_older_systems("a.whl")


@pytest.mark.slow
def test_nothing_to_install_is_an_error(monkeypatch, tmp_path):
    trying = module("environments")
    monkeypatch.setattr(trying, "DIST", tmp_path)
    with pytest.raises(SystemExit, match="dist is empty: run make release-candidate first"):
        trying.main()
    (tmp_path / "burnish-1-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match="no environment has windows in its name"):
        trying.main("windows")
