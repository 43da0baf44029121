"""A process that ends, or is forked, while a session in another of its threads computes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from burnish import stopping
from burnish.errors import EngineError
from burnish.training import Session
from oracles.tiny_program import tiny_batch, tiny_program

ENDING = """
import sys, threading, warnings
warnings.simplefilter("ignore")
from burnish.training import Session
from oracles.tiny_program import tiny_batch, tiny_program
session, begun = Session(tiny_program(), engine=sys.argv[1]), threading.Event()
def work():
    while True:
        session.step(tiny_batch())
        begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_a_daemon_thread_that_steps_does_not_abort_the_process_at_its_end(engine):
    pytest.importorskip(engine)
    done = subprocess.run([sys.executable, "-c", ENDING, engine], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_a_forked_process_is_told_of_its_parents_session_and_steps_with_its_own(engine):
    """While another thread of the parent steps, which may hold any lock."""
    program, over, begun = tiny_program(), threading.Event(), threading.Event()
    session = Session(program, engine=engine, threads=1)

    def work() -> None:
        while not over.is_set():
            session.step(tiny_batch())
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            Session(program, engine=engine, threads=1).step(tiny_batch())
            session.step(tiny_batch())
        except EngineError as error:
            status = 0 if "was opened in another process, from which this one" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    over.set()
    thread.join()
    before = session.step_count
    session.step(tiny_batch())
    assert session.step_count == before + 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_process_ends_by_itself(tmp_path):
    """ONNX Runtime would wait for a thread that it has in the parent alone."""
    code = "import os, sys, onnxruntime\nimport burnish.stopping\nif os.fork() == 0: sys.exit(7)\nprint(os.wait()[1] >> 8)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == "7"


def test_a_run_in_python_that_has_ended_is_not_stopped_any_more():
    stops = []

    def run() -> int:
        stops.extend(stopping._under_way.items())
        return 1

    assert stopping.in_python("step", run) == 1
    ((thread, stop),) = stops
    stopping._stop(thread, stop)
    assert not stop.terminate
