"""The example under Flower's own server and nodes, each a process: one in Node where that is installed, one that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed here: make test-flower has it")

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "federated_digits"
TOOLS = Path(sys.executable).parent
CLIENTS, ROUNDS = 3, 3
PATIENCE = 600
"""Seconds: every message starts a process, which imports everything anew."""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


@contextlib.contextmanager
def started(name: str, log: Path, *arguments: object, env: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A process of Flower's in a group of its own, which ends with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [TOOLS / name, *map(str, arguments)], stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def node_command(folder: Path) -> str:
    """The command of the client in Node; empty where Node, or what it needs, is not there."""
    if shutil.which("node") is None or not (APP / "node_modules" / "burnish-runtime" / "dist").is_dir():
        return ""
    paths = [str(APP), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    write = [sys.executable, "-m", "federated_digits.write_partition", "2", str(CLIENTS), str(folder)]
    subprocess.run(write, check=True, env=environment)
    return f"node {APP / 'node_client.mjs'} {folder}"


def wait_for(log: Path, text: str, runs: subprocess.Popen) -> None:
    """Wait until a text is in the log of a process, which runs meanwhile."""
    begun = time.monotonic()
    while text not in log.read_text(errors="replace"):
        assert runs.poll() is None or text in log.read_text(errors="replace"), log.read_text(errors="replace")
        assert time.monotonic() - begun < PATIENCE, log.read_text(errors="replace")
        time.sleep(0.5)


def test_a_node_that_is_killed_in_a_round_costs_its_update_only(tmp_path):
    control = free_port()
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{control}"\ninsecure = true\n')
    env = {**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{TOOLS}:{env['PATH']}"
    command = node_command(tmp_path)
    with contextlib.ExitStack() as stack:
        link = ("--insecure", "--port", control, "--disable-runtime-dependency-installation")
        stack.enter_context(started("flower-superlink", tmp_path / "link.log", *link, env=env))
        time.sleep(5)
        nodes = []
        for number in range(CLIENTS):
            config = f"partition-id={number}" + (f' command="{command}"' if command and number == 2 else "")
            arguments = ("--insecure", "--superlink", f"127.0.0.1:{control}", "--port", free_port(), "--node-config", config)
            nodes.append(stack.enter_context(started("flower-supernode", tmp_path / f"node-{number}.log", *arguments, env=env)))
        for number in range(CLIENTS):
            wait_for(tmp_path / f"node-{number}.log", "SuperNode ID", nodes[number])
        settings = f'rounds={ROUNDS} clients={CLIENTS} available=2 epochs=2 result="{tmp_path / "result"}"'
        log = tmp_path / "run.log"
        run = stack.enter_context(started("flwr", log, "run", APP, "here", "--stream", "--run-config", settings, env=env))
        wait_for(log, f"[ROUND 2/{ROUNDS}]", run)
        kill(nodes[1])
        wait_for(log, "over the clients", run)
    joined = json.loads((tmp_path / "result" / "result.json").read_text())["joined"]
    assert joined["1"] == [0, 1, 2]
    assert joined[str(ROUNDS)] == [0, 2]
    assert set(joined["2"]) >= {0, 2}
    assert (tmp_path / "result" / "digits.onnx").is_file()
