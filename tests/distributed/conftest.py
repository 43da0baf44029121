"""The worker processes that the tests of this folder share."""

from __future__ import annotations

import pytest

from oracles.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool():
    workers = WorkerPool(4)
    yield workers
    workers.close()
