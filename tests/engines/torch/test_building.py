"""How the kernels are built: ahead, where burnish is installed, or once per source, whole or not at all, by processes that may
want them at the same time.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.engines.torch import native as kernels
from burnish.kernels import building as shared_building
from burnish.kernels import compiling

PROJECT = Path(__file__).parents[3]
needs_compiler = pytest.mark.skipif(compiling.find_compiler() is None, reason="needs a C++ compiler")
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libraries are built ahead on Linux alone")
ONE = 'extern "C" [[gnu::visibility("default")]] int one() { return 1; }\n'
TWO = '#include "shared.h"\nextern "C" [[gnu::visibility("default")]] int two() { return 1 + SHARED; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "BUILT", tmp_path / "built")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text(ONE)
    (sources / "two.cpp").write_text(TWO)
    (sources / "shared.h").write_text("#define SHARED 1\n")
    return sources


def names(folder, pattern):
    return {path.name for path in (folder.parent / "cache" / "burnish").glob(pattern)}


@pytest.mark.slow
@needs_compiler
def test_only_what_changed_is_compiled_again(folder):
    one, two = folder / "one.cpp", folder / "two.cpp"
    first, second = kernels.build_library(one), kernels.build_library(two)
    assert ctypes.CDLL(str(first)).one() == 1
    assert ctypes.CDLL(str(second)).two() == 2
    assert not names(folder, "building_*")
    one.write_text(ONE.replace("return 1", "return 10"))
    changed = kernels.build_library(one)
    assert changed != first
    assert ctypes.CDLL(str(changed)).one() == 10
    assert kernels.build_library(two) == second
    (folder / "shared.h").write_text("#define SHARED 5\n")
    assert ctypes.CDLL(str(kernels.build_library(two))).two() == 6
    assert len(names(folder, "*.so")) == 4


@needs_compiler
def test_a_refused_file_is_named_and_leaves_nothing(folder):
    (folder / "two.cpp").write_text("int two() { return three(); }\n")
    with pytest.raises(RuntimeError, match=r"two\.cpp:1:20: error: .three. was not declared"):
        kernels.build_library(folder / "two.cpp")
    assert not names(folder, "*.so")
    assert not names(folder, "building_*")


@needs_compiler
@pytest.mark.slow
def test_processes_that_build_at_once_find_the_same_library(folder):
    program = (
        "import sys; from pathlib import Path; from burnish.engines.torch.native import build_library;"
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
    first, second = folder / "c++", folder / "g++"
    first.write_text("a compiler")
    second.write_text("another compiler")
    names = set()
    for compiler in (first, second, first):
        monkeypatch.setattr(shared_building, "find_compiler", lambda compiler=compiler: str(compiler))
        names.add(shared_building._find(folder / "one.cpp")[0].name)
    assert len(names) == 2
    first.write_text("an update of the compiler")
    assert shared_building._find(folder / "one.cpp")[0].name not in names


def test_without_a_compiler_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(shared_building, "find_compiler", lambda: None)
    with pytest.raises(RuntimeError, match=r"there is no C\+\+ compiler: install g\+\+ or clang\+\+, or name one in CXX"):
        kernels.build_library(folder / "two.cpp")


def test_an_older_pytorch_is_named(folder, monkeypatch):
    monkeypatch.setattr(kernels.torch, "__version__", "2.9.1+cpu")
    with pytest.raises(RuntimeError, match=r"they need PyTorch 2\.10 or later, and this is 2\.9\.1"):
        kernels.build_library(folder / "two.cpp")


def copied(kernel, folder):
    return Path(shutil.copy(kernels.sources()[kernel], folder))


def install(source, instructions, headers=None):
    compiling.BUILT.mkdir(exist_ok=True)
    library = compiling.BUILT / compiling.library_name(source, instructions, *([headers.version] if headers else []))
    compiling.compile_ahead(source, library, compiling.find_compiler(), instructions, headers)
    return library


@pytest.mark.slow
@needs_linux
@needs_compiler
def test_an_installed_library_is_taken_without_a_compiler_until_its_source_changes(folder, monkeypatch):
    library = install(folder / "two.cpp", compiling.native())
    monkeypatch.setattr(shared_building, "find_compiler", lambda: None)
    assert kernels.build_library(folder / "two.cpp") == library
    assert ctypes.CDLL(str(library)).two() == 2
    (folder / "shared.h").write_text("#define SHARED 5\n")
    assert kernels.find_installed(folder / "two.cpp") is None
    with pytest.raises(RuntimeError, match="there is no C"):
        kernels.build_library(folder / "two.cpp")


@pytest.mark.slow
@needs_linux
@needs_compiler
def test_a_refused_file_is_named_when_it_is_built_ahead(folder):
    (folder / "one.cpp").write_text("int one() { return three(); }\n")
    with pytest.raises(RuntimeError, match=r"one\.cpp:1:20: error: .three. was not declared"):
        install(folder / "one.cpp", compiling.native())
    assert not list(compiling.BUILT.iterdir())


def test_a_processor_takes_the_best_of_the_installed_libraries_that_it_can_run(folder, monkeypatch):
    best, middle, lesser, least, arm = compiling.LEVELS
    compiling.BUILT.mkdir()
    names = {level: compiling.library_name(folder / "one.cpp", level) for level in compiling.LEVELS}
    assert len(set(names.values())) == 5
    for name in names.values():
        (compiling.BUILT / name).touch()
    for machine, flags, expected in (
        ("x86_64", best.needed, best),
        ("x86_64", middle.needed, middle),
        ("x86_64", middle.needed - {"avx512vl"}, lesser),
        ("x86_64", lesser.needed - {"avx2"}, least),
        ("aarch64", {"fp", "asimd"}, arm),
    ):
        monkeypatch.setattr(compiling.platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(compiling, "processor", lambda flags=flags: " ".join(sorted(flags)))
        assert kernels.find_installed(folder / "one.cpp") == compiling.BUILT / names[expected]
    monkeypatch.setattr(compiling.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiling, "processor", lambda: "sse2")
    assert kernels.find_installed(folder / "one.cpp") is None


@needs_linux
@needs_compiler
@pytest.mark.slow
def test_a_kernel_that_was_built_without_pytorch_runs(folder):
    library = install(copied("linear", folder), compiling.native())
    program = """
import sys, torch
from burnish.engines.torch import native
torch.ops.load_library(sys.argv[1])
dy, x, weight = torch.randn(5, 3), torch.randn(5, 4), torch.randn(3, 4)
dx, dw, sums = torch.ops.burnish.linear_gradient(dy, x, weight, False, False, False, True)
torch.testing.assert_close(dx, dy @ weight)
torch.testing.assert_close(dw, dy.T @ x)
torch.testing.assert_close(sums, dy.sum(0))
dw = torch.ops.burnish.linear_gradient(dy, x, None, False, True, False, True)[1]  # an argument that may be missing
torch.testing.assert_close(dw, x.T @ dy)
try:
    torch.ops.burnish.linear_gradient(dy, x, torch.randn(4, 4), False, False, False, True)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mat1 and mat2 shapes cannot be multiplied" in done.stdout


@needs_linux
@needs_compiler
@pytest.mark.slow
def test_an_installed_library_that_includes_headers_of_pytorchs_is_for_one_release_of_it(folder, monkeypatch):
    headers = compiling.find_headers()
    assert headers.version == kernels.torch.__version__
    allocator = copied("allocator", folder)
    library = install(allocator, compiling.native(), headers)
    assert kernels.build_library(allocator) == library
    program = """
import sys, torch
from burnish.engines.torch import native
torch.ops.load_library(sys.argv[1])
assert torch.ops.burnish.keep_pages()
address = torch.full((1 << 22,), 3.).data_ptr()
assert torch.full((1 << 22,), 5.).data_ptr() == address
"""
    done = subprocess.run([sys.executable, "-c", program, str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(kernels.torch, "__version__", "2.99.0")
    assert kernels.find_installed(allocator) is None


@pytest.mark.parametrize("engine", ["TORCH", "ONNXRUNTIME"])
def test_a_library_has_one_name_whatever_path_leads_to_its_source(engine, tmp_path, monkeypatch):
    """The installation names sources from the project's folder, a session from the installed package."""
    link = tmp_path / "link"
    link.symlink_to(compiling.KERNELS.parent)
    monkeypatch.chdir(compiling.KERNELS.parent)
    level = compiling.LEVELS[0]
    for source in compiling.find_sources(getattr(compiling, engine)):
        relative = source.relative_to(compiling.KERNELS.parent)
        names = {compiling.library_name(path, level) for path in (source, relative, link / relative)}
        assert len(names) == 1, relative
        assert getattr(compiling, engine) / "native" in compiling.header_folders(relative)


def test_headers_are_looked_for_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path / name))
    assert compiling.find_headers() is None
    folder = tmp_path / "platlib" / "torch"
    (folder / "include").mkdir(parents=True)
    assert compiling.find_headers() is None
    (folder / "version.py").write_text("import os\n__all__ = ['__version__']\n__version__ = '3.4.5+cpu'\ncuda = None\n")
    assert compiling.find_headers() == compiling.Headers("3.4.5+cpu", folder / "include")


@needs_linux
@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(not (PROJECT / "setup.py").exists(), reason="needs the project's sources")
def test_a_second_installation_from_a_checkout_builds_what_the_first_has_not(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    kernel = kernels.sources()["linear"]
    headers = [header for folder in compiling.header_folders(kernel) for header in folder.glob("*.h")]
    described = (PROJECT / name for name in ("setup.py", "README.md", "src/burnish/version.py"))
    for file in (*described, compiling.KERNELS / "compiling.py", kernel, *headers):
        copy = tmp_path / file.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    project = '[project]\nname = "one"\ndynamic = ["version", "readme"]\n[tool.setuptools.packages.find]\nwhere = ["src"]\n'
    (tmp_path / "pyproject.toml").write_text(project)
    built = tmp_path / compiling.KERNELS.relative_to(PROJECT) / "built"

    def build():
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        environment = os.environ | {"BURNISH_INSTALLED_KERNELS": "native"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return {path: path.stat().st_mtime_ns for path in built.glob("*.so")}

    (library,) = first = build()
    assert library.name.startswith("burnish_linear_")
    assert build() == first
    with (tmp_path / kernel.relative_to(PROJECT)).open("a") as source:
        source.write("// changed\n")
    (changed,) = build()
    assert changed != library


@pytest.mark.slow
@pytest.mark.skipif(not (PROJECT / "setup.py").exists(), reason="needs the project's sources")
def test_an_unknown_kind_of_processor_is_refused_by_the_installation():
    pytest.importorskip("setuptools", minversion="77")
    environment = os.environ | {"BURNISH_INSTALLED_KERNELS": "native,x86-64-v9"}
    command = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "BURNISH_INSTALLED_KERNELS names x86-64-v9: give none, or some of native, " in done.stderr


@pytest.mark.slow
@needs_linux
@pytest.mark.skipif(not (PROJECT / "setup.py").exists(), reason="needs the project's sources")
def test_a_portable_distribution_has_kernels_for_every_level_of_the_machine():
    pytest.importorskip("setuptools", minversion="77")
    script = "import setuptools; from distutils.core import run_setup; "
    script += "print(*(extension.instructions.name for extension in run_setup('setup.py', stop_after='init').ext_modules))"
    environment = os.environ | {"BURNISH_INSTALLED_KERNELS": "portable"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    levels = {level.name for level in compiling.LEVELS if level.machine == compiling.platform.machine()}
    assert levels
    assert set(done.stdout.split()) == levels


@needs_compiler
@needs_linux
@pytest.mark.slow
@pytest.mark.skipif(compiling.platform.machine() != "x86_64", reason="needs a compiler for levels of x86-64")
@pytest.mark.parametrize("name", ["x86-64-v4", "x86-64-v2"])
def test_a_kernel_of_products_compiles_for_registers_of_other_widths(name, tmp_path):
    """A distribution has kernels that this machine may never compile for itself."""
    (level,) = (level for level in compiling.LEVELS if level.name == name)
    source = compiling.TORCH / "bindings" / "recurrent" / "lstm.cpp"
    compiling.compile_ahead(source, tmp_path / "lstm.so", compiling.find_compiler(), level)
    assert (tmp_path / "lstm.so").stat().st_size
