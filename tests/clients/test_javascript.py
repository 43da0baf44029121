"""The JavaScript client in Node, against Python: its own tests, with Node's test runner."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLIENT = Path(__file__).parents[2] / "clients" / "js"


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=CLIENT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def node() -> str:
    """Node, with the client installed and built; a skip that says what is missing."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        pytest.skip(
            "the JavaScript client's tests need Node 20 or newer with npm on the PATH: install them, or run make test-clients"
        )
    if int(run(program, "-p", "process.versions.node.split('.')[0]").stdout) < 20:
        pytest.skip("the JavaScript client's tests need Node 20 or newer")
    if not (CLIENT / "node_modules").is_dir():
        installed = run(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund")
        if installed.returncode:
            pytest.skip(f"npm cannot install the JavaScript client's packages: {installed.stderr.strip()[-300:]}")
    built = run(program, "node_modules/typescript/bin/tsc", "-p", "tsconfig.json")
    assert built.returncode == 0, built.stdout
    return program


@pytest.mark.slow
def test_the_client_computes_in_node_what_python_does(node: str) -> None:
    files = sorted(str(path.relative_to(CLIENT)) for path in (CLIENT / "test" / "node").glob("*.test.mjs"))
    finished = run(node, "--test", "--test-concurrency=1", *files, PYTHON=sys.executable)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
