"""A wrapped module inside DistributedDataParallel, and sharded, with two workers, beside one that is not wrapped."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import burnish.torch
from burnish.errors import ConfigurationError
from oracles.pytorch_modules import MODULES

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

WORKERS = 2


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORKERS)
    torch.manual_seed(0)
    module = MODULES["residual"].build().double()
    for part in module.modules():
        if hasattr(part, "eps"):
            part.eps = 2.0**-17
    wrapped = burnish.torch.wrap(copy.deepcopy(module), torch.randn(2, 1, 8, 8, dtype=torch.float64))
    models = [DistributedDataParallel(model) for model in (module, wrapped)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(2):
        x = torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.arange(3)).backward()
            optimizer.step()
    torch.save([dict(model.module.state_dict()) for model in models], f"{folder}/{rank}.pt")
    leave()


def sharded_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORKERS)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    example = torch.randn(2, 6, dtype=torch.float64)
    wrapped = burnish.torch.wrap(copy.deepcopy(module), example)
    inside = burnish.torch.wrap(copy.deepcopy(module), example)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (WORKERS,))
    models = [fully_shard(model, mesh=mesh) for model in (module, wrapped)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(2):
        x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.arange(3)).backward()
            optimizer.step()
    states = [{name: value.full_tensor() for name, value in model.state_dict().items()} for model in models]
    fully_shard(inside[0], mesh=mesh)
    try:
        inside(example)
        refused = ""
    except ConfigurationError as error:
        refused = str(error)
    torch.save((states, refused), f"{folder}/{rank}.pt")
    leave()


def leave() -> None:
    """End a worker without destructors: one that waits for a thread of Gloo keeps the lock that the thread may be waiting for."""
    os._exit(0)


@pytest.mark.slow
def test_a_wrapped_module_is_sharded_as_a_whole_alone(tmp_path: Path):
    if not distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    torch.multiprocessing.spawn(sharded_worker, (str(tmp_path),), nprocs=WORKERS)
    for rank in range(WORKERS):
        (plain, wrapped), refused = torch.load(tmp_path / f"{rank}.pt")
        assert plain.keys() == wrapped.keys()
        for name, expected in plain.items():
            torch.testing.assert_close(wrapped[name], expected, rtol=1e-9, atol=1e-10, msg=name)
        assert "'0.weight' is sharded" in refused
        assert "shard the wrapped module as a whole" in refused


@pytest.mark.slow
def test_two_workers_train_a_wrapped_module_as_they_train_another(tmp_path: Path):
    if not distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=WORKERS)
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORKERS)]
    for plain, wrapped in states:
        for name, wanted in plain.items():
            torch.testing.assert_close(wrapped[name], wanted, rtol=1e-9, atol=1e-10, msg=name)
    for name, _ in MODULES["residual"].build().named_parameters():
        assert torch.equal(states[0][1][name], states[1][1][name]), name
