"""Contender: PyTorch's own training step, eager, compiled, or of a module that burnish computes. Started by ``compare.py``."""

from __future__ import annotations

from typing import Any

import torch

from contenders import Step, serve
from job import endless, read_feeds, read_job
from pytorch_step import module_of, step_of, tensors_of


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
    batches = endless(tensors_of(job, read_feeds(job)))

    def build() -> tuple[Step, dict[str, Any]]:
        module = module_of(job)
        forward = torch.compile(module) if job.get("compiled") else Wrapped(module) if job.get("wrapped") else module
        return step_of(job, module, forward, batches), {"versions": {"torch": torch.__version__}}

    serve(build)


if __name__ == "__main__":
    main()
