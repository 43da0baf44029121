"""The JavaScript client in Node, against Python: its own tests, with Node's test runner."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import c_library
import client_programs
import numpy as np
import onnxruntime
import pytest

CLIENT = Path(__file__).parents[2] / "clients" / "js"


def run(*command: str, timeout: float = 600, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=CLIENT, env=environment, capture_output=True, text=True, timeout=timeout)


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


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Python computes of every network, in a folder of each. Node would start a Python for each that it finds missing."""
    folder = tmp_path_factory.mktemp("networks")
    client_programs.main("write", str(folder))
    return folder


@pytest.mark.slow
def test_the_client_computes_in_node_what_python_does(node: str, networks: Path) -> None:
    files = sorted(str(path.relative_to(CLIENT)) for path in (CLIENT / "test" / "node").glob("*.test.mjs"))
    finished = run(node, "--test", "--test-concurrency=1", *files, PYTHON=sys.executable, BURNISH_CLIENT_FIXTURES=str(networks))
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]


@pytest.mark.campaign
def test_mobilenet_with_a_frozen_backbone_trains_in_node_and_chromium_as_in_python(node: str, tmp_path: Path) -> None:
    bundled = run(node, "bundle.mjs")
    assert bundled.returncode == 0, bundled.stderr
    file = "test/campaign/mobilenet.test.mjs"
    variables = {"PYTHON": sys.executable, "BURNISH_CLIENT_FIXTURES": str(tmp_path)}
    finished = run(node, "--test", "--test-reporter=spec", file, timeout=3600, **variables)
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]


@pytest.mark.campaign
def test_no_bit_changes_unseen_in_node(node: str, tmp_path: Path) -> None:
    variables = {"PYTHON": sys.executable, "BURNISH_CLIENT_FIXTURES": str(tmp_path)}
    finished = run(node, "--test", "--test-reporter=spec", "test/campaign/bits.test.mjs", timeout=7200, **variables)
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]


@pytest.mark.slow
def test_c_and_node_go_on_from_each_others_checkpoints(node: str, networks: Path, tmp_path: Path) -> None:
    """The same steps, taken by Python, C and Node in turn, are those of Python alone."""
    if (reason := c_library.missing()) is not None:
        pytest.skip(reason)
    folder, half = networks / "dropout", client_programs.CHECKPOINT_AT
    expected = [step["loss"] for step in json.loads((folder / "expected.json").read_text(encoding="utf-8"))["steps"]]
    batches = client_programs.read_batches(folder)
    c_client = c_library.Client(c_library.build(tmp_path, "libburnish.so"))
    losses, position, checkpoint = [], half, folder / "half.safetensors"
    for turn, runs_in_node in enumerate((True, False, True, False)):
        end, output = position + 10, tmp_path / f"{turn}.safetensors"
        if runs_in_node:
            finished = run(node, "test/steps.mjs", str(folder), str(checkpoint), str(position), str(end), str(output))
            assert finished.returncode == 0, finished.stderr
            printed = json.loads(finished.stdout)
            losses += printed["losses"]
        else:
            session = c_client.open(folder / "program")
            session.restore(checkpoint)
            losses += [session.step(batches[step % len(batches)])["loss"].item() for step in range(position, end)]
            session.save(output)
            session.close()
        position, checkpoint = end, output
    is_same_runtime = printed["version"] == onnxruntime.__version__
    np.testing.assert_allclose(losses, expected[half:position], rtol=0 if is_same_runtime else 1e-4)
