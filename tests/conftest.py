"""What every test may rely on."""

import gc
import os
import signal
import sys
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from oracles.exporter_registry import REGISTRATION, keep_registry

# How long a draw takes says how busy the machine is, and nothing of the code.
settings.register_profile("burnish", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("burnish")

# Every pass is followed by a check of names, order, dtypes and shapes, so that a wrong one fails by its name; in processes too.
os.environ["BURNISH_VERIFY_PASSES"] = "1"

# A shell starts its background jobs deaf to Ctrl-C, and their children inherit that; the tests of interrupts send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the tests a walk of the garbage collector over all that collecting them leaves: modules and test items."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if REGISTRATION in sys.modules:
        keep_registry()


@pytest.fixture
def frequent_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an epoch of a few steps have the rows of a long one in ``metrics.csv``."""
    monkeypatch.setattr("burnish.training.trainer.STEPS_PER_ROW", 1)
