"""What the tests of the PyTorch engine need of the machine; what it lacks is said by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from burnish.engines.torch.runtime.inductor import check_compiler
from burnish.errors import EngineError


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA GPU, or the test is skipped."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and PyTorch finds none")
    return torch.device("cuda")


@pytest.fixture
def inductor() -> None:
    """A compiler for what Inductor generates, or the test is skipped."""
    try:
        check_compiler(torch.device("cpu"), "this test")
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.campaign), 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """PyTorch's threads, 1 to 3: a kernel cuts its work by them, evenly or not."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
