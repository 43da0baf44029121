"""Contender: PyTorch's own training step, eager or compiled, in a memory format. Started by ``compare.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from contenders import Step, serve
from job import endless, read_batches, read_job
from workloads import WORKLOADS

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    layout = torch.channels_last if job.get("channels_last") else torch.contiguous_format
    autocast = job["precision"] == "bfloat16"
    settings = dict(job["optimizer"])
    optimizer_class = OPTIMIZERS[settings.pop("name")]
    # A data loader may hand batches over in any memory format, so that this is no part of a step.
    images = WORKLOADS[job["model"]].images
    arrays = [(torch.from_numpy(x), torch.from_numpy(labels)) for x, labels in read_batches(job)]
    batches = endless([(x.contiguous(memory_format=layout) if images else x, labels) for x, labels in arrays])

    def build() -> tuple[Step, dict[str, Any]]:
        module = WORKLOADS[job["model"]].build()
        module.load_state_dict(torch.load(job["weights"], weights_only=True))
        module.train()
        if images:
            module = module.to(memory_format=layout)
        optimizer = optimizer_class(module.parameters(), **settings, **({"fused": True} if job.get("fused") else {}))
        forward = torch.compile(module) if job.get("compiled") else module

        def step() -> float:
            x, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = cross_entropy(forward(x), labels)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step, {"versions": {"torch": torch.__version__}}

    serve(build)


if __name__ == "__main__":
    main()
