"""A wrapped module inside DistributedDataParallel, with two workers, beside one that is not wrapped."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import burnish.torch
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
    distributed.destroy_process_group()


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
