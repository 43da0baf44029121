"""Workers of ``tests/distributed/launched.py`` in a ``TorchTrainer`` of Ray Train, which initializes ``torch.distributed``."""

from __future__ import annotations

import tempfile

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

WORKERS = 3


def train() -> None:
    import launched

    launched.main([])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        scaling = ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 0.5})
        TorchTrainer(train, scaling_config=scaling, run_config=RunConfig(storage_path=folder)).fit()
