"""torchrun, which knows nothing of burnish, starts a script, whose workers come to what one process comes to.

``make test-launchers`` tries the other launchers, and a number of workers that changes.
"""

from __future__ import annotations

import pytest

from launchers import every_launcher
from oracles.combinations import spread


@pytest.mark.slow
@spread(
    "launcher",
    [
        "torchrun",
        pytest.param("torchrun, static", marks=pytest.mark.slow),
        pytest.param("torchrun, standalone, ONNX Runtime", marks=pytest.mark.slow),
        pytest.param("torchrun, a worker killed", marks=pytest.mark.slow),
    ],
    test_all=1,
)
def test_torchrun(launcher):
    assert max(every_launcher.LAUNCHERS[launcher]()) <= every_launcher.TOLERANCE
