"""Contender: one worker of PyTorch's DistributedDataParallel, batch statistics local. Started by ``data_parallel.py``.

Its ``SyncBatchNorm`` refuses to run on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from contenders import Step, serve
from job import endless, part_of_worker, read_feeds, read_job
from pytorch_step import module_of, step_of, tensors_of


def main() -> None:
    job = {"channels_last": True, "fused": True, **read_job()}
    torch.set_num_threads(job["threads"])
    dist.init_process_group("gloo")
    batches = endless(tensors_of(job, part_of_worker(read_feeds(job), dist.get_rank(), dist.get_world_size())))

    def build() -> tuple[Step, dict[str, Any]]:
        module = module_of(job)
        parallel = DistributedDataParallel(module, gradient_as_bucket_view=True)
        return step_of(job, module, parallel, batches), {}

    serve(build)


if __name__ == "__main__":
    main()
