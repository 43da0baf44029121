"""Burnish as people get it: installed from a clone of the committed tree into a new environment, with empty caches.

A benchmark calls ``enter`` first. Outside such an environment, this makes one and runs the same command there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parent.parent
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
# The variables that name the folders of compiled code, of PyTorch and of burnish.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "BURNISH_CACHE")
# A file in the environment, with the commit that burnish was installed from and the hashes of INSTALLED. It is written last, so
# that half an installation has none.
MARK = "burnish-installed-from"
# The files and folders that change an installation.
INSTALLED = ("src", "clients/c", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "benchmarks/requirements.txt")
NOT_INSTALLED = "Not from an installation: measured in a working tree, when benchmarks did not install burnish yet."
"""The mark of results that hold no ``doctor``."""
# Folders of a machine have no place in results.
FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")


def add_options(parser: ArgumentParser) -> None:
    """Add the options that choose between a working tree and an installation."""
    parser.add_argument(
        "--working-tree", action="store_true", help="a quick look at burnish as this Python imports it: install nothing"
    )
    parser.add_argument(
        "--environment", type=Path, metavar="FOLDER", help="install there, and use it again; default: a temporary folder"
    )


def enter(parser: ArgumentParser, asked: Namespace, arguments: Sequence[str] | None = None) -> None:
    """Go on in an installation. If this process is outside, make one, run the command there, and exit with its status.

    Args:
        parser: of the options; it reports errors.
        asked: the parsed options of ``add_options``, and ``save``.
        arguments: of the command; None takes those of this process.

    Raises:
        SystemExit: the command has run in an installation, or the options exclude each other.
    """
    if asked.working_tree:
        if asked.save:
            parser.error("--save publishes figures, which have to come from an installation: leave out --working-tree")
        if asked.environment:
            parser.error("--working-tree installs nothing: leave it out, or --environment")
        return
    if commit() is not None:
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="burnish-benchmark-")))
        python = install(asked.environment.resolve() if asked.environment else folder / "environment")
        caches = {name: str(folder / "caches" / name.lower()) for name in CACHES}
        command = [str(python), sys.argv[0], *(sys.argv[1:] if arguments is None else arguments)]
        status = subprocess.run(command, env=_variables() | caches, check=False).returncode
    raise SystemExit(status)


def install(environment: Path, requirements: Path | None = REQUIREMENTS, options: Sequence[str] = ()) -> Path:
    """Install burnish from a clone of the checkout at HEAD, unless the environment holds the same already.

    Args:
        environment: the folder; made if it is missing.
        requirements: a file of packages that are installed first; None for no packages.
        options: of pip, for burnish.

    Returns:
        The environment's Python.

    Raises:
        SystemExit: git or pip fails, or the folder holds other files.
    """
    mark, python = environment / MARK, environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    head, *trees = _run("git", "-C", str(CHECKOUT), "rev-parse", "HEAD", *(f"HEAD:{name}" for name in INSTALLED)).split()
    if mark.exists() and mark.read_text(encoding="utf-8").split()[1:] == trees:
        return python
    if environment.exists() and any(environment.iterdir()) and not mark.exists():
        raise SystemExit(f"{environment} holds other files, or half an installation: remove it, or name another --environment")
    if changed := _run("git", "-C", str(CHECKOUT), "status", "--porcelain", "--", *INSTALLED):
        print(f"not committed, and so not installed:\n{changed}", file=sys.stderr)
    print(f"installing burnish {head[:8]} into an environment of its own, which takes minutes", file=sys.stderr, flush=True)
    venv.create(environment, clear=True, with_pip=True)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    if requirements is not None:
        _run(*pip, "--requirement", str(requirements))
    with tempfile.TemporaryDirectory() as clone:
        _run("git", "clone", "--quiet", str(CHECKOUT), clone)
        _run("git", "-C", clone, "checkout", "--quiet", "--detach", head)
        _run(*pip, *options, clone)
    mark.write_text("\n".join([head, *trees]), encoding="utf-8")
    return python


def commit() -> str | None:
    """The commit that burnish was installed from in this process's environment; None outside an installation.

    Raises:
        SystemExit: burnish is imported from elsewhere.
    """
    mark = Path(sys.prefix) / MARK
    if not mark.exists():
        return None
    found = importlib.util.find_spec("burnish")
    origin = None if found is None else found.origin
    if origin is None or not Path(origin).is_relative_to(sys.prefix):
        raise SystemExit(f"burnish is imported from {origin}, not from the installation in {sys.prefix}: unset PYTHONPATH")
    return mark.read_text(encoding="utf-8").split()[0]


@functools.cache
def described() -> dict[str, Any]:
    """The entries of a result about the installation: ``commit``, and ``doctor`` from ``burnish doctor --json``, or none."""
    installed_from = commit()
    if installed_from is None:
        return {}
    doctor = json.loads(_run(str(Path(sys.executable).with_name("burnish")), "doctor", "--json"))
    return {"commit": installed_from, "doctor": without_folders(doctor)}


def without_folders(value: Any) -> Any:
    """A JSON-compatible value whose paths are cut down to the names of files."""
    return json.loads(FOLDERS.sub("", json.dumps(value)))


def level(result: Mapping[str, Any]) -> str:
    """The processor's level for the heading of a result, after a comma; empty if the result does not say it."""
    noted = result.get("doctor", {}).get("level")
    return f", level {noted}" if noted else ""


def _variables() -> dict[str, str]:
    """This process's environment variables but for PYTHONPATH, which could name another burnish."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run(*command: str) -> str:
    """Run a command and return its output.

    Raises:
        SystemExit: it fails.
    """
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=_variables(), cwd=tempfile.gettempdir())
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {ran.stderr.strip()}\n--working-tree looks without an installation")
    return ran.stdout.strip()
