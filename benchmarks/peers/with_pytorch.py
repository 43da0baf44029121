"""Contender: PyTorch's own training step, eager, compiled, or of a module that burnish computes. Started by ``compare.py``."""

from __future__ import annotations

from typing import Any

import torch

from architectures.catalogue import OPTIMIZERS
from contenders import Step, serve
from job import endless, read_feeds, read_job
from workloads import WORKLOADS


class Wrapped:
    """A module that is wrapped when it is first called, by what it is called with."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.wrapped: torch.nn.Module | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.wrapped is None:
            import burnish.torch

            self.wrapped = burnish.torch.wrap(self.module, kwargs or args)
        return self.wrapped(*args, **kwargs)


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    layout = torch.channels_last if job.get("channels_last") else torch.contiguous_format
    autocast = job["precision"] == "bfloat16"
    settings = dict(job["optimizer"])
    optimizer_class = OPTIMIZERS[settings.pop("name")]
    # A data loader may hand batches over in any memory format, so that this is no part of a step.
    workload = WORKLOADS[job["model"]]
    tensors = [{name: torch.from_numpy(array) for name, array in feeds.items()} for feeds in read_feeds(job)]
    if workload.images:
        tensors = [feeds | {"x": feeds["x"].contiguous(memory_format=layout)} for feeds in tensors]
    batches = endless(tensors)

    def build() -> tuple[Step, dict[str, Any]]:
        module = workload.build()
        module.load_state_dict(torch.load(job["weights"], weights_only=True))
        module.train()
        if workload.images:
            module = module.to(memory_format=layout)
        optimizer = optimizer_class(module.parameters(), **settings, **({"fused": True} if job.get("fused") else {}))
        forward = torch.compile(module) if job.get("compiled") else Wrapped(module) if job.get("wrapped") else module

        def step() -> float:
            feeds = next(batches)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = workload.loss(forward, feeds)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step, {"versions": {"torch": torch.__version__}}

    serve(build)


if __name__ == "__main__":
    main()
