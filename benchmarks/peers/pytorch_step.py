"""What PyTorch's contenders train by: the module, its batches and its step, as their job says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from architectures.catalogue import OPTIMIZERS
from contenders import Step
from workloads import WORKLOADS


def layout_of(job: dict[str, Any]) -> torch.memory_format:
    """The memory format that images and what is computed of them have."""
    return torch.channels_last if job.get("channels_last") else torch.contiguous_format


def tensors_of(job: dict[str, Any], batches: list[dict[str, np.ndarray]]) -> list[dict[str, torch.Tensor]]:
    """The batches as tensors. A data loader may hand them over in any memory format, so that this is no part of a step."""
    tensors = [{name: torch.from_numpy(array) for name, array in feeds.items()} for feeds in batches]
    if WORKLOADS[job["model"]].images:
        tensors = [feeds | {"x": feeds["x"].contiguous(memory_format=layout_of(job))} for feeds in tensors]
    return tensors


def module_of(job: dict[str, Any]) -> torch.nn.Module:
    """The module with its weights, in training mode; ``sparse`` lets embedding tables have gradients of the rows read alone."""
    workload = WORKLOADS[job["model"]]
    module = workload.build()
    module.load_state_dict(torch.load(job["weights"], weights_only=True))
    module.train()
    for layer in module.modules() if job.get("sparse") else ():
        if isinstance(layer, torch.nn.Embedding):
            layer.sparse = True
    return module.to(memory_format=layout_of(job)) if workload.images else module


def step_of(
    job: dict[str, Any], module: torch.nn.Module, forward: Callable[..., Any], batches: Iterator[dict[str, torch.Tensor]]
) -> Step:
    """A step of the module's parameters, whose outputs ``forward`` computes."""
    workload = WORKLOADS[job["model"]]
    autocast = job.get("precision") == "bfloat16"
    settings = dict(job["optimizer"])
    optimizer_class = OPTIMIZERS[settings.pop("name")]
    optimizer = optimizer_class(module.parameters(), **settings, **({"fused": True} if job.get("fused") else {}))

    def step() -> float:
        feeds = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = workload.loss(forward, feeds)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
