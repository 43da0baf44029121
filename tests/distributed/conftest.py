"""The worker processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from network_namespaces import Link

from oracles.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool():
    workers = WorkerPool(4)
    yield workers
    workers.close()


@pytest.fixture
def link() -> Iterator[Link]:
    laid = Link()
    try:
        if not laid.lay():
            pytest.skip("this machine does not let us make network namespaces (ip netns add, as root)")
        yield laid
    finally:
        laid.remove()
