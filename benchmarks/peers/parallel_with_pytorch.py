"""Contender: one worker of PyTorch's DistributedDataParallel, batch statistics local. Started by ``data_parallel.py``.

Its ``SyncBatchNorm`` refuses to run on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from contenders import Step, serve
from job import endless, part_of_worker, read_batches, read_job
from workloads import WORKLOADS


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    dist.init_process_group("gloo")
    parts = part_of_worker(read_batches(job), dist.get_rank(), dist.get_world_size())
    arrays = [(torch.from_numpy(x), torch.from_numpy(labels)) for x, labels in parts]
    batches = endless([(x.contiguous(memory_format=torch.channels_last), labels) for x, labels in arrays])
    settings = dict(job["optimizer"])
    assert settings.pop("name") == "sgd"

    def build() -> tuple[Step, dict[str, Any]]:
        module = WORKLOADS[job["model"]].build()
        module.load_state_dict(torch.load(job["weights"], weights_only=True))
        module.train().to(memory_format=torch.channels_last)
        parallel = DistributedDataParallel(module, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(module.parameters(), fused=True, **settings)

        def step() -> float:
            x, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(parallel(x), labels)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step, {}

    serve(build)


if __name__ == "__main__":
    main()
